package natslog;

import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.stream.Stream;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * The checked options of a write over NATS, as `pyspark_natslog.sink.options` has them. Serializable; a token that was
 * given as text, and what a URL contains, are the only secrets.
 */
final class SinkSettings implements Serializable {
  private static final List<String> OF_BROKERS =
      List.of(
          "servers", "token", "tokenFile", "tlsCaFile", "tlsCertFile", "tlsKeyFile", "fetchTimeout", "fetchRetries",
          "retryInterval");
  private static final List<String> HTTP_ONLY = List.of("stream", "onConflict");
  private static final List<String> KNOWN =
      Stream.of(
              List.of(
                  "path", "exactlyOnce", "subject", "tombstones", "txnAppId", "txnVersion", "natsServers", "ack", "ackStreams",
                  "msgIdColumn", "maxInFlight", "ackTimeout", "onError", "deadLetterSubject", "envelope"),
              NatsLogin.OPTIONS, OF_BROKERS)
          .flatMap(List::stream).toList();
  private static final List<String> EXACTLY_ONCE =
      Stream.of(List.of("path", "exactlyOnce", "stream", "subject", "tombstones"), OF_BROKERS)
          .flatMap(List::stream).toList();
  private static final long MAX_IN_FLIGHT = 20_000;
  private static final int MOST_ACK_STREAMS = 63;
  private static final String ONE_OFF_PRODUCERS = "write-";

  /** The stream that rows are appended to, each once, in real time; null: they are published over NATS. */
  final String stream;

  final String natsUrl;
  final NatsLogin login;
  /** Of the brokers that are asked which streams record a subject; null: they are not asked. */
  final Settings brokers;

  final String subject;
  /** `none`, `flush` or `stored`; null: `stored` for the subjects that streams record and ack, `flush` for others. */
  final String ack;

  final List<String> ackStreams;
  final String idColumn;
  final long maxInFlight;
  final double ackTimeoutS;
  final String deadLetterSubject;
  final boolean hasTombstones;
  /** What names a batch write, so that a repetition is recognized; null where it has no name. */
  final String transaction;

  /** What the write is left to the Python sink for; null where the JVM does it. */
  static String pythons(Map<String, String> options) {
    Map<String, String> given = new HashMap<>();
    options.forEach((name, value) -> given.put(name.toLowerCase(Locale.ROOT), value.strip()));
    if (given.getOrDefault("exactlyonce", "false").equalsIgnoreCase("true")) {
      return null;
    }
    if (!given.getOrDefault("path", "nats").equalsIgnoreCase("nats")) {
      return "option path=" + given.get("path");
    }
    if (!given.getOrDefault("envelope", "false").equalsIgnoreCase("false")) {
      return "option envelope";
    }
    if (NatsUrl.areWebSockets(natsUrl(given.get("natsservers")))) {
      return "a NATS server over WebSockets";
    }
    boolean isLong = Settings.split(given.getOrDefault("ackstreams", "")).size() > MOST_ACK_STREAMS;
    return isLong ? "option ackStreams with more than " + MOST_ACK_STREAMS + " streams" : null;
  }

  static SinkSettings of(Map<String, String> options) {
    boolean isExact = options.entrySet().stream().anyMatch(
        one -> one.getKey().equalsIgnoreCase("exactlyOnce") && one.getValue().strip().equalsIgnoreCase("true"));
    return isExact ? new SinkSettings(new Given(options, EXACTLY_ONCE), options) : new SinkSettings(options);
  }

  /** With `exactlyOnce`. */
  private SinkSettings(Given given, Map<String, String> options) {
    given.oneOf("path", "http", "http");
    stream = given.text("stream");
    if (stream == null) {
      throw NatslogException.config(
          "option stream is missing: exactlyOnce requires the stream to append to, .option(\"stream\", \"orders\")");
    }
    Settings.checkName("stream", "stream name", stream);
    subject = subject(given, "subject");
    hasTombstones = given.flag("tombstones", false);
    brokers = brokers(options);
    natsUrl = null;
    login = null;
    ack = null;
    ackStreams = List.of();
    idColumn = null;
    maxInFlight = 0;
    ackTimeoutS = 0;
    deadLetterSubject = null;
    transaction = null;
  }

  private SinkSettings(Map<String, String> options) {
    stream = null;
    for (String name : HTTP_ONLY) {
      if (options.keySet().stream().anyMatch(name::equalsIgnoreCase)) {
        throw NatslogException.config(
            "option " + name + " is for rows that are appended to a stream over HTTP: add .option(\"path\", \"http\"), "
                + "or remove it");
      }
    }
    Given given = new Given(options, KNOWN);
    natsUrl = natsUrl(given.text("natsServers"));
    NatsUrl.all(natsUrl); // what is no URL is an error before a job starts
    login = NatsLogin.of(given);
    ack = given.text("ack") == null || given.text("ack").isEmpty() ? null
        : given.oneOf("ack", "stored", "none", "flush", "stored");
    subject = subject(given, "subject");
    deadLetterSubject = deadLetterSubject(given);
    ackStreams = ackStreams(given);
    idColumn = given.text("msgIdColumn");
    Long most = given.whole("maxInFlight", 1);
    maxInFlight = most == null ? MAX_IN_FLIGHT : most;
    ackTimeoutS = given.seconds("ackTimeout", 30.0);
    hasTombstones = given.flag("tombstones", false);
    transaction = transaction(given);
    boolean asks = ack == null
        || ack.equals("stored") && Stream.of("servers", "ackStreams", "envelope").anyMatch(given::has);
    Settings found = brokers(options);
    brokers = asks ? found : null;
  }

  private static String natsUrl(String given) {
    String stated = System.getenv("NATS_URL");
    return given != null && !given.isEmpty() ? given
        : stated != null && !stated.isEmpty() ? stated : "nats://127.0.0.1:4222";
  }

  private static Settings brokers(Map<String, String> options) {
    Map<String, String> found = new HashMap<>(Map.of("streamPattern", "*"));
    options.forEach((name, value) -> {
      if (OF_BROKERS.stream().anyMatch(name::equalsIgnoreCase)) {
        found.put(name, value);
      }
    });
    return new Settings(found, null);
  }

  private static String subject(Given given, String option) {
    String text = given.text(option);
    if (text != null && !OutgoingRow.isPlainSubject(UTF8String.fromString(text))) {
      throw NatslogException.config(
          "option " + option + ": subject '" + text + "' is not one plain NATS subject: it is empty, or has a wildcard, "
              + "an empty token, a space or a control character");
    }
    if (text != null && text.getBytes(StandardCharsets.UTF_8).length > OutgoingRow.MOST_SUBJECT_BYTES) {
      throw NatslogException.config(
          "option " + option + ": a subject has at most " + OutgoingRow.MOST_SUBJECT_BYTES + " bytes");
    }
    return text;
  }

  private static String deadLetterSubject(Given given) {
    String found = subject(given, "deadLetterSubject");
    boolean isWanted = given.oneOf("onError", "fail", "fail", "deadletter").equals("deadletter");
    if (isWanted && found == null) {
      throw NatslogException.config(
          "option onError \"deadletter\" requires .option(\"deadLetterSubject\", \"orders.rejected\")");
    }
    if (!isWanted && found != null) {
      throw NatslogException.config("option deadLetterSubject requires .option(\"onError\", \"deadletter\")");
    }
    return found;
  }

  private List<String> ackStreams(Given given) {
    if (given.text("ackStreams") == null) {
      return List.of();
    }
    if (deadLetterSubject != null) {
      throw NatslogException.config(
          "option ackStreams cannot be combined with deadLetterSubject: the named streams would have to ack the dead "
              + "letters as well: remove one of the two");
    }
    if (ack != null && !ack.equals("stored")) {
      throw NatslogException.config(
          "option ackStreams requires ack \"stored\", not '" + ack + "': remove one of the two");
    }
    Set<String> found = new LinkedHashSet<>(Settings.split(given.text("ackStreams")));
    found.forEach(name -> Settings.checkName("ackStreams", "stream name", name));
    if (found.isEmpty()) {
      throw NatslogException.config("option ackStreams names no stream: write \"orders\" or \"orders,audit\"");
    }
    return List.copyOf(found);
  }

  private String transaction(Given given) {
    String appId = given.text("txnAppId");
    Long version = given.whole("txnVersion", 0);
    if (appId == null && version == null) {
      return null;
    }
    if (appId == null || version == null) {
      throw NatslogException.config(
          "options txnAppId and txnVersion belong together: set " + (appId == null ? "txnAppId" : "txnVersion")
              + " too");
    }
    Settings.checkName("txnAppId", "application", appId);
    if (appId.startsWith(ONE_OFF_PRODUCERS)) {
      throw NatslogException.config(
          "option txnAppId must not begin with '" + ONE_OFF_PRODUCERS + "', as writes without it do");
    }
    if (idColumn != null) {
      throw NatslogException.config(
          "options txnAppId and msgIdColumn clash: message ids come from one of them: remove the other");
    }
    return appId + ":" + version;
  }
}
