package natslog;

import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.spark.sql.types.StructType;

/**
 * Options of a table in Spark's catalog, `CREATE TABLE … USING natslog OPTIONS (…)`. Spark passes them as properties of
 * the table: as `option.NAME`, and with properties of the catalog (`provider`, `owner`, …) beside them.
 */
final class TableOptions {
  private static final String PREFIX = "option.";

  /** Options of writes, which the Python source checks. */
  private static final List<String> OF_SINK =
      List.of(
          "natsServers", "ack", "ackStreams", "msgIdColumn", "maxInFlight", "ackTimeout", "onError",
          "deadLetterSubject", "envelope", "natsTlsHandshakeFirst", "natsCredsFile", "natsNkeyFile", "natsUser",
          "natsUserFile", "natsPasswordFile", "natsTokenFile", "natsTlsCaFile", "natsTlsCertFile", "natsTlsKeyFile",
          "subject", "txnAppId", "txnVersion", "onConflict");

  private TableOptions() {}

  /** Whether these are properties of a table in a catalog. */
  static boolean are(Map<String, String> properties) {
    return properties.keySet().stream().anyMatch("provider"::equalsIgnoreCase);
  }

  /** Whether all columns are those of a table in the catalog, which keeps its options in their metadata. */
  static boolean areKeptIn(StructType schema) {
    return Arrays.stream(schema.fields()).allMatch(field -> field.metadata().contains("natslog"));
  }

  /**
   * The options of a read: those of the statement, which take precedence, and of the table, if there is one. What the
   * table has for writes is left out.
   */
  static Map<String, String> ofRead(Map<String, String> properties, Map<String, String> statement) {
    if (!are(properties)) {
      return statement;
    }
    Map<String, String> found = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
    properties.forEach((name, value) -> {
      String lower = name.toLowerCase(Locale.ROOT);
      String option = lower.equals("location") ? "path" : lower.startsWith(PREFIX) ? name.substring(PREFIX.length()) : "";
      boolean isOption = lower.startsWith(PREFIX);
      if (isOption && !Settings.isKnown(option) && OF_SINK.stream().noneMatch(option::equalsIgnoreCase)) {
        throw NatslogException.config("unknown option '" + option + "'" + Given.advice(option, Settings.known()));
      }
      if (isOption && option.equalsIgnoreCase("token")) {
        throw NatslogException.config(
            "option token: the catalog stores it with the table: use tokenFile, or give it in a statement, "
                + "WITH ('token' = …)");
      }
      boolean isSinks = option.equals("path") && (value.equals("nats") || value.equals("http"));
      if (Settings.isKnown(option) && !isSinks) {
        found.put(option, value);
      }
    });
    Set<String> sources = Set.of("stream", "streampattern", "group", "bucket", "path");
    if (statement.keySet().stream().anyMatch(name -> sources.contains(name.toLowerCase(Locale.ROOT)))) {
      return statement;
    }
    if (!found.containsKey("bucket")) {
      found.remove("tombstones"); // of the sink
    }
    found.putAll(statement);
    return found;
  }
}
