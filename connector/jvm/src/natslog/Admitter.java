package natslog;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;

/** How much one trigger takes, and which streams come first; see `pyspark_natslog.source.admission`. */
final class Admitter {
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

  /** Those of this trigger. With `drains`, everything up to a fixed target is read, without waiting for a minimum. */
  Map<String, Long> limits(boolean drains) {
    Map<String, Long> found = new HashMap<>();
    if (settings.maxRows != null) {
      found.put("max_rows", settings.maxRows);
    }
    if (settings.maxBytes != null) {
      found.put("max_bytes", settings.maxBytes);
    }
    if (settings.minRows != null && !drains && admittedNs != null && leftS() > 0) {
      found.put("min_rows", settings.minRows);
    }
    return found;
  }

  /** Those first that have waited longest. */
  List<String> inTurn(Set<String> names) {
    List<String> found = new ArrayList<>(names);
    found.sort(Comparator.comparing(name -> lastTurn.getOrDefault(name, 0)));
    return found;
  }

  /** A trigger has planned these streams, and took rows of some. */
  void note(Map<String, ReadPlans.Stream> planned) {
    if (planned.values().stream().anyMatch(ReadPlans.Stream::tookRows)) {
      admittedNs = System.nanoTime();
      turns++;
      Map<String, Integer> now = new HashMap<>();
      planned.forEach((name, one) -> now.put(name, one.tookRows() ? turns : lastTurn.getOrDefault(name, 0)));
      lastTurn = now;
    }
  }

  /** How long a trigger without new rows may wait for some, if so many rows wait for a minimum already. */
  double dueInS(long waitingRows) {
    if (settings.minRows == null || waitingRows == 0 || admittedNs == null) {
      return Double.POSITIVE_INFINITY;
    }
    return Math.max(0, leftS());
  }

  private double leftS() {
    return settings.maxDelayS - (System.nanoTime() - admittedNs) / 1e9;
  }
}
