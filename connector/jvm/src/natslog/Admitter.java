package natslog;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;

/**
 * How many waiting rows one trigger takes: limits of rows and bytes are shared among streams, and a batch may wait for a
 * minimum of rows; see `pyspark_natslog.source.admission`.
 */
final class Admitter {
  /** For a stream: the rows from its position that take so many bytes (null: all that wait), and their bytes or null. */
  interface Reach {
    Object[] of(String stream, Long maxBytes);
  }

  private final Settings settings;
  private Long admittedNs;
  private Map<String, Integer> lastTurn = new HashMap<>();
  private int turns;

  Admitter(Settings settings) {
    this.settings = settings;
  }

  /** The limit that Spark passes to `latestOffset`: it states only whether the options apply. */
  ReadLimit defaultLimit() {
    if (settings.maxRows != null) {
      return ReadLimit.maxRows(settings.maxRows);
    }
    if (settings.maxBytes != null) {
      return ReadLimit.maxRows(Long.MAX_VALUE);
    }
    return settings.minRows == null
        ? ReadLimit.allAvailable()
        : ReadLimit.minRows(settings.minRows, (long) (1000 * settings.maxDelayS));
  }

  /** The rows of each stream that are taken now. With `drains`, everything up to a fixed target is read. */
  Map<String, Long> admit(Map<String, Long> waiting, Reach reach, boolean drains) {
    long total = waiting.values().stream().mapToLong(Long::longValue).sum();
    if (!drains && isTooEarly(total)) {
      Map<String, Long> none = new LinkedHashMap<>(waiting);
      none.replaceAll((name, rows) -> 0L);
      return none;
    }
    List<String> names = new ArrayList<>(waiting.keySet());
    names.sort(Comparator.comparing(name -> lastTurn.getOrDefault(name, 0)));
    Map<String, Long> admitted = new LinkedHashMap<>();
    names.forEach(name -> admitted.put(name, waiting.get(name)));
    Map<String, Long> found = settings.maxRows == null ? admitted : shared(admitted, settings.maxRows);
    found = settings.maxBytes == null ? found : withinBytes(found, settings.maxBytes, reach);
    if (found.values().stream().anyMatch(rows -> rows > 0)) {
      admittedNs = System.nanoTime();
      turns++;
      Map<String, Integer> now = new HashMap<>();
      found.forEach((name, rows) -> now.put(name, rows > 0 ? turns : lastTurn.getOrDefault(name, 0)));
      lastTurn = now;
    }
    return found;
  }

  /** How long a trigger without new rows may wait for some, if so many rows wait for a minimum already. */
  double dueInS(long waitingRows) {
    if (settings.minRows == null || waitingRows == 0 || admittedNs == null) {
      return Double.POSITIVE_INFINITY;
    }
    return Math.max(0, settings.maxDelayS - (System.nanoTime() - admittedNs) / 1e9);
  }

  private boolean isTooEarly(long rows) {
    if (settings.minRows == null || rows >= settings.minRows || admittedNs == null) {
      return false;
    }
    return (System.nanoTime() - admittedNs) / 1e9 < settings.maxDelayS;
  }

  /**
   * `limit` divided among streams in proportion to what waits in each, at least one of each that has some; where the
   * limit does not allow this, the first ones get one. The whole limit is used.
   */
  static Map<String, Long> shared(Map<String, Long> waiting, long limit) {
    long total = waiting.values().stream().mapToLong(Long::longValue).sum();
    if (total <= limit) {
      return waiting;
    }
    Map<String, Long> shares = new LinkedHashMap<>();
    long nonempty = waiting.values().stream().filter(rows -> rows > 0).count();
    long left = limit;
    for (Map.Entry<String, Long> one : waiting.entrySet()) {
      long share = 0;
      if (one.getValue() > 0 && limit < nonempty) {
        share = left > 0 ? 1 : 0;
      } else if (one.getValue() > 0) {
        share = Math.max(1, part(one.getValue(), total, limit));
      }
      share = Math.min(share, one.getValue());
      shares.put(one.getKey(), share);
      left -= share;
    }
    List<String> bySize = new ArrayList<>(waiting.keySet());
    bySize.sort(Comparator.<String>comparingLong(name -> -waiting.get(name)).thenComparing(name -> name));
    while (limit >= nonempty && left != 0) { // rounding
      for (String name : bySize) {
        long share = shares.get(name);
        long step = left > 0
            ? Math.min(1, waiting.get(name) - share)
            : left < 0 ? -Math.min(1, share > 0 ? share - 1 : 0) : 0;
        shares.put(name, share + step);
        left -= step;
      }
    }
    return shares;
  }

  private static long part(long some, long of, long limit) {
    return BigInteger.valueOf(some).multiply(BigInteger.valueOf(limit)).divide(BigInteger.valueOf(of)).longValue();
  }

  private static Map<String, Long> withinBytes(Map<String, Long> admitted, long maxBytes, Reach reach) {
    Map<String, Long> waiting = new LinkedHashMap<>(admitted);
    waiting.values().removeIf(rows -> rows == 0);
    long rows = waiting.values().stream().mapToLong(Long::longValue).sum();
    Map<String, Long> sizes = new LinkedHashMap<>();
    waiting.keySet().forEach(name -> {
      if (reach.of(name, null)[1] instanceof Long bytes) {
        sizes.put(name, bytes);
      }
    });
    Map<String, Long> shares = new LinkedHashMap<>();
    if (sizes.size() < waiting.size()) {
      waiting.forEach((name, some) -> shares.put(name, part(some, rows, maxBytes)));
    } else if (sizes.values().stream().mapToLong(Long::longValue).sum() <= maxBytes) {
      return admitted;
    } else {
      shares.putAll(shared(sizes, maxBytes));
    }
    Map<String, Long> found = new LinkedHashMap<>(admitted);
    found.replaceAll((name, some) -> shares.containsKey(name)
        ? Math.min(some, (Long) reach.of(name, Math.max(1, shares.get(name)))[0]) : 0L);
    return found;
  }
}
