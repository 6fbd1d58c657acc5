package natslog;

import java.io.IOException;
import java.net.SocketTimeoutException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.net.ssl.SSLContext;

/**
 * HTTP/1.1 as the API of brokers needs it, made and read in the thread of the caller: a task that reads messages copies
 * each byte from the socket itself, without threads and queues between. Connections are kept for the next request.
 * Shared by all threads.
 */
final class Http {
  /** `header`: names in small letters. */
  record Response(int status, Map<String, String> headers, Body body) {
    String header(String name) {
      return headers.get(name.toLowerCase(Locale.ROOT));
    }
  }

  private record Origin(boolean isSecure, String host, int port) {}

  static final int MOST_HEADERS = 256;

  private static final double CONNECT_S = 3;
  private static final int KEPT_S = 30;
  private static final int MOST_KEPT = 64; // of one origin
  private static final Pattern URL = Pattern.compile(
      "(https?)://(?:[^/?#@]*@)?(\\[[^]/?#]+]|[^:/?#\\[\\]]+)(?::(\\d{1,5}))?(/[!-~&&[^#]]*)?");
  private static final Pattern STATUS = Pattern.compile("(?s)HTTP/1\\.([01]) ([1-9]\\d\\d)(?: .*)?");
  private static final Pattern NAME = Pattern.compile("[!#$%&'*+.^_`|~0-9A-Za-z-]+");
  private static final int REQUEST_TIMEOUT = 408;
  private static final int MOST_HEAD_CHARS = 64 * 1024;

  private final SSLContext tls;
  private final Map<Origin, ArrayDeque<Connection>> kept = new HashMap<>();
  private boolean isWatched;

  Http(SSLContext tls) {
    this.tls = tls;
  }

  /**
   * @param headers of the request, by name: what they contain is printable ASCII
   * @param timeoutS for the head of the response, and then for each piece of its body
   * @throws IllegalArgumentException if this is not an http(s) URL of printable ASCII
   */
  Response send(String method, String url, Map<String, String> headers, byte[] body, double timeoutS)
      throws IOException {
    Matcher parts = URL.matcher(url);
    if (!parts.matches()) {
      throw new IllegalArgumentException("not a URL");
    }
    boolean isSecure = parts.group(1).equals("https");
    int port = parts.group(3) != null ? Integer.parseInt(parts.group(3)) : isSecure ? 443 : 80;
    if (port < 1 || port > 65_535) {
      throw new IllegalArgumentException("not a port");
    }
    Origin origin = new Origin(isSecure, parts.group(2).replaceAll("[\\[\\]]", ""), port);
    String host = parts.group(2) + (parts.group(3) == null ? "" : ":" + port);
    byte[] request = request(method + " " + (parts.group(4) == null ? "/" : parts.group(4)), host, headers, body);
    long untilNs = System.nanoTime() + (long) (1e9 * timeoutS);
    Connection connection = take(origin);
    if (connection != null) {
      Response found = exchanged(connection, origin, request, untilNs, timeoutS, true);
      if (found != null) {
        return found;
      }
    }
    try {
      connection = Connection.open(origin.host, port, isSecure ? tls : null, CONNECT_S, untilNs);
    } catch (IOException error) {
      throw explained(error, timeoutS);
    }
    return exchanged(connection, origin, request, untilNs, timeoutS, false);
  }

  private static byte[] request(String line, String host, Map<String, String> headers, byte[] body) {
    StringBuilder head = new StringBuilder(line).append(" HTTP/1.1\r\nHost: ").append(host).append("\r\n");
    headers.forEach((name, value) -> head.append(name).append(": ").append(value).append("\r\n"));
    byte[] content = body == null ? new byte[0] : body;
    if (body != null) {
      head.append("Content-Length: ").append(content.length).append("\r\n");
    }
    byte[] start = head.append("\r\n").toString().getBytes(StandardCharsets.ISO_8859_1);
    byte[] found = Arrays.copyOf(start, start.length + content.length);
    System.arraycopy(content, 0, found, start.length, content.length);
    return found;
  }

  /** Null: the broker has closed the connection while it was not used. The request can be sent again. */
  private Response exchanged(Connection connection, Origin origin, byte[] request, long untilNs, double timeoutS,
      boolean wasKept) throws IOException {
    boolean isAnswered = false;
    String status = null;
    try {
      connection.write(request, untilNs);
      status = connection.line(untilNs);
      Response found = response(status, connection, origin, untilNs, timeoutS);
      isAnswered = !wasKept || found.status() != REQUEST_TIMEOUT; // which a proxy sends on a connection that was idle
      return isAnswered ? found : null;
    } catch (IOException error) {
      boolean isLate = error instanceof SocketTimeoutException || Thread.currentThread().isInterrupted();
      if (wasKept && status == null && !isLate) {
        return null;
      }
      throw explained(error, timeoutS);
    } finally {
      if (!isAnswered) {
        connection.close();
      }
    }
  }

  private Response response(String first, Connection connection, Origin origin, long untilNs, double timeoutS)
      throws IOException {
    String line = first;
    while (true) {
      Matcher status = STATUS.matcher(line);
      if (!status.matches()) {
        throw new IOException("the response is not HTTP");
      }
      int code = Integer.parseInt(status.group(2));
      Map<String, String> headers = headers(connection, untilNs);
      if (code >= 200) {
        String after = headers.getOrDefault("connection", "").toLowerCase(Locale.ROOT);
        boolean isKept = status.group(1).equals("1") && !after.contains("close");
        long length = length(code, headers);
        return new Response(code, headers, new Body(connection, length, timeoutS, ended -> {
          if (isKept) {
            keep(origin, ended);
          } else {
            ended.close();
          }
        }));
      }
      line = connection.line(untilNs); // behind an interim response
    }
  }

  private static Map<String, String> headers(Connection connection, long untilNs) throws IOException {
    Map<String, String> found = new HashMap<>();
    int count = 0;
    int chars = 0;
    for (String line = connection.line(untilNs); !line.isEmpty(); line = connection.line(untilNs)) {
      int colon = line.indexOf(':');
      chars += line.length();
      boolean isHeader = colon > 0 && NAME.matcher(line.substring(0, colon)).matches();
      if (!isHeader || ++count > MOST_HEADERS || chars > MOST_HEAD_CHARS) {
        throw new IOException("the response has headers that are not HTTP, or too many");
      }
      String name = line.substring(0, colon).toLowerCase(Locale.ROOT);
      String value = line.substring(colon + 1).strip();
      String former = found.putIfAbsent(name, value);
      if (former != null && name.equals("content-length") && !former.equals(value)) {
        throw new IOException("the response states two lengths");
      }
    }
    return found;
  }

  /** Of the body, in bytes. */
  private static long length(int status, Map<String, String> headers) throws IOException {
    if (status == 204 || status == 304) {
      return 0;
    }
    String coding = headers.get("transfer-encoding");
    if (coding != null) {
      if (!coding.equalsIgnoreCase("chunked")) {
        throw new IOException("the response has a transfer coding other than chunked");
      }
      return Body.IN_CHUNKS;
    }
    String length = headers.get("content-length");
    if (length == null) {
      return Body.UNTIL_CLOSED;
    }
    if (!length.matches("\\d{1,18}")) {
      throw new IOException("the response has no valid length");
    }
    return Long.parseLong(length);
  }

  /** As an error of the caller: an interrupt, what took too long, or the error itself. */
  private static IOException explained(IOException error, double timeoutS) {
    if (Thread.currentThread().isInterrupted()) {
      throw Broker.interrupted();
    }
    boolean isLate = error instanceof SocketTimeoutException;
    return isLate ? new SocketTimeoutException("no response within " + Broker.seconds(timeoutS)) : error;
  }

  // ---- connections that wait for the next request ----

  private synchronized Connection take(Origin origin) {
    ArrayDeque<Connection> found = kept.get(origin);
    while (found != null && !found.isEmpty()) {
      Connection connection = found.pollLast();
      if (connection.isQuiet()) {
        return connection;
      }
      connection.close();
    }
    return null;
  }

  private synchronized void keep(Origin origin, Connection connection) {
    ArrayDeque<Connection> others = kept.computeIfAbsent(origin, unused -> new ArrayDeque<>());
    if (others.size() >= MOST_KEPT || connection.hasUnread()) { // more than its response: not HTTP
      connection.close();
      return;
    }
    connection.idleSinceNs = System.nanoTime();
    others.addLast(connection);
    watch();
  }

  private void watch() {
    if (!isWatched) {
      isWatched = true;
      Connection.TIMER.schedule(this::closeIdle, KEPT_S, TimeUnit.SECONDS);
    }
  }

  private synchronized void closeIdle() {
    long before = System.nanoTime() - TimeUnit.SECONDS.toNanos(KEPT_S);
    for (ArrayDeque<Connection> idle : kept.values()) {
      while (!idle.isEmpty() && idle.peekFirst().idleSinceNs - before <= 0) {
        idle.pollFirst().close();
      }
    }
    kept.values().removeIf(ArrayDeque::isEmpty);
    isWatched = false;
    if (!kept.isEmpty()) {
      watch();
    }
  }
}
