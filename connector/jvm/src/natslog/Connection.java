package natslog;

import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.net.ConnectException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.net.StandardSocketOptions;
import java.net.UnknownHostException;
import java.nio.ByteBuffer;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLParameters;
import javax.net.ssl.SSLSocket;

/**
 * A TCP or TLS connection to a broker, used by one thread at a time. All of its calls wait in that thread, and an
 * interrupt of the thread closes the connection: the call fails, and the thread stays interrupted.
 */
final class Connection {
  /** For limits that sockets do not have, and for what is to be closed later. Its thread ends when there is nothing. */
  static final ScheduledThreadPoolExecutor TIMER = timer();

  private static final int AHEAD_BYTES = 16 * 1024;

  /** Of one call: the JDK copies through a buffer of this size outside of the heap. */
  private static final int MOST_READ_BYTES = 128 * 1024;

  /** What the system always takes of a connection on which nothing else is being sent. */
  private static final int FITS_BYTES = 8 * 1024;

  private static final int MOST_LINE_BYTES = 64 * 1024;

  private final SocketChannel channel;
  private final Socket socket; // the channel's, or TLS above it
  private final InputStream in;
  private final OutputStream out;
  private final byte[] ahead = new byte[AHEAD_BYTES];
  private int at;
  private int filled;

  /** When the last response on it was complete. */
  long idleSinceNs;

  private Connection(SocketChannel channel, Socket socket) throws IOException {
    this.channel = channel;
    this.socket = socket;
    this.in = socket.getInputStream();
    this.out = socket.getOutputStream();
  }

  /**
   * Tries each address of the host.
   *
   * @param tls null: without TLS
   * @param withinS for each address
   * @param untilNs for all of them, and the TLS handshake
   */
  static Connection open(String host, int port, SSLContext tls, double withinS, long untilNs) throws IOException {
    InetAddress[] addresses;
    try {
      addresses = InetAddress.getAllByName(host);
    } catch (UnknownHostException error) {
      throw new ConnectException("the host name cannot be resolved");
    }
    IOException problem = null;
    for (InetAddress address : addresses) {
      SocketChannel channel = SocketChannel.open();
      boolean isOpen = false;
      try {
        channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
        int withinMs = Math.min((int) (1000 * withinS), leftMs(untilNs));
        channel.socket().connect(new InetSocketAddress(address, port), withinMs);
        Connection found = new Connection(channel, tls == null ? channel.socket() : secured(channel, host, port, tls));
        found.shakeHands(untilNs);
        isOpen = true;
        return found;
      } catch (IOException error) {
        problem = error;
        if (Thread.currentThread().isInterrupted()) {
          break;
        }
      } finally {
        if (!isOpen) {
          channel.close();
        }
      }
    }
    throw problem;
  }

  private static SSLSocket secured(SocketChannel channel, String host, int port, SSLContext tls) throws IOException {
    SSLSocket found = (SSLSocket) tls.getSocketFactory().createSocket(channel.socket(), host, port, true);
    SSLParameters parameters = found.getSSLParameters();
    parameters.setEndpointIdentificationAlgorithm("HTTPS"); // the certificate must be for this host
    found.setSSLParameters(parameters);
    return found;
  }

  private void shakeHands(long untilNs) throws IOException {
    if (socket instanceof SSLSocket secured) {
      limited(untilNs, secured::startHandshake);
    }
  }

  /** TLS above this connection, which must not be used any more. */
  Connection secured(String host, int port, SSLContext tls, long untilNs) throws IOException {
    if (hasUnread()) {
      throw new IOException("the server sent data before the TLS handshake");
    }
    Connection found = new Connection(channel, secured(channel, host, port, tls));
    found.shakeHands(untilNs);
    return found;
  }

  /** By another thread than the one that reads. The connection is closed if this takes too long. */
  void write(byte[] bytes, int offset, int length, double withinS) throws IOException {
    Future<?> limit = TIMER.schedule(this::close, (long) (1000 * withinS), TimeUnit.MILLISECONDS);
    try {
      out.write(bytes, offset, length);
    } finally {
      limit.cancel(false);
    }
  }

  void write(byte[] bytes, long untilNs) throws IOException {
    if (bytes.length <= FITS_BYTES) {
      out.write(bytes);
    } else {
      limited(untilNs, () -> out.write(bytes));
    }
  }

  private interface Step {
    void run() throws IOException;
  }

  /** The connection is closed if this takes too long. */
  private void limited(long untilNs, Step step) throws IOException {
    Future<?> limit = TIMER.schedule(this::close, leftMs(untilNs), TimeUnit.MILLISECONDS);
    try {
      socket.setSoTimeout(leftMs(untilNs));
      step.run();
    } catch (IOException error) {
      throw limit.isDone() ? new SocketTimeoutException() : error;
    } finally {
      limit.cancel(false);
    }
  }

  /** Up to this number of bytes, as they arrive; -1 where the broker has closed the connection. */
  int read(byte[] into, int offset, int length, int timeoutMs) throws IOException {
    if (at == filled) {
      socket.setSoTimeout(timeoutMs);
      if (length >= AHEAD_BYTES) {
        return in.read(into, offset, Math.min(length, MOST_READ_BYTES));
      }
      at = 0;
      filled = 0;
      int more = in.read(ahead, 0, AHEAD_BYTES);
      if (more < 0) {
        return -1;
      }
      filled = more;
    }
    int count = Math.min(length, filled - at);
    System.arraycopy(ahead, at, into, offset, count);
    at += count;
    return count;
  }

  /** Whether something has arrived that was not read. Waits for it. */
  boolean hasMore(int withinMs) throws IOException {
    if (at == filled) {
      socket.setSoTimeout(withinMs);
      try {
        int more = in.read(ahead, 0, AHEAD_BYTES);
        if (more < 0) {
          throw new EOFException("the broker closed the connection");
        }
        at = 0;
        filled = more;
      } catch (SocketTimeoutException error) {
        return false;
      }
    }
    return true;
  }

  /** Whether the broker has neither closed it nor sent anything while it was idle. (Of TLS that cannot be seen.) */
  boolean isQuiet() {
    if (socket instanceof SSLSocket) {
      return true;
    }
    try {
      channel.configureBlocking(false);
      int count = channel.read(ByteBuffer.allocate(1));
      channel.configureBlocking(true);
      return count == 0;
    } catch (IOException error) {
      return false;
    }
  }

  boolean hasUnread() {
    return at < filled;
  }

  /** The next line of the head of a response, without its end. */
  String line(long untilNs) throws IOException {
    byte[] found = new byte[128];
    int count = 0;
    for (byte[] one = new byte[1]; ; count++) {
      if (at == filled) {
        int most = leftMs(untilNs);
        if (read(one, 0, 1, most) < 0) {
          throw new EOFException("the broker closed the connection");
        }
      } else {
        one[0] = ahead[at++];
      }
      if (one[0] == '\n') {
        int end = count > 0 && found[count - 1] == '\r' ? count - 1 : count;
        return new String(found, 0, end, StandardCharsets.ISO_8859_1);
      }
      if (count == MOST_LINE_BYTES) {
        throw new IOException("the response is not HTTP, or it has very long headers");
      }
      if (count == found.length) {
        found = Arrays.copyOf(found, 2 * count);
      }
      found[count] = one[0];
    }
  }

  /** At once, also while another thread uses it; TLS is not told. */
  void close() {
    try {
      channel.close();
    } catch (IOException error) {
      throw new UncheckedIOException(error); // the system closes it in any case
    }
  }

  private static int leftMs(long untilNs) throws SocketTimeoutException {
    long left = (untilNs - System.nanoTime()) / 1_000_000;
    if (left <= 0) {
      throw new SocketTimeoutException();
    }
    return (int) Math.min(left, Integer.MAX_VALUE);
  }

  private static ScheduledThreadPoolExecutor timer() {
    ScheduledThreadPoolExecutor found = new ScheduledThreadPoolExecutor(1, task -> {
      Thread thread = new Thread(task, "natslog-connections");
      thread.setDaemon(true);
      return thread;
    });
    found.setKeepAliveTime(10, TimeUnit.SECONDS);
    found.allowCoreThreadTimeOut(true);
    found.setRemoveOnCancelPolicy(true);
    return found;
  }
}
