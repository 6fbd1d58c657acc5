package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;

/**
 * Plans of reads by brokers of 0.2.0, which have no `/v1/plans`: deleted with 0.4.
 *
 * <p>They are made of positions, extents and splits. Limits count offsets, because these calls do not state which
 * messages were removed.
 */
final class OlderBrokers {
  private static final long OLDER_FOR_NS = 60_000_000_000L;
  private static final int OUTDATED_ANSWERS = 20;
  private static final long WORTH_ROWS = 64 * 1024;
  private static final int ROUNDS = 2;
  private static final Map<List<String>, Long> OLDER_SINCE_NS = new ConcurrentHashMap<>();

  private final Broker broker;
  private final Settings settings;

  OlderBrokers(Broker broker, Settings settings) {
    this.broker = broker;
    this.settings = settings;
  }

  /** Whether a broker of these servers had no `/v1/plans` a moment ago. */
  boolean areAsked() {
    Long since = OLDER_SINCE_NS.get(settings.servers);
    return since != null && System.nanoTime() - since < OLDER_FOR_NS;
  }

  void note() {
    OLDER_SINCE_NS.put(settings.servers, System.nanoTime());
  }

  ReadPlans.Plan plan(ReadPlans.Asked asked) {
    for (int tries = 0; ; tries++) {
      try {
        return planned(tries == 0 ? asked : asked.withoutWait());
      } catch (NatslogException error) { // a stream has changed since its position was stated
        if (!error.is("offset_out_of_range", "stream_not_found") || tries == OUTDATED_ANSWERS) {
          throw error;
        }
        Broker.pause(0.25);
      }
    }
  }

  private ReadPlans.Plan planned(ReadPlans.Asked asked) {
    Map<String, ReadPlans.Stream> streams = new TreeMap<>();
    StreamState.selected(broker, asked.selection(), asked.seen(), asked.waitMs()).forEach((name, state) -> {
      if (asked.isPlanned(name)) {
        streams.put(name, reached(state, asked.positions().get(name), asked.ends()));
      }
    });
    Map<String, String> others = new HashMap<>();
    asked.positions().keySet().forEach(name -> {
      if (!streams.containsKey(name)) {
        others.put(name, StreamState.newest(broker, name) == null ? "deleted" : "exists");
      }
    });
    return new ReadPlans.Plan(streams, others, asked.isRepeated() ? again(streams, asked) : divided(streams, asked));
  }

  /** As `natslog.planning.reach`. */
  private static ReadPlans.Stream reached(StreamState state, ReadPlans.From from, Map<String, Position> ends) {
    List<ReadPlans.Lost> lost = new ArrayList<>();
    long start = state.start();
    Long end = null;
    if (from != null) {
      Long validTo = state.validTo(from.id());
      end = from.end();
      if (validTo == null) {
        lost.add(new ReadPlans.Lost(from.start(), end, "recreated"));
        end = end == null ? null : Long.valueOf(start);
      } else {
        start = Math.min(from.start(), validTo);
        if ((end == null ? from.start() : end) > validTo) {
          lost.add(new ReadPlans.Lost(validTo, end == null ? Long.valueOf(from.start()) : end, "forked"));
          end = end == null ? null : validTo;
        }
        long kept = end == null ? state.start() : Math.min(state.start(), end);
        if (start < kept && !from.isOpen()) {
          lost.add(new ReadPlans.Lost(start, kept, "removed"));
        }
        start = Math.max(start, kept);
        if (start > state.end()) {
          lost.add(new ReadPlans.Lost(state.end(), start, "shorter"));
          start = state.end();
        }
        if (end != null && end > state.end()) {
          lost.add(new ReadPlans.Lost(Math.max(start, state.end()), end, "shorter"));
        }
      }
    }
    long upto = end == null ? state.end() : Math.min(end, state.end());
    Position limit = ends == null ? null : ends.get(state.name());
    upto = limit != null && limit.id().equals(state.id()) ? Math.min(upto, limit.offset()) : upto;
    upto = Math.max(start, upto);
    return new ReadPlans.Stream(state, start, upto, upto - start, lost);
  }

  // ---- how much ----

  /**
   * Sets the ends of the streams, and returns the tasks. Limits are shared in proportion to what waits, but at least one
   * row of each stream is taken, of the first ones where a limit is too small for all.
   */
  private List<List<Range>> divided(Map<String, ReadPlans.Stream> streams, ReadPlans.Asked asked) {
    Map<String, Long> limits = asked.limits();
    long waiting = streams.values().stream().mapToLong(ReadPlans.Stream::rows).sum();
    long left = waiting < limits.getOrDefault("min_rows", 0L) ? 0 : limits.getOrDefault("max_rows", Long.MAX_VALUE);
    double share = Math.min(1, left / (double) Math.max(1, waiting));
    List<String> known = List.copyOf(asked.positions().keySet());
    List<String> inTurn = new ArrayList<>(streams.keySet());
    inTurn.sort(Comparator.comparingInt(known::indexOf)); // new streams first
    List<Range> ranges = new ArrayList<>();
    for (String name : inTurn) {
      ReadPlans.Stream one = streams.get(name);
      long rows = Math.min(left, one.rows() == 0 ? 0 : Math.max(1, (long) (one.rows() * share)));
      left -= rows;
      ReadPlans.From from = asked.positions().get(name);
      ranges.add(new Range(
          name, one.state().id(), one.start(), one.start() + rows, from == null || from.isOpen()));
    }
    long taken = ranges.stream().mapToLong(Range::rows).sum();
    ranges.replaceAll(one -> limits.containsKey("max_bytes") && one.rows() > 0
        ? within(one, Math.max(1, (long) (limits.get("max_bytes") * (one.rows() / (double) taken)))) : one);
    for (Range one : ranges) {
      ReadPlans.Stream stream = streams.get(one.stream());
      streams.put(one.stream(),
          new ReadPlans.Stream(stream.state(), one.start(), one.end(), stream.rows(), stream.lost()));
    }
    ranges.removeIf(one -> one.rows() == 0);
    return tasks(ranges);
  }

  /** The beginning of the range that takes so many stored bytes, but at least a row. */
  private Range within(Range whole, long maxBytes) {
    Map<String, Object> query = Map.of("start", whole.start(), "end", whole.end(), "max_bytes", maxBytes);
    JsonNode found = broker.get("/v1/streams/" + Broker.inPath(whole.stream()) + "/extent", query);
    return new Range(whole.stream(), whole.id(), whole.start(), found.path("end").asLong(), whole.isOpen());
  }

  // ---- in which tasks ----

  /** About equal tasks, within the limits: ranges are cut by their share of all rows, and small parts share a task. */
  private List<List<Range>> tasks(List<Range> ranges) {
    int cores = Tasks.cores();
    long total = ranges.stream().mapToLong(Range::rows).sum();
    long least = settings.minTasks != null ? settings.minTasks : total < WORTH_ROWS ? 1 : cores;
    List<Range> parts = new ArrayList<>();
    ranges.forEach(one -> parts.addAll(cut(one, (one.rows() * least + total - 1) / total)));
    long bytes = parts.stream().mapToLong(Range::bytes).sum();
    long usual = Math.max(settings.usualTaskBytes, bytes / (ROUNDS * cores));
    long most = Math.min(settings.mostTaskBytes, least > 1 ? Math.min(usual, bytes / least) : usual);
    List<List<Range>> tasks = new ArrayList<>();
    long taskBytes = 0;
    long taskRows = 0;
    for (Range part : parts) {
      taskBytes += part.bytes();
      taskRows += part.rows();
      boolean fits = taskBytes <= most && (settings.taskRows == null || taskRows <= settings.taskRows);
      if (tasks.isEmpty() || !fits) {
        tasks.add(new ArrayList<>());
        taskBytes = part.bytes();
        taskRows = part.rows();
      }
      tasks.get(tasks.size() - 1).add(part);
    }
    return tasks;
  }

  /** The tasks as of a batch's first plan: each has the same rows in the same order, without rows lost since. */
  private List<List<Range>> again(Map<String, ReadPlans.Stream> streams, ReadPlans.Asked asked) {
    TreeMap<Integer, List<Range>> tasks = new TreeMap<>();
    new TreeMap<>(asked.positions()).forEach((name, from) -> {
      ReadPlans.Stream stream = streams.get(name);
      long start = stream == null ? 0 : stream.start();
      long upto = stream == null ? 0 : stream.end();
      for (Position.Share share : from.tasks().isEmpty() ? List.of(new Position.Share(0, upto)) : from.tasks()) {
        tasks.computeIfAbsent(share.task(), unused -> new ArrayList<>());
        long end = Math.min(share.end(), upto);
        if (start < end) {
          Range part = new Range(name, stream.state().id(), start, end, from.isOpen());
          tasks.get(share.task()).addAll(cut(part, 1));
          start = end;
        }
      }
    });
    return List.copyOf(tasks.values());
  }

  /** The range in at least so many parts, as the options allow. */
  private List<Range> cut(Range whole, long count) {
    Map<String, Object> query = new HashMap<>();
    query.put("start", whole.start());
    query.put("end", whole.end());
    query.put("min_splits", count);
    query.put("max_bytes", settings.usualTaskBytes);
    query.put("max_rows", settings.taskRows);
    query.put("read_from", settings.readFrom);
    query.put("rack", settings.rack);
    List<Range> found = new ArrayList<>();
    long at = whole.start();
    for (JsonNode split : broker.get("/v1/streams/" + Broker.inPath(whole.stream()) + "/splits", query)) {
      Range part = ReadPlans.range(split, whole.stream(), whole.id(), whole.isOpen());
      at = part.start() == at && part.end() > at ? part.end() : -1;
      found.add(part);
    }
    if (at != whole.end()) {
      throw NatslogException.corruptAnswer("stream '" + whole.stream() + "': the splits do not cover the range");
    }
    return found;
  }
}
