package natslog;

import java.math.BigDecimal;
import java.time.Instant;
import java.time.LocalDateTime;
import java.time.OffsetDateTime;
import java.time.ZoneOffset;
import java.time.format.DateTimeParseException;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Options by name and type; one that is not known is an error. Names are compared without case, as Spark does. */
final class Given {
  /** Options that Spark adds or keeps for itself, those of its real-time mode included. */
  private static final Set<String> SPARKS_OWN =
      Set.of(
          "checkpointlocation", "queryname", "outputmode", "asyncprogresstrackingenabled",
          "asyncprogresstrackingcheckpointintervalms", "_asyncprogresstrackingoverridesinksupportcheck");

  /** Options of Spark's Kafka source, and what to do with them. (The Python source has the same ones.) */
  private static final Map<String, String> KAFKAS = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);

  static {
    KAFKAS.put("kafka.bootstrap.servers", "use servers (HTTP) to read, and natsServers to write");
    KAFKAS.put("subscribe", "use stream");
    KAFKAS.put("subscribePattern", "use streamPattern, a glob: \"orders-*\"");
    KAFKAS.put("assign", "use stream: it has no partitions");
    KAFKAS.put("topic", "use subject to write, and stream to read");
    KAFKAS.put("startingOffsetsByTimestamp", "use startingTimestamp, with JSON by stream");
    KAFKAS.put("endingOffsetsByTimestamp", "use endingTimestamp, with JSON by stream");
    KAFKAS.put("startingOffsetsByTimestampStrategy", "remove it: a time beyond the newest message is the end");
    KAFKAS.put("fetchOffset.numRetries", "use fetchRetries");
    KAFKAS.put("fetchOffset.retryIntervalMs", "use retryInterval");
    KAFKAS.put("kafkaConsumer.pollTimeoutMs", "use fetchTimeout");
    KAFKAS.put("groupIdPrefix", "remove it: brokers store no state of readers");
    KAFKAS.put("kafka.group.id", "remove it: brokers store no state of readers");
  }

  private static final Pattern PART = Pattern.compile("([0-9]{1,13}(?:\\.[0-9]{1,9})?)\\s*(ms|s|m|h|d|w)");
  private static final Pattern SIZE =
      Pattern.compile("([0-9]{1,19}(?:\\.[0-9]{1,9})?)\\s*(?:([kmgt])(i?b)?|b)?", Pattern.CASE_INSENSITIVE);
  private static final Map<String, String> SECONDS =
      Map.of("ms", "0.001", "s", "1", "m", "60", "h", "3600", "d", "86400", "w", "604800");
  private static final long EARLIEST_US = -62_135_596_800_000_000L;
  static final long YEAR_10000_US = 253_402_300_800_000_000L;

  private final Map<String, String> values = new HashMap<>();

  Given(Map<String, String> options, List<String> known) {
    for (Map.Entry<String, String> option : options.entrySet()) {
      String lower = option.getKey().toLowerCase(Locale.ROOT);
      if (known.stream().noneMatch(name -> name.equalsIgnoreCase(lower)) && !SPARKS_OWN.contains(lower)) {
        throw NatslogException.config("unknown option '" + option.getKey() + "'" + advice(option.getKey(), known));
      }
      values.put(lower, option.getValue().strip());
    }
  }

  static String advice(String name, List<String> known) {
    if (KAFKAS.containsKey(name)) {
      return ", which is Kafka's: " + KAFKAS.get(name);
    }
    if (name.toLowerCase(Locale.ROOT).startsWith("kafka.")) {
      return ", which is Kafka's: remove it; for TLS and credentials see tlsCaFile, tokenFile and natsCredsFile";
    }
    if (name.equalsIgnoreCase("natsUrl") && known.contains("natsServers")) { // what the command line calls it
      return ": use natsServers";
    }
    return didYouMean(name, known);
  }

  boolean has(String name) {
    return values.containsKey(name.toLowerCase(Locale.ROOT));
  }

  String text(String name) {
    return values.get(name.toLowerCase(Locale.ROOT));
  }

  boolean flag(String name, boolean otherwise) {
    String given = text(name);
    String text = (given == null || given.isEmpty() ? String.valueOf(otherwise) : given).toLowerCase(Locale.ROOT);
    if (!text.equals("true") && !text.equals("false")) {
      throw NatslogException.config("option " + name + " '" + text + "' must be true or false");
    }
    return text.equals("true");
  }

  Long whole(String name, long low) {
    String text = text(name);
    if (text == null) {
      return null;
    }
    if (!text.matches("[0-9]{1,18}") || Long.parseLong(text) < low) {
      throw NatslogException.config(
          "option " + name + " '" + text.substring(0, Math.min(40, text.length())) + "' must be a whole number of at "
              + "least " + low);
    }
    return Long.parseLong(text);
  }

  String oneOf(String name, String otherwise, String... allowed) {
    String given = text(name);
    String text = (given == null || given.isEmpty() ? otherwise : given).toLowerCase(Locale.ROOT);
    if (!Arrays.asList(allowed).contains(text)) {
      String expected = String.join(", ", Arrays.copyOf(allowed, allowed.length - 1));
      throw NatslogException.config(
          "option " + name + " '" + text + "' must be " + expected + " or " + allowed[allowed.length - 1]
              + didYouMean(text, Arrays.asList(allowed)));
    }
    return text;
  }

  Long sizeBytes(String name) {
    String text = text(name);
    if (text == null) {
      return null;
    }
    Matcher found = SIZE.matcher(text);
    BigDecimal bytes = BigDecimal.ZERO;
    if (found.matches()) {
      boolean isDecimal = "b".equalsIgnoreCase(found.group(3));
      int power = found.group(2) == null ? 0 : 1 + "kmgt".indexOf(found.group(2).toLowerCase(Locale.ROOT));
      bytes = new BigDecimal(found.group(1)).multiply(BigDecimal.valueOf(isDecimal ? 1000 : 1024).pow(power));
    }
    if (bytes.compareTo(BigDecimal.ONE) < 0 || bytes.compareTo(BigDecimal.valueOf(Long.MAX_VALUE)) > 0) {
      throw NatslogException.config(
          "option " + name + ": " + name + " '" + text + "' is not a size above zero: write 500MB, 10GiB or a number "
              + "of bytes");
    }
    return bytes.longValue();
  }

  double seconds(String name, double otherwise) {
    String text = text(name);
    if (text == null) {
      return otherwise;
    }
    String compact = text.toLowerCase(Locale.ROOT);
    BigDecimal seconds = BigDecimal.ZERO;
    Matcher part = PART.matcher(compact);
    int at = 0;
    while (at < compact.length() && part.find(at) && part.start() == at) {
      seconds = seconds.add(new BigDecimal(part.group(1)).multiply(new BigDecimal(SECONDS.get(part.group(2)))));
      at = part.end();
    }
    if (at != compact.length() || compact.isEmpty()) {
      if (!compact.matches("[0-9]{1,12}(\\.[0-9]{1,9})?")) {
        throw NatslogException.config(
            "option " + name + " '" + text + "' is not a duration: write 90s, 15m, 12h or 7d");
      }
      seconds = new BigDecimal(compact);
    }
    if (seconds.signum() <= 0 || seconds.doubleValue() >= 1e10) {
      throw NatslogException.config("option " + name + " '" + text + "' must be above zero and below 300 years");
    }
    return seconds.doubleValue();
  }

  Long timeUs(String name) {
    String text = text(name);
    return text == null ? null : timeUs(name, text);
  }

  /** Microseconds since 1970 of ISO-8601 (UTC where there is no zone) or epoch milliseconds. */
  static long timeUs(String name, String text) {
    long us;
    try {
      if (text.matches("-?[0-9]{1,19}")) {
        us = Math.multiplyExact(Long.parseLong(text), 1000L);
      } else {
        Instant instant = instantOf(text.replace(' ', 'T'));
        us = Math.addExact(Math.multiplyExact(instant.getEpochSecond(), 1_000_000L), instant.getNano() / 1000);
      }
    } catch (DateTimeParseException | NumberFormatException error) {
      throw NatslogException.config(
          "option " + name + " '" + text + "' is not a time: write ISO-8601 (2026-11-20T10:30:00Z) or epoch "
              + "milliseconds");
    } catch (ArithmeticException error) {
      us = Long.MAX_VALUE;
    }
    if (us < EARLIEST_US || us >= YEAR_10000_US) {
      throw NatslogException.config("option " + name + " '" + text + "' is out of range (numbers are milliseconds)");
    }
    return us;
  }

  private static Instant instantOf(String text) {
    if (!text.contains("T")) {
      return LocalDateTime.parse(text + "T00:00:00").toInstant(ZoneOffset.UTC);
    }
    try {
      return OffsetDateTime.parse(text).toInstant();
    } catch (DateTimeParseException error) {
      return LocalDateTime.parse(text).toInstant(ZoneOffset.UTC);
    }
  }

  /** `; did you mean 'x'?` with the nearest known word, or the list of all where none is near. */
  static String didYouMean(String word, List<String> known) {
    String nearest = null;
    double closest = 0.5;
    for (String one : known) {
      int distance = distance(word.toLowerCase(Locale.ROOT), one.toLowerCase(Locale.ROOT));
      double likeness = 1 - (double) distance / Math.max(1, Math.max(word.length(), one.length()));
      if (likeness >= closest) {
        nearest = one;
        closest = likeness;
      }
    }
    return nearest != null
        ? "; did you mean '" + nearest + "'?"
        : "; known are " + String.join(", ", new TreeSet<>(known));
  }

  /** The edit distance of two words, in which an exchange of two neighbouring letters is one step. */
  private static int distance(String one, String other) {
    int[][] steps = new int[one.length() + 1][other.length() + 1];
    for (int up = 0; up <= one.length(); up++) {
      for (int at = 0; at <= other.length(); at++) {
        if (up == 0 || at == 0) {
          steps[up][at] = up + at;
          continue;
        }
        int changed = steps[up - 1][at - 1] + (one.charAt(up - 1) == other.charAt(at - 1) ? 0 : 1);
        steps[up][at] = Math.min(changed, 1 + Math.min(steps[up - 1][at], steps[up][at - 1]));
        boolean isExchanged = up > 1 && at > 1 && one.charAt(up - 1) == other.charAt(at - 2)
            && one.charAt(up - 2) == other.charAt(at - 1);
        if (isExchanged) {
          steps[up][at] = Math.min(steps[up][at], 1 + steps[up - 2][at - 2]);
        }
      }
    }
    return steps[one.length()][other.length()];
  }
}
