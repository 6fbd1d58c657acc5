package natslog;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.concurrent.ConcurrentHashMap;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** What missing data means: every loss is reported here. */
final class Loss {
  private static final Logger LOG = LoggerFactory.getLogger("natslog.source");
  private static final String RETENTION =
      "a longer retention (natslog stream edit --max-age) prevents further losses";
  static final String REMOVED = "retention or a purge removed these messages";
  static final String DELETED = "the stream was deleted";

  /**
   * The losses that a query has accepted since it was started. Spark asks for the same range more than once, so losses
   * with the same start are one. A stream that is created again may have others with this start: then the number is too
   * small, or unknown.
   */
  static final class Count {
    private final Map<String, Map<Long, Optional<Long>>> ends = new ConcurrentHashMap<>();

    /** Offsets of a stream that are lost; empty where the end of a loss is not known. */
    OptionalLong of(String stream) {
      long rows = 0;
      for (Map.Entry<Long, Optional<Long>> one : ends.getOrDefault(stream, Map.of()).entrySet()) {
        if (one.getValue().isEmpty()) {
          return OptionalLong.empty();
        }
        rows += one.getValue().get() - one.getKey();
      }
      return OptionalLong.of(rows);
    }

    private void add(String stream, long start, Long end) {
      ends.computeIfAbsent(stream, unused -> new ConcurrentHashMap<>()).merge(
          start, Optional.ofNullable(end), (known, more) -> known.isEmpty() || more.isEmpty()
              ? Optional.empty() : Optional.of(Math.max(known.get(), more.get())));
    }
  }

  private Loss() {}

  /** Offsets `[start, end)` cannot be read any more; `end` null where it is not known. Raises or logs that. */
  static void report(Settings settings, String stream, long start, Long end, String why) {
    report(settings, stream, start, end, why, RETENTION);
  }

  static void report(Settings settings, String stream, long start, Long end, String why, String remedy) {
    String upto = end == null ? "and later" : "to " + (end - 1);
    String loss = "stream '" + stream + "': offsets " + start + " " + upto + " are lost: " + why;
    if (!settings.failOnDataLoss) {
      LOG.warn("{}; the query continues, because failOnDataLoss is false", loss);
      settings.losses.add(stream, start, end);
      return;
    }
    Map<String, Object> facts = new HashMap<>();
    facts.put("stream", stream);
    facts.put("start", start);
    facts.put("end", end);
    throw new NatslogException("data_loss",
        loss + ". Read them from a copy, or accept the loss: with .option(\"failOnDataLoss\", \"false\") the query "
            + "continues after it; " + remedy,
        false, facts);
  }

  /** What a plan states as lost of these positions. Raises or logs that. */
  static void report(Settings settings, ReadPlans.Plan plan, Map<String, ReadPlans.From> positions) {
    positions.forEach((name, from) -> {
      ReadPlans.Stream stream = plan.streams().get(name);
      if (stream == null && "deleted".equals(plan.others().get(name))) {
        report(settings, name, from.start(), from.end(), DELETED);
      }
      for (ReadPlans.Lost lost : stream == null ? List.<ReadPlans.Lost>of() : stream.lost()) {
        switch (lost.why()) {
          case "recreated" ->
              recreated(settings, name, lost.start(), lost.end(), from.id(), stream.state().id());
          case "forked" -> beyondFork(settings, stream.state(), lost.end(), lost.start(), from.id());
          case "shorter" -> shorter(settings, name, lost.start(), lost.end(), stream.state().end());
          default -> report(settings, name, lost.start(), lost.end(), REMOVED);
        }
      }
    });
  }

  static void recreated(Settings settings, String stream, long start, Long end, String was, String isNow) {
    report(settings, stream, start, end,
        "the stream was deleted and created again (id " + isNow + ", not " + was + ")",
        "use another name for a stream with other messages");
  }

  /** The stream was restored from an export that ends before the position of the query. */
  static void beyondFork(Settings settings, StreamState state, long position, long fork, String was) {
    report(settings, state.name(), fork, position,
        "the stream was restored from an export that ends at offset " + fork + " (its id is " + state.id() + ", not "
            + was + "), and the query has read the original up to " + position + ". From " + fork
            + " on the restored stream has other messages",
        "restore a newer export, or begin a new checkpoint at offset " + fork + " (startingOffsets)");
  }

  static void shorter(Settings settings, String stream, long start, long end, long highWatermark) {
    report(settings, stream, start, end,
        "the log ends at " + highWatermark + " and is shorter than before",
        "the cause is an older copy of a broker's disk, or a log that `natslog cluster recover` truncated");
  }

  /**
   * The part of `[start, end)` that can still be read, as start and end; the rest is reported as loss. The whole range
   * if nothing is lost: the answer was outdated, and the range must be requested again.
   */
  static long[] leftOf(Broker broker, Settings settings, String stream, String id, long start, long end,
      NatslogException error) {
    StreamState state = StreamState.confirmed(
        () -> StreamState.newest(broker, stream),
        now -> now == null || !now.id().equals(id) || start < now.start() || end > now.end());
    if (state == null) {
      report(settings, stream, start, end, DELETED);
      return new long[] {end, end};
    }
    if (!state.id().equals(id)) {
      Long validTo = state.validTo(id);
      if (validTo != null && end <= validTo) {
        throw new NatslogException("stream_recreated",
            "stream '" + stream + "' was restored from an export while the query was reading it: start the query "
                + "again; it continues where it is", false, Map.of("stream", stream));
      }
      recreated(settings, stream, start, end, id, state.id());
      return new long[] {end, end};
    }
    if (start < state.start()) {
      long lostTo = Math.min(state.start(), end);
      report(settings, stream, start, lostTo, REMOVED);
      return new long[] {lostTo, end};
    }
    if (end > state.end()) {
      long upto = Math.max(start, state.end());
      shorter(settings, stream, upto, end, state.end());
      return new long[] {start, upto};
    }
    return new long[] {error.is("corrupt_log") ? behindDamage(settings, stream, start, end, error) : start, end};
  }

  /** Where reading continues after a damaged range that no in-sync replica has undamaged. */
  private static long behindDamage(
      Settings settings, String stream, long start, long end, NatslogException error) {
    boolean isExplained = error.facts.containsKey("file")
        && error.facts.get("start") instanceof Long from && from <= start;
    long lostTo = error.facts.get("end") instanceof Long to ? Math.min(to, end) : end;
    if (!isExplained || lostTo <= start) {
      throw error;
    }
    report(settings, stream, start, lostTo, "the broker has quarantined them: " + error.getMessage(),
        "restore the file from a copy (`natslog verify` checks it); replicas of a stream repair it automatically");
    return lostTo;
  }
}
