package natslog;

import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.net.SocketTimeoutException;
import java.util.function.Consumer;

/**
 * The body of a response, read from the connection in the thread that wants it. A read that gets nothing for the time
 * limit fails, and so do reads that wait for so long together while less than 1 KiB arrives in each second; an interrupt
 * ends it at once. Where the body was read to its end, the connection can be used again.
 */
final class Body extends InputStream {
  /** Of `length`: parts with a length each, or all until the connection is closed. */
  static final long IN_CHUNKS = -1;

  static final long UNTIL_CLOSED = -2;

  private static final int MOST_CHUNK_DIGITS = 15;
  private static final long LEAST_BYTES_PER_S = 1024;

  private final Connection connection;
  private final int timeoutMs;
  private final Consumer<Connection> atEnd;
  private final long length;
  private long left; // of the body, or of the chunk
  private long waitedNs; // in reads, since the speed was compared
  private long arrived;
  private boolean hasEnded;

  /** @param atEnd gets the connection when the body has been read to its end */
  Body(Connection connection, long length, double timeoutS, Consumer<Connection> atEnd) {
    this.connection = connection;
    this.length = length;
    this.left = Math.max(0, length);
    this.timeoutMs = (int) Math.max(1, Math.min(Integer.MAX_VALUE, 1000 * timeoutS));
    this.atEnd = atEnd;
    if (length == 0) {
      end();
    }
  }

  @Override
  public int read() throws IOException {
    byte[] one = new byte[1];
    return read(one, 0, 1) < 0 ? -1 : one[0] & 0xff;
  }

  @Override
  public int read(byte[] into, int offset, int count) throws IOException {
    if (count == 0) {
      return 0;
    }
    if (hasEnded) {
      return -1;
    }
    try {
      if (length == IN_CHUNKS && left == 0 && !hasChunk()) {
        end();
        return -1;
      }
      int most = length == UNTIL_CLOSED ? count : (int) Math.min(count, left);
      long beganNs = System.nanoTime();
      int more = connection.read(into, offset, most, timeoutMs);
      checkSpeed(System.nanoTime() - beganNs, more);
      if (more < 0) {
        if (length != UNTIL_CLOSED) {
          throw new EOFException("the broker closed the connection");
        }
        close();
        return -1;
      }
      left -= more;
      if (left == 0 && length == IN_CHUNKS) {
        endOfChunk();
      } else if (left == 0 && length > 0) {
        end();
      }
      return more;
    } catch (IOException error) {
      close();
      if (Thread.currentThread().isInterrupted()) {
        throw Broker.interrupted();
      }
      throw error instanceof SocketTimeoutException
          ? new IOException("the broker sent nothing for " + timeoutMs / 1000 + " s", error)
          : new IOException("the response ended early: " + error.getMessage(), error);
    }
  }

  private void checkSpeed(long ns, int more) throws IOException {
    waitedNs += ns;
    arrived += Math.max(0, more);
    if (waitedNs >= 1_000_000L * timeoutMs) {
      if (arrived < LEAST_BYTES_PER_S * (waitedNs / 1e9)) {
        throw new IOException("it arrived at less than " + LEAST_BYTES_PER_S + " bytes per second");
      }
      waitedNs = 0;
      arrived = 0;
    }
  }

  /**
   * Whether a read would not wait: something has arrived, or the body has ended. Waits for that between two parts of a
   * body in chunks, for as long as the broker has nothing to send.
   */
  boolean hasMore(long withinMs) throws IOException {
    if (hasEnded || left > 0) {
      return true;
    }
    try {
      return connection.hasMore((int) Math.max(1, Math.min(withinMs, Integer.MAX_VALUE)));
    } catch (IOException error) {
      close();
      if (Thread.currentThread().isInterrupted()) {
        throw Broker.interrupted();
      }
      throw error;
    }
  }

  private void endOfChunk() throws IOException {
    if (!connection.line(System.nanoTime() + 1_000_000L * timeoutMs).isEmpty()) {
      throw new IOException("a chunk is longer than its length");
    }
  }

  /** Reads the line before a chunk; false where it was the last one. */
  private boolean hasChunk() throws IOException {
    long untilNs = System.nanoTime() + 1_000_000L * timeoutMs;
    String size = connection.line(untilNs).split(";", 2)[0].strip();
    if (!size.matches("[0-9a-fA-F]{1," + MOST_CHUNK_DIGITS + "}")) {
      throw new IOException("a chunk has no length");
    }
    left = Long.parseLong(size, 16);
    if (left == 0) {
      for (int lines = 0; !connection.line(untilNs).isEmpty(); lines++) {
        if (lines == Http.MOST_HEADERS) {
          throw new IOException("it has too many trailers");
        }
      }
    }
    return left > 0;
  }

  private void end() {
    hasEnded = true;
    atEnd.accept(connection);
  }

  /** What was not read is dropped, with the connection. */
  @Override
  public void close() {
    if (!hasEnded) {
      hasEnded = true;
      connection.close();
    }
  }
}
