package natslog;

import java.io.Serializable;
import java.util.List;

/**
 * Offsets `[start, end)` of the stream with this id.
 *
 * @param urls the brokers that have it, nearest first
 * @param bytes as they are stored; estimated from the rows where that is unknown to this reader
 * @param epoch the newest one known when it was planned, so that a task accepts no answer of an older leader
 * @param isOpen whether it begins where the log did, so that what retention removes before it is read is not missing
 */
record Range(
    String stream, String id, long start, long end, List<String> urls, long bytes, long epoch, boolean isOpen,
    String passed)
    implements Serializable {
  Range(String stream, String id, long start, long end, boolean isOpen) {
    this(stream, id, start, end, List.of(), 0, 0, isOpen, null);
  }

  /** Behind this position: without what was passed in front of it. */
  Range behind(Position at) {
    return new Range(stream, id, start, end, urls, bytes, epoch, isOpen, at.passedBeyond(start, List.of()));
  }

  long rows() {
    return end - start;
  }

  /** Where it begins now, as the broker states it with an error; `at` where nothing before it was removed. */
  long leftFrom(long at, long upto, NatslogException error) {
    boolean isStated = isOpen && error.is("offset_out_of_range");
    return isStated && error.facts.get("log_start_offset") instanceof Long first && first > at
        ? Math.min(first, upto) : at;
  }
}
