package natslog;

import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.Iterator;

/**
 * Messages that were written, and wait to be sent or for the acks of streams.
 *
 * <p>Theory of operation. Frames of the NATS protocol stand one after another in chunks, from which they are sent, and
 * sent again if need be. Messages that wait for acks have ascending numbers; a ring holds for each which streams have
 * not acked it, and where its frame is. A chunk is used again when all of it was sent, and all of its messages and of
 * those before are acked. No object is made for a message.
 *
 * <p>A state machine without clock and threads; its owner calls it under a lock.
 */
final class InFlight {
  /** `bytes[sent, filled)` were not taken yet; messages `[first, end)` of it wait, or have waited. */
  static final class Chunk {
    final byte[] bytes;
    int filled;
    private int sent;
    private long first;
    private long end;

    private Chunk(int size) {
      bytes = new byte[size];
    }

    private void clear(long next) {
      filled = 0;
      sent = 0;
      first = next;
      end = next;
    }
  }

  /** A part of a chunk that is to be sent. */
  record Part(Chunk chunk, int start, int length) {}

  private static final int CHUNK_BYTES = 256 * 1024;
  private static final int MOST_BYTES = 32 * 1024 * 1024;
  private static final int MOST_MESSAGES = 1024 * 1024;

  private final int mostMessages;
  private final int mask;
  private final long everyStream;
  private final long[] missing; // a bit for each stream that has not acked the message
  private final long[] writtenNs;
  private final int[] starts;
  private final int[] ends;
  private final boolean[] haveIds;
  private final ArrayDeque<Chunk> chunks = new ArrayDeque<>();
  private Chunk spare;
  private Part taken; // is being sent
  private long first; // invariant: the first message that waits, or `end`
  private long end;
  private long bytes;
  private long unsentBytes;
  private int waiting;

  /**
   * @param streams how many must ack each message, at most 63; 0: the first ack of any stream counts
   * @param mostMessages that wait at any time; no more than 32 MiB of them
   */
  InFlight(int streams, long mostMessages) {
    this.mostMessages = (int) Math.min(mostMessages, MOST_MESSAGES);
    int capacity = Integer.highestOneBit(Math.max(1, 2 * this.mostMessages - 1)) * 2;
    mask = capacity - 1;
    everyStream = (1L << Math.max(1, streams)) - 1;
    missing = new long[capacity];
    writtenNs = new long[capacity];
    starts = new int[capacity];
    ends = new int[capacity];
    haveIds = new boolean[capacity];
  }

  boolean hasRoom() {
    return isEmpty() && isSent() || waiting < mostMessages && end - first <= mask && bytes <= MOST_BYTES;
  }

  boolean isEmpty() {
    return first == end;
  }

  int waiting() {
    return waiting;
  }

  long unsentBytes() {
    return unsentBytes;
  }

  /** Whether all was handed to the connection. */
  boolean isSent() {
    return unsentBytes == 0 && taken == null;
  }

  // ---- writing ----

  /** Where the next frame can be written: behind `filled`, this many bytes at most. */
  Chunk room(int most) {
    Chunk last = chunks.peekLast();
    if (last != null && isSettled(last)) { // by itself: those before were dropped
      last.clear(end);
    }
    if (last == null || last.bytes.length - last.filled < most) {
      boolean isUsual = most <= CHUNK_BYTES;
      last = isUsual && spare != null ? spare : new Chunk(Math.max(CHUNK_BYTES, most));
      spare = isUsual ? null : spare;
      last.clear(end);
      bytes += last.bytes.length;
      chunks.addLast(last);
      dropSettled();
    }
    return last;
  }

  /** The number that the next message gets. */
  long next() {
    return end;
  }

  /**
   * A frame was written behind `filled`.
   *
   * @param waits whether for acks
   * @param hasId without one, a stream could not recognize a second copy: such a message is sent once
   */
  void add(Chunk chunk, int frameEnd, boolean waits, boolean hasId, long nowNs) {
    if (waits) {
      int place = (int) end & mask;
      missing[place] = everyStream;
      writtenNs[place] = nowNs;
      starts[place] = chunk.filled;
      ends[place] = frameEnd;
      haveIds[place] = hasId;
      chunk.end = ++end;
      waiting++;
    }
    unsentBytes += frameEnd - chunk.filled;
    chunk.filled = frameEnd;
  }

  // ---- sending ----

  /** The next part to be sent, or null. It is in use until `sent`. */
  Part take() {
    for (Chunk chunk : chunks) {
      if (chunk.sent < chunk.filled) {
        taken = new Part(chunk, chunk.sent, chunk.filled - chunk.sent);
        chunk.sent = chunk.filled;
        unsentBytes -= taken.length;
        return taken;
      }
    }
    return null;
  }

  void sent() {
    taken = null;
    dropSettled();
  }

  /** The frames of messages with ids that wait since before that time, to be sent again now. */
  byte[] late(long beforeNs, long nowNs) {
    ByteArrayOutputStream found = new ByteArrayOutputStream();
    for (Chunk chunk : chunks) {
      for (long number = Math.max(first, chunk.first); number < chunk.end; number++) {
        int place = (int) number & mask;
        boolean isLate = missing[place] != 0 && haveIds[place] && writtenNs[place] - beforeNs < 0;
        if (isLate && ends[place] <= chunk.sent) {
          found.write(chunk.bytes, starts[place], ends[place] - starts[place]);
          writtenNs[place] = nowNs;
        }
      }
    }
    return found.toByteArray();
  }

  // ---- acks ----

  /**
   * A stream has acked messages up to this number. Acks of other messages, and second ones, are ignored.
   *
   * @param stream which one, if streams were named; else 0
   * @param count how many messages
   * @return whether any of these acks came for the first time
   */
  boolean ack(int stream, long number, long count) {
    if (number < first || number >= end) {
      return false;
    }
    long bit = 1L << stream;
    boolean isNew = false;
    for (long one = Math.max(first, number - count + 1); one <= number; one++) {
      int place = (int) one & mask;
      if ((missing[place] & bit) != 0) {
        isNew = true;
        missing[place] &= ~bit;
        waiting -= missing[place] == 0 ? 1 : 0;
      }
    }
    while (first < end && missing[(int) first & mask] == 0) {
      first++;
    }
    dropSettled();
    return isNew;
  }

  boolean waitsFor(long number) {
    return number >= first && number < end && missing[(int) number & mask] != 0;
  }

  /** The lowest stream whose ack of the first waiting message is missing. */
  int firstMissingStream() {
    return Long.numberOfTrailingZeros(missing[(int) first & mask]);
  }

  /** The subject of the first waiting message. */
  String firstSubject() {
    for (Chunk chunk : chunks) {
      if (first >= chunk.first && first < chunk.end) {
        int start = starts[(int) first & mask];
        start += chunk.bytes[start] == 'H' ? "HPUB ".length() : "PUB ".length();
        int stop = start;
        while (chunk.bytes[stop] != ' ') {
          stop++;
        }
        return new String(chunk.bytes, start, stop - start, StandardCharsets.UTF_8);
      }
    }
    return "";
  }

  private boolean isSettled(Chunk chunk) {
    boolean isInUse = taken != null && taken.chunk == chunk;
    return chunk.sent == chunk.filled && chunk.end <= first && !isInUse;
  }

  /** All but the last chunk, which is written to. */
  private void dropSettled() {
    for (Iterator<Chunk> each = chunks.iterator(); chunks.size() > 1 && each.hasNext(); ) {
      Chunk chunk = each.next();
      if (!isSettled(chunk)) {
        return;
      }
      each.remove();
      bytes -= chunk.bytes.length;
      spare = chunk.bytes.length == CHUNK_BYTES ? chunk : spare;
    }
  }
}
