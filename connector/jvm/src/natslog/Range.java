package natslog;

import java.io.Serializable;
import java.util.List;

/**
 * Offsets `[start, end)` of the stream with this id.
 *
 * @param urls the brokers that have it, nearest first
 * @param bytes as they are stored; estimated from the rows where that is unknown to this reader
 * @param epoch the newest one known when it was planned, so that a task accepts no answer of an older leader
 */
record Range(String stream, String id, long start, long end, List<String> urls, long bytes, long epoch)
    implements Serializable {
  Range(String stream, String id, long start, long end) {
    this(stream, id, start, end, List.of(), 0, 0);
  }

  long rows() {
    return end - start;
  }

  Range within(long newStart, long newEnd) {
    return new Range(stream, id, newStart, newEnd, urls, 0, epoch);
  }
}
