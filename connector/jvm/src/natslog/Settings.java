package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.ObjectInputStream;
import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.regex.Pattern;
import java.util.stream.Stream;

/** The checked options of a read. Serializable; a token that was given as text is the only secret. */
final class Settings implements Serializable {
  /** Where to start or end: a time if one is given, else a position per stream, else the default. */
  record Bound(Long timeUs, Map<String, Long> timesUs, Map<String, String> positions, String otherwise)
      implements Serializable {
    Long timeUsOf(String stream) {
      return timesUs.getOrDefault(stream, timeUs);
    }

    /** `earliest`, `latest`, `cursor:NAME` or the digits of an offset. */
    String of(String stream) {
      return positions.getOrDefault(stream, otherwise);
    }

    /** Whether it is `earliest`: what retention removes before it is read is not missing then. */
    boolean isLogStart(String stream) {
      return timeUsOf(stream) == null && of(stream).equals("earliest");
    }
  }

  private static final List<String> BATCH_ONLY = List.of("endingOffsets", "endingTimestamp");
  private static final List<String> STREAM_ONLY =
      List.of("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "lag",
          "realTimeReaders", "realTimeReadersBy");
  private static final List<String> OF_BOTH =
      List.of(
          "servers", "stream", "streamPattern", "group", "path", "startingOffsets", "startingTimestamp",
          "failOnDataLoss", "minPartitions", "maxRecordsPerPartition", "maxBytesPerPartition", "readFrom", "rack",
          "includeHeaders", "columns", "subjectFilter", "filterPushdown", "payloadFormat", "token", "tokenFile", "tlsCaFile",
          "tlsCertFile", "tlsKeyFile", "fetchTimeout", "fetchRetries", "retryInterval");

  /** Options of the Python source that this one leaves to it, besides formats of payloads. */
  private static final List<String> PYTHONS =
      List.of(
          "bucket", "view", "cursor", "tombstones", "payloadSchema", "payloadColumn", "mode",
          "columnNameOfCorruptRecord", "rescuedColumn", "headersAs", "schemaRegistry", "schemaRegistryAuthFile",
          "schemaRegistryCaFile", "descriptorFile", "messageName", "payloadFraming");

  private static final List<String> KNOWN =
      Stream.of(OF_BOTH, BATCH_ONLY, STREAM_ONLY, PYTHONS).flatMap(List::stream).toList();
  private static final Pattern NAME = Pattern.compile("[A-Za-z0-9_](?:\\.?[A-Za-z0-9_-])*");
  private static final int MOST_READERS = 256;
  private static final long MIB = 1024L * 1024;
  static final String CURSOR = "cursor:";
  private static final String OF_JETSTREAM = "jetstream:";

  /** What plans a read fails where no broker has answered by then: the URL is probably wrong. */
  static final double FIRST_ANSWER_WITHIN_S = 10;

  final List<String> servers;
  final List<String> names;
  final String pattern;
  final String group;
  final Bound start;
  final Bound end;
  final boolean failOnDataLoss;
  final boolean includeHeaders;
  final List<String> columns;
  final String subjectFilter;
  final boolean reportsLag;
  final int realTimeReaders;
  final String realTimeReadersBy;
  final Long maxRows;
  final Long maxBytes;
  final Long minRows;
  final double maxDelayS;
  final Long minTasks;
  final Long taskRows;
  final long usualTaskBytes;
  final long mostTaskBytes;
  final String readFrom;
  final String rack;
  final String token;
  final String tokenFile;
  final String tlsCaFile;
  final String tlsCertFile;
  final String tlsKeyFile;
  final double timeoutS;
  final int retries;
  final double retryIntervalS;

  /** What this driver or task has accepted; not sent to others. */
  transient Loss.Count losses = new Loss.Count();

  static List<String> known() {
    return KNOWN;
  }

  static boolean isKnown(String name) {
    return KNOWN.stream().anyMatch(name::equalsIgnoreCase);
  }

  /** The option because of which the read is left to the Python source; null where there is none. */
  static String pythons(Map<String, String> options) {
    for (Map.Entry<String, String> option : options.entrySet()) {
      String name = option.getKey();
      boolean isFormat = name.equalsIgnoreCase("payloadFormat") && !option.getValue().equalsIgnoreCase("binary");
      if (isFormat || PYTHONS.stream().anyMatch(name::equalsIgnoreCase)) {
        return name;
      }
    }
    return null;
  }

  /**
   * @param isStream whether for a stream; null if Spark only requests the schema.
   */
  Settings(Map<String, String> options, Boolean isStream) {
    Given given = new Given(options, KNOWN);
    checkKind(given, isStream);
    pattern = given.text("streamPattern");
    group = given.text("group");
    names = selected(given);
    subjectFilter = given.text("subjectFilter");
    if (subjectFilter != null) {
      checkSubject(subjectFilter);
    }
    given.flag("filterPushdown", false);
    servers = serversIn(given.text("servers"));
    boolean isBatch = Boolean.FALSE.equals(isStream);
    start = bound(given, "starting", "earliest", isBatch ? "latest" : null, "earliest, latest, cursor:NAME");
    end = bound(given, "ending", "latest", "earliest", "latest");
    failOnDataLoss = given.flag("failOnDataLoss", true);
    includeHeaders = given.flag("includeHeaders", false);
    columns = columnsIn(given);
    reportsLag = given.flag("lag", true);
    realTimeReaders = readersIn(given);
    realTimeReadersBy = given.oneOf("realTimeReadersBy", "subject", "subject", "key");
    maxRows = given.whole("maxOffsetsPerTrigger", 1);
    maxBytes = given.sizeBytes("maxBytesPerTrigger");
    minRows = given.whole("minOffsetsPerTrigger", 1);
    maxDelayS = given.seconds("maxTriggerDelay", 15 * 60.0);
    checkAdmission(given);
    minTasks = given.whole("minPartitions", 1);
    taskRows = given.whole("maxRecordsPerPartition", 1);
    Long taskBytes = given.sizeBytes("maxBytesPerPartition");
    usualTaskBytes = taskBytes == null ? 64 * MIB : taskBytes;
    mostTaskBytes = taskBytes == null ? 512 * MIB : taskBytes;
    readFrom = given.oneOf("readFrom", "nearest", "nearest", "leader", "any");
    rack = given.text("rack");
    token = given.text("token");
    tokenFile = given.text("tokenFile");
    tlsCaFile = given.text("tlsCaFile");
    tlsCertFile = given.text("tlsCertFile");
    tlsKeyFile = given.text("tlsKeyFile");
    timeoutS = given.seconds("fetchTimeout", 30.0);
    Long tries = given.whole("fetchRetries", 0);
    retries = tries == null ? 5 : (int) Math.min(tries, Integer.MAX_VALUE);
    retryIntervalS = given.seconds("retryInterval", 0.2);
  }

  private void readObject(ObjectInputStream in) throws IOException, ClassNotFoundException {
    in.defaultReadObject();
    losses = new Loss.Count();
  }

  /** Whether a stream of this name may be selected; for a group this is unknown before a request. */
  boolean couldHold(String name) {
    if (pattern != null) {
      return glob(pattern).matcher(name).matches();
    }
    return group != null || names.contains(name);
  }

  private static int readersIn(Given given) {
    Long found = given.whole("realTimeReaders", 1);
    if (found != null && found > MOST_READERS) {
      throw NatslogException.config("option realTimeReaders: " + found + " is more than " + MOST_READERS);
    }
    return found == null ? 1 : found.intValue();
  }

  /** Of a query in real time. */
  void refuseLimits() {
    if (maxRows != null || maxBytes != null || minRows != null || minTasks != null || taskRows != null) {
      throw NatslogException.config(
          "limits of a batch or of its tasks (maxOffsetsPerTrigger, maxBytesPerTrigger, minOffsetsPerTrigger, "
              + "minPartitions, maxRecordsPerPartition) are for micro-batches: in real time a batch ends by its time, so "
              + "remove them");
    }
  }

  String selection() {
    if (pattern != null) {
      return "streamPattern '" + pattern + "'";
    }
    return group != null ? "group '" + group + "'" : "stream " + String.join(", ", names);
  }

  private static void checkKind(Given given, Boolean isStream) {
    if (isStream == null) {
      return;
    }
    for (String name : isStream ? BATCH_ONLY : STREAM_ONLY) {
      if (given.has(name)) {
        String why = name.startsWith("ending") ? "; a streaming query has no end" : "";
        throw NatslogException.config(
            "option " + name + (isStream
                ? " is for batch reads (spark.read)" + why
                : " is for streaming reads (spark.readStream)"));
      }
    }
  }

  private List<String> selected(Given given) {
    String text = given.text("stream");
    String path = given.text("path");
    if (text != null && path != null && !text.equals(path)) {
      throw NatslogException.config(
          "option stream '" + text + "' and load('" + path + "') name different streams: give one");
    }
    List<String> named = new ArrayList<>();
    for (String name : List.of("stream", "streamPattern", "group")) {
      if (given.has(name)) {
        named.add(name);
      }
    }
    if (path != null && !path.isEmpty() && text == null) {
      named.add("stream");
    }
    if (named.size() > 1) {
      throw NatslogException.config("options " + String.join(" and ", named) + " clash: give one of them");
    }
    if (pattern != null) {
      if (pattern.isEmpty()) {
        throw NatslogException.config("option streamPattern is empty: give a glob, for example \"orders-*\"");
      }
      return List.of();
    }
    if (group != null) {
      checkName("group", "group", group);
      return List.of();
    }
    List<String> found = split(text != null && !text.isEmpty() ? text : path == null ? "" : path);
    if (found.isEmpty()) {
      throw NatslogException.config(
          "option stream is missing: set .option(\"stream\", \"orders\"), or streamPattern, or group");
    }
    for (String name : found) {
      checkName("stream", "stream name", name);
    }
    if (new HashSet<>(found).size() != found.size()) {
      throw NatslogException.config(
          "option stream '" + String.join(", ", found) + "' names a stream twice: name each once");
    }
    return found;
  }

  static List<String> split(String text) {
    return new ArrayList<>(Arrays.stream(text.split(",")).map(String::strip).filter(one -> !one.isEmpty()).toList());
  }

  static void checkName(String option, String what, String name) {
    if (name.length() > 255) {
      throw NatslogException.config(
          "option " + option + ": a " + what + " has at most 255 characters; this one has " + name.length());
    }
    if (!NAME.matcher(name).matches()) {
      throw NatslogException.config(
          "option " + option + ": " + what + " '" + name + "' is not allowed: use letters, digits, '_', '-' and single "
              + "dots inside, starting with a letter, digit or '_'");
    }
  }

  private static void checkSubject(String subject) {
    String what = "option subjectFilter: subject '" + subject + "'";
    if (subject.getBytes(StandardCharsets.UTF_8).length > 1024) {
      throw NatslogException.config("option subjectFilter: a subject has at most 1024 bytes");
    }
    if (subject.chars().anyMatch(letter -> Character.isWhitespace(letter) || letter < 32 || letter == 127)) {
      throw NatslogException.config(what + " has a space or control character");
    }
    List<String> tokens = Arrays.asList(subject.split("\\.", -1));
    if (tokens.contains("")) {
      throw NatslogException.config(
          what + " has an empty token: remove dots at the beginning or end and repeated dots");
    }
    if (tokens.subList(0, tokens.size() - 1).contains(">")) {
      throw NatslogException.config(what + ": '>' may only be the last token");
    }
    if (tokens.stream().anyMatch(token -> token.length() > 1 && token.matches(".*[*>].*"))) {
      throw NatslogException.config(
          what + ": a wildcard must be a whole token, as in 'orders.*' or 'orders.>'");
    }
  }

  static List<String> serversIn(String given) {
    String stated = System.getenv("NATSLOG_SERVER");
    String text = given != null && !given.isEmpty() ? given
        : stated != null && !stated.isEmpty() ? stated : "http://127.0.0.1:9292";
    List<String> found = split(text);
    found.replaceAll(one -> one.replaceAll("/+$", ""));
    for (String one : found) {
      if (Broker.originOf(one) == null) {
        throw NatslogException.config("server '" + Broker.shown(one) + "' is not a URL: write http://host:9292");
      }
    }
    if (found.isEmpty()) {
      throw NatslogException.config("no server given: write http://host:9292");
    }
    return found;
  }

  private List<String> columnsIn(Given given) {
    String text = given.text("columns");
    if (text == null) {
      return null;
    }
    List<String> found = split(text);
    List<String> known = List.of("stream", "offset", "timestamp", "subject", "key", "value", "headers");
    for (String name : found) {
      if (!known.contains(name)) {
        throw NatslogException.config(
            "option columns: unknown column '" + name + "'" + Given.didYouMean(name, known));
      }
    }
    if (found.isEmpty() || new HashSet<>(found).size() != found.size()) {
      throw NatslogException.config("option columns must name at least one column, each once");
    }
    if (includeHeaders && !found.contains("headers")) {
      throw NatslogException.config("options includeHeaders and columns clash: name headers in columns");
    }
    return found;
  }

  private void checkAdmission(Given given) {
    if (minRows == null && given.has("maxTriggerDelay")) {
      throw NatslogException.config(
          "option maxTriggerDelay limits the wait for minOffsetsPerTrigger: set that too, or remove maxTriggerDelay");
    }
    if (minRows != null && maxRows != null && minRows > maxRows) {
      throw NatslogException.config(
          "options minOffsetsPerTrigger " + minRows + " and maxOffsetsPerTrigger " + maxRows + " clash: the minimum "
              + "must not be above the maximum");
    }
  }

  /**
   * @param refused a position that would make the range empty
   * @param words that stand for a position
   */
  private Bound bound(Given given, String which, String otherwise, String refused, String words) {
    String name = which + "Timestamp";
    String time = given.text(name);
    Map<String, Long> timesUs = new TreeMap<>();
    Long timeUs = null;
    if (time != null && time.startsWith("{")) {
      for (Map.Entry<String, String> one
          : byStream(name, time, "a time or JSON like {\"orders\": \"2026-11-20T10:30:00Z\"}").entrySet()) {
        timesUs.put(one.getKey(), Given.timeUs(name, one.getValue()));
      }
    } else {
      timeUs = given.timeUs(name);
    }
    name = which + "Offsets";
    String text = given.text(name);
    String expected = words + " or JSON like {\"orders\": 42, \"returns\": \"latest\"}";
    if (text == null || !text.startsWith("{")) {
      String position = text == null ? otherwise : text;
      checkPosition(name, position, "earliest|latest", refused, expected);
      return new Bound(timeUs, timesUs, Map.of(), position);
    }
    Map<String, String> positions = byStream(name, text, expected);
    for (String position : positions.values()) {
      checkPosition(
          name, position, "earliest|latest|[0-9]{1,18}", refused, "an offset, " + words.replace(", ", " or "));
    }
    return new Bound(timeUs, timesUs, positions, otherwise);
  }

  private static void checkPosition(String name, String position, String allowed, String refused, String expected) {
    if (position.equals(refused)) {
      throw NatslogException.config(
          "option " + name + ": a batch read with " + position + " would be empty: give another position");
    }
    if (position.startsWith(CURSOR) && name.equals("startingOffsets")) {
      String consumer = position.substring(CURSOR.length());
      checkName(name, "consumer name",
          consumer.startsWith(OF_JETSTREAM) ? consumer.substring(OF_JETSTREAM.length()) : consumer);
      return;
    }
    if (!position.matches(allowed)) {
      throw NatslogException.config(
          "option " + name + ": '" + position.substring(0, Math.min(200, position.length())) + "' must be " + expected);
    }
  }

  private Map<String, String> byStream(String name, String text, String expected) {
    JsonNode body = Json.parse(text);
    if (body == null) {
      throw NatslogException.config(
          "option " + name + " '" + text.substring(0, Math.min(200, text.length())) + "' must be " + expected);
    }
    if (!body.isObject()) {
      throw NatslogException.config(
          "option " + name + " '" + text + "' must be a JSON object of stream to position");
    }
    Map<String, String> found = new TreeMap<>();
    for (Iterator<Map.Entry<String, JsonNode>> fields = body.fields(); fields.hasNext(); ) {
      Map.Entry<String, JsonNode> one = fields.next();
      if (!couldHold(one.getKey())) {
        String hint = names.isEmpty() ? "" : Given.didYouMean(one.getKey(), names);
        throw NatslogException.config("option " + name + " names '" + one.getKey() + "', which is not read" + hint);
      }
      JsonNode value = one.getValue();
      found.put(one.getKey(), value.isTextual() && value.asText().matches("[0-9]+") && name.endsWith("Offsets")
          ? "'" + value.asText() + "'" : value.isValueNode() ? value.asText() : value.toString());
    }
    return found;
  }

  /** As Python's `fnmatchcase`. */
  private static Pattern glob(String text) {
    StringBuilder found = new StringBuilder();
    for (int at = 0; at < text.length(); at++) {
      char letter = text.charAt(at);
      int close = letter == '[' ? text.indexOf(']', at + (text.startsWith("!", at + 1) ? 3 : 2)) : -1;
      if (letter == '*') {
        found.append(".*");
      } else if (letter == '?') {
        found.append('.');
      } else if (close > 0) {
        String set = text.substring(at + 1, close).replace("\\", "\\\\").replace("[", "\\[").replace("&", "\\&");
        found.append('[').append(set.startsWith("!") ? "^" + set.substring(1) : set.replaceFirst("^\\^", "\\\\^"));
        found.append(']');
        at = close;
      } else {
        found.append(Pattern.quote(String.valueOf(letter)));
      }
    }
    return Pattern.compile(found.toString(), Pattern.DOTALL);
  }
}
