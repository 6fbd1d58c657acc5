package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.EOFException;
import java.io.IOException;
import java.net.SocketTimeoutException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import javax.net.ssl.SSLException;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The NATS protocol on a connection. One thread calls `readAll`, and another one writes.
 *
 * <p>Invariant: where TLS was asked for, nothing is sent to a server without TLS: a server, or an attacker on the
 * network, could say that TLS is not required.
 */
final class NatsConnection {
  /** Gets what the server sends, in the thread that reads. */
  interface Receiver {
    /** A message: the ranges of its subject and its payload, without headers. They are valid during the call. */
    void message(byte[] buffer, int subject, int subjectEnd, int payload, int payloadEnd);

    void ping();

    void pong();

    /** The text of `-ERR`. */
    void error(String text);

    /** All that had arrived was passed on. */
    void caughtUp();
  }

  /** Why there is no connection; the message has what to correct, unless the server may just not run. */
  static final class Refused extends IOException {
    final boolean isLogin;

    Refused(String message, boolean isLogin) {
      super(message);
      this.isLogin = isLogin;
    }
  }

  private static final Logger LOG = LoggerFactory.getLogger("natslog.sink");
  private static final double CONNECT_S = 3;
  private static final int BUFFER_BYTES = 64 * 1024;
  private static final int MOST_FRAME_BYTES = 64 * 1024 * 1024;
  private static final List<String> LOGIN_WORDS = List.of("authorization", "authentication", "credentials", "nkey");

  private final Connection connection;
  final int maxPayloadBytes;
  /** Other servers of the cluster, as the server names them: `host:port`. */
  final List<String> others = new ArrayList<>();

  private NatsConnection(Connection connection, JsonNode info) {
    this.connection = connection;
    maxPayloadBytes = info.path("max_payload").asInt(1024 * 1024);
    info.path("connect_urls").forEach(url -> others.add(url.asText()));
  }

  /** @param name shown in the server's list of connections */
  static NatsConnection open(NatsUrl url, NatsLogin login, String name) throws IOException {
    boolean wantsTls = login.wantsTls() || url.isSecure();
    long untilNs = System.nanoTime() + (long) (1e9 * CONNECT_S);
    Connection connection = null;
    boolean isOpen = false;
    try {
      connection = Connection.open(
          url.host(), url.port(), login.isHandshakeFirst() ? login.tls() : null, CONNECT_S, untilNs);
      JsonNode info = info(connection, untilNs);
      boolean hasTls = login.isHandshakeFirst();
      boolean mustHaveTls = info.path("tls_required").asBoolean();
      if (!hasTls && (mustHaveTls || wantsTls && info.path("tls_available").asBoolean())) {
        connection = connection.secured(url.host(), url.port(), login.tls(), untilNs);
        hasTls = true;
      }
      if (wantsTls && !hasTls) {
        throw new Refused("the server does not offer TLS, so no credentials were sent: turn TLS on there, or correct "
            + "the URL", false);
      }
      connection.write(connect(url, login, name, info), untilNs);
      for (String answer = connection.line(untilNs); !answer.equals("PONG"); answer = connection.line(untilNs)) {
        if (answer.startsWith("-ERR")) {
          throw refusal(answer.substring(4).strip(), login);
        }
      }
      isOpen = true;
      return new NatsConnection(connection, info);
    } catch (SSLException error) {
      throw new Refused("the TLS handshake failed (" + error.getMessage() + "): " + login.tlsRemedy(), false);
    } catch (SocketTimeoutException error) {
      throw new IOException("no answer within " + Broker.seconds(CONNECT_S), error);
    } catch (EOFException error) {
      throw new IOException("the server closed the connection", error);
    } finally {
      if (!isOpen && connection != null) {
        connection.close();
      }
    }
  }

  /** What a server states first. */
  private static JsonNode info(Connection connection, long untilNs) throws IOException {
    String line = "";
    try {
      line = connection.line(untilNs);
    } catch (EOFException | SocketTimeoutException error) {
      LOG.debug("a NATS server has sent nothing", error);
    }
    JsonNode info = line.startsWith("INFO ") ? Json.parse(line.substring(5)) : null;
    if (info == null) {
      throw new Refused("the server did not begin with INFO: if it begins with the TLS handshake, set "
          + "natsTlsHandshakeFirst; else check that the URL is of a NATS server, and that it runs", false);
    }
    return info;
  }

  private static byte[] connect(NatsUrl url, NatsLogin login, String name, JsonNode info) {
    Map<String, Object> fields = new HashMap<>(Map.of(
        "verbose", false, "pedantic", false, "lang", "java", "version", "natslog", "protocol", 1, "headers", true,
        "no_responders", true, "name", name));
    if (url.password() != null) {
      fields.put("user", url.user());
      fields.put("pass", url.password());
    } else if (url.user() != null) {
      fields.put("auth_token", url.user());
    }
    fields.putAll(login.fields(info.path("nonce").asText(null)));
    return ("CONNECT " + Json.text(fields) + "\r\nPING\r\n").getBytes(StandardCharsets.UTF_8);
  }

  private static Refused refusal(String text, NatsLogin login) {
    String quoted = text.replaceAll("^'|'$", "");
    boolean isLogin = LOGIN_WORDS.stream().anyMatch(quoted.toLowerCase(Locale.ROOT)::contains);
    return new Refused(isLogin ? quoted + "): " + login.remedy() : quoted, isLogin);
  }

  void write(byte[] bytes, int offset, int length, double withinS) throws IOException {
    connection.write(bytes, offset, length, withinS);
  }

  void close() {
    connection.close();
  }

  // ---- what the server sends ----

  /** Passes on all frames, until the connection ends. */
  void readAll(Receiver receiver) throws IOException {
    byte[] buffer = new byte[BUFFER_BYTES];
    int start = 0;
    int end = 0;
    while (true) {
      for (int next = frame(buffer, start, end, receiver); next > start; next = frame(buffer, start, end, receiver)) {
        start = next;
      }
      receiver.caughtUp();
      System.arraycopy(buffer, start, buffer, 0, end - start);
      end -= start;
      start = 0;
      if (end == buffer.length) {
        if (end >= MOST_FRAME_BYTES) {
          throw new IOException("the server sent a frame of more than " + MOST_FRAME_BYTES + " bytes");
        }
        buffer = Arrays.copyOf(buffer, 2 * end);
      }
      int more = connection.read(buffer, end, buffer.length - end, 0);
      if (more < 0) {
        throw new EOFException("the server closed the connection");
      }
      end += more;
    }
  }

  /** Where the frame ends that begins at `start`; `start` where not all of it has arrived. */
  private static int frame(byte[] buffer, int start, int end, Receiver receiver) throws IOException {
    int lineEnd = start;
    while (lineEnd < end && buffer[lineEnd] != '\n') {
      lineEnd++;
    }
    if (lineEnd >= end) {
      return start;
    }
    int textEnd = lineEnd > start && buffer[lineEnd - 1] == '\r' ? lineEnd - 1 : lineEnd;
    int length = textEnd - start;
    byte first = length == 0 ? 0 : buffer[start];
    if (first == 'M' || first == 'H') {
      return message(buffer, start, textEnd, lineEnd + 1, end, receiver);
    }
    if (first == 'P' && length == 4) {
      if (buffer[start + 1] == 'I') {
        receiver.ping();
      } else {
        receiver.pong();
      }
    } else if (first == '-') {
      receiver.error(new String(buffer, start, length, StandardCharsets.UTF_8).replaceFirst("^-ERR\\s*", ""));
    } else if (first != '+' && first != 'I') {
      throw new IOException("the server sent what is not NATS");
    }
    return lineEnd + 1;
  }

  /** `MSG subject sid [reply] bytes`, or `HMSG subject sid [reply] header-bytes bytes`. */
  private static int message(byte[] buffer, int start, int textEnd, int body, int end, Receiver receiver)
      throws IOException {
    int at = start;
    while (at < textEnd && buffer[at] != ' ') {
      at++;
    }
    int subject = at + 1;
    int subjectEnd = subject;
    while (subjectEnd < textEnd && buffer[subjectEnd] != ' ') {
      subjectEnd++;
    }
    int last = lastWord(buffer, subjectEnd, textEnd);
    long bytes = number(buffer, last, textEnd);
    long headerBytes = 0;
    if (buffer[start] == 'H') {
      headerBytes = number(buffer, lastWord(buffer, subjectEnd, last - 1), last - 1);
    }
    if (bytes < 0 || bytes > MOST_FRAME_BYTES || headerBytes < 0 || headerBytes > bytes) {
      throw new IOException("the server sent what is not NATS");
    }
    if (body + bytes + 2 > end) {
      return start;
    }
    int bodyEnd = body + (int) bytes;
    receiver.message(buffer, subject, subjectEnd, body + (int) headerBytes, bodyEnd);
    return bodyEnd + 2;
  }

  private static int lastWord(byte[] buffer, int start, int end) {
    int at = end;
    while (at > start && buffer[at - 1] != ' ') {
      at--;
    }
    return at;
  }

  /** The decimal number there; below zero where there is none that fits. */
  static long number(byte[] buffer, int start, int end) {
    long found = start < end ? 0 : -1;
    for (int at = start; at < end; at++) {
      int digit = buffer[at] - '0';
      if (digit < 0 || digit > 9 || found > Long.MAX_VALUE / 10 - 1) {
        return -1;
      }
      found = 10 * found + digit;
    }
    return found;
  }
}
