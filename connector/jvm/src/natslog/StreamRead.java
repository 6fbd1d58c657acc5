package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.Supplier;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadAllAvailable;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The source of one streaming query.
 *
 * <p>Theory of operation. Spark stores the positions. This class determines the end of the next batch within the limits,
 * and the tasks of a range, by the same rules and with the same positions as `pyspark_natslog.source.stream_reader`, so
 * that a query may go on with either. An exception ends the query: calls wait for unavailable brokers.
 */
final class StreamRead implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
  private static final Logger LOG = LoggerFactory.getLogger("natslog.source");
  private static final int OUTAGE_TIMEOUTS = 6;
  private static final double IDLE_WAIT_S = 0.4;
  private static final double OTHERS_S = 10;
  private static final long FIRST_EPOCH = 1;

  private record Plan(String start, String end, List<Range> ranges, List<List<Range>> tasks) {}

  private record Wanted(Position first, long end) {}

  private record Begun(String id, long offset) {}

  private final Settings settings;
  private final List<String> columns;
  private final Broker broker;
  private final Planner planner;
  private final Lag lag;
  private final Admitter admitter;
  private final Set<Begun> open = new HashSet<>(); // where the logs began when this query did
  private final Set<String> accepted = new HashSet<>(); // ids of streams whose older leader is accepted
  private final Set<String> left = new HashSet<>(); // streams of the checkpoint that exist and are not selected now
  private final Map<String, Position> gone = new TreeMap<>(); // streams that were deleted
  private Map<String, Position> target;
  private Map<String, StreamState> latest;
  private Map<String, Position> end = Map.of();
  private Map<String, Lag.Behind> reported = Map.of();
  private Plan planned;
  private String idleAt;
  private long idleRows;
  private String committed;
  private long othersUntilNs = System.nanoTime();
  private Long awaySinceNs;

  StreamRead(Settings settings, List<String> columns) {
    this.settings = settings;
    this.columns = columns;
    this.broker = new Broker(settings, Settings.FIRST_ANSWER_WITHIN_S);
    this.planner = new Planner(broker, settings);
    this.lag = new Lag(settings);
    this.admitter = new Admitter(settings);
  }

  // ---- how far ----

  @Override
  public Offset initialOffset() {
    Map<String, StreamState> states = untilAvailable(this::states);
    BatchRead.checkAllThere(settings, states);
    if (states.isEmpty()) {
      LOG.warn("no stream matches {} yet; streams that are created later are read from their start",
          settings.selection());
    }
    Resolver resolver = new Resolver(broker, settings);
    Map<String, Position> found = new TreeMap<>();
    states.forEach((name, state) -> {
      long first = untilAvailable(() -> resolver.start(state, null, states.keySet()));
      found.put(name, new Position(state.id(), first, null));
      if (settings.start.isLogStart(name)) {
        open.add(new Begun(state.id(), first));
      }
    });
    return new Position.All(found);
  }

  @Override
  public ReadLimit getDefaultReadLimit() {
    return admitter.defaultLimit();
  }

  /** Fixes the end of this run. */
  @Override
  public void prepareForTriggerAvailableNow() {
    Map<String, Position> found = new HashMap<>();
    untilAvailable(this::states)
        .forEach((name, state) -> found.put(name, new Position(state.id(), state.end(), null)));
    target = found;
  }

  @Override
  public Offset latestOffset() {
    throw new UnsupportedOperationException("Spark calls latestOffset(Offset, ReadLimit)");
  }

  @Override
  public Offset latestOffset(Offset start, ReadLimit limit) {
    Position.All from = noted(start);
    String startJson = from.json();
    long waitMs = waitForNewsMs(startJson);
    Map<String, StreamState> seen = waitMs > 0 ? latest : Map.of();
    Map<String, Wanted> wanted = new HashMap<>();
    from.byStream.forEach((name, at) -> wanted.put(name, new Wanted(at, at.offset())));
    idleAt = null;
    Map<String, StreamState> states;
    if (target != null) { // returning the same position would end the run too early
      states = untilAvailable(() -> statesFor(wanted, Map.of(), 0, false));
    } else {
      try {
        states = statesFor(wanted, seen, waitMs, false);
      } catch (NatslogException error) {
        if (shouldRaise(error)) {
          throw error;
        }
        return from;
      }
    }
    awaySinceNs = null;
    latest = states;
    Map<String, Position> begin = begin(from.byStream, states);
    Map<String, Long> waiting = new LinkedHashMap<>();
    begin.forEach((name, at) -> waiting.put(name, Math.max(0, limitOf(states.get(name)) - at.offset())));
    Map<String, Long> admitted = limit instanceof ReadAllAvailable
        ? waiting : admitter.admit(waiting, (name, maxBytes) -> reach(name, begin, waiting, maxBytes), target != null);
    Map<String, Position> upto = new TreeMap<>();
    List<Range> ranges = new ArrayList<>();
    begin.forEach((name, at) -> {
      long rows = admitted.get(name);
      upto.put(name, moved(at, from.byStream.get(name), rows, states.get(name)));
      if (rows > 0) {
        ranges.add(new Range(name, at.id(), at.offset(), at.offset() + rows, isOpen(at)));
      }
    });
    List<List<Range>> tasks = untilAvailable(() -> planner.tasks(ranges, Tasks.cores()));
    Planner.shares(tasks).forEach((name, shares) -> upto.put(name, upto.get(name).with(shares)));
    from.byStream.forEach((name, at) -> {
      if (left.contains(name)) {
        upto.putIfAbsent(name, at);
      }
    });
    Position.All found = new Position.All(upto);
    end = upto;
    planned = new Plan(startJson, found.json(), ranges, tasks);
    if (found.json().equals(startJson)) {
      idleAt = startJson;
      idleRows = waiting.values().stream().mapToLong(Long::longValue).sum();
    }
    return found;
  }

  /** For how long brokers may wait until something differs: not before a trigger has found no rows. */
  private long waitForNewsMs(String start) {
    if (!start.equals(idleAt) || latest == null || target != null || System.nanoTime() - othersUntilNs < 0) {
      return 0;
    }
    return (long) (1000 * Math.min(IDLE_WAIT_S, admitter.dueInS(idleRows)));
  }

  /** Positions from Spark. Answers of leaders of older epochs than theirs are ignored. */
  private Position.All noted(Offset offset) {
    Position.All found = offset instanceof Position.All all ? all : Position.All.parse(offset.json());
    for (Position at : found.byStream.values()) {
      if (!accepted.contains(at.id())) {
        Epochs.note(at.id(), at.epoch());
      }
    }
    return found;
  }

  private Map<String, StreamState> states() {
    return StreamState.selected(broker, settings, Map.of(), 0);
  }

  /**
   * Something that is wanted is missing only if the newest leader has confirmed it for some time.
   *
   * @param withOthers also streams that the options do not select any more
   */
  private Map<String, StreamState> statesFor(
      Map<String, Wanted> wanted, Map<String, StreamState> seen, long waitMs, boolean withOthers) {
    long[] leftMs = {waitMs};
    return StreamState.confirmed(() -> {
      Map<String, StreamState> states = StreamState.selected(broker, settings, seen, leftMs[0]);
      leftMs[0] = 0;
      Set<String> asked = new HashSet<>(missing(wanted, states));
      if (withOthers) {
        asked.addAll(wanted.keySet());
        asked.removeIf(name -> states.containsKey(name) && !missing(wanted, states).contains(name));
      }
      for (String name : asked) {
        StreamState now = withOthers || states.containsKey(name) ? StreamState.newest(broker, name) : null;
        if (now != null) {
          states.put(name, now);
        }
      }
      return states;
    }, states -> !missing(wanted, states).isEmpty());
  }

  private List<String> missing(Map<String, Wanted> wanted, Map<String, StreamState> states) {
    List<String> found = new ArrayList<>();
    wanted.forEach((name, part) -> {
      StreamState state = states.get(name);
      Long validTo = state == null ? null : state.validTo(part.first.id());
      boolean isMissing = validTo == null
          ? state != null || (settings.couldHold(name) && !left.contains(name))
          : (part.first.offset() < state.start() && !isOpen(part.first)) || part.end > Math.min(state.end(), validTo);
      if (isMissing) {
        found.add(name);
      }
    });
    return found;
  }

  /** Where reading continues in each selected stream that exists; losses are reported. */
  private Map<String, Position> begin(Map<String, Position> position, Map<String, StreamState> states) {
    Map<String, Position> found = new TreeMap<>();
    position.forEach((name, at) -> {
      if (states.containsKey(name)) {
        left.remove(name);
        found.put(name, effectiveStart(at, states.get(name)));
      } else if (!left.contains(name)) {
        noteMissing(name, at);
      }
    });
    states.forEach((name, state) -> {
      if (!position.containsKey(name) && (target == null || target.containsKey(name))) {
        found.put(name, new Position(state.id(), state.start(), state.start()));
        open.add(new Begun(state.id(), state.start()));
      }
    });
    return found;
  }

  /** Whether nothing was read yet from where the log began. */
  private boolean isOpen(Position at) {
    return open.contains(new Begun(at.id(), at.offset()));
  }

  /** A stream that was read is not among the selected ones: it has left the selection, or it was deleted. */
  private void noteMissing(String name, Position at) {
    boolean hasLeft = settings.group == null
        ? !settings.couldHold(name) : untilAvailable(() -> StreamState.newest(broker, name)) != null;
    if (!hasLeft) {
      Loss.report(settings, name, at.offset(), null, Loss.DELETED);
      gone.put(name, at);
      return;
    }
    LOG.warn("{} does not select stream '{}': it is not read, and the checkpoint keeps its position {}. If it is "
        + "selected again, it continues there", settings.selection(), name, at.offset());
    left.add(name);
  }

  /** How far this stream is read: with `availableNow`, not beyond its end when the run started. */
  private long limitOf(StreamState state) {
    if (target == null) {
      return state.end();
    }
    Position at = target.get(state.name());
    if (at == null || !at.id().equals(state.id())) { // created again since: its target is its current end
      at = new Position(state.id(), state.end(), null);
      target.put(state.name(), at);
    }
    return Math.min(state.end(), at.offset());
  }

  private Object[] reach(String name, Map<String, Position> begin, Map<String, Long> waiting, Long maxBytes) {
    Position at = begin.get(name);
    Range whole = new Range(name, at.id(), at.offset(), at.offset() + waiting.get(name), isOpen(at));
    for (long start = whole.start(); start < whole.end(); ) {
      Map<String, Object> query = new LinkedHashMap<>();
      query.put("start", start);
      query.put("end", whole.end());
      query.put("max_bytes", maxBytes);
      try {
        JsonNode found = untilAvailable(
            () -> broker.get("/v1/streams/" + Broker.inPath(name) + "/extent", query));
        JsonNode bytes = found.path("bytes");
        return new Object[] {
          found.path("end").asLong() - whole.start(),
          bytes.isIntegralNumber() ? Long.valueOf(bytes.asLong()) : null
        };
      } catch (NatslogException error) {
        long first = whole.leftFrom(start, whole.end(), error);
        if (first == start) {
          throw error;
        }
        start = first;
      }
    }
    return new Object[] {whole.rows(), 0L};
  }

  /** Where reading can continue; the range before it is reported as lost. */
  private Position effectiveStart(Position at, StreamState state) {
    Long validTo = state.validTo(at.id());
    if (validTo == null) {
      Loss.recreated(settings, state.name(), at.offset(), null, at.id(), state.id());
      return new Position(state.id(), state.start(), state.start());
    }
    if (at.offset() > validTo) {
      Loss.beyondFork(settings, state, at.offset(), validTo, at.id());
    }
    Position found = at;
    if (!state.id().equals(at.id())) { // restored from an export: the same messages at the same offsets
      long offset = Math.min(at.offset(), validTo);
      found = new Position(state.id(), offset, offset);
    }
    if (found.offset() < state.start() && isOpen(found)) {
      open.add(new Begun(found.id(), state.start()));
      return new Position(found.id(), state.start(), found.start() == null ? null : Long.valueOf(state.start()));
    }
    if (found.offset() < state.start()) {
      Loss.report(settings, state.name(), found.offset(), state.start(), Loss.REMOVED);
      return new Position(found.id(), state.start(), found.start() == null ? null : Long.valueOf(state.start()));
    }
    if (found.offset() > state.end()) {
      Loss.shorter(settings, state.name(), state.end(), found.offset(), state.end());
      return new Position(found.id(), state.end(), null);
    }
    return found;
  }

  /** The position after `rows` more. One that does not move keeps its text. */
  private static Position moved(Position at, Position before, long rows, StreamState state) {
    if (rows == 0) {
      return at;
    }
    boolean hasJoined = before == null || !before.id().equals(at.id());
    long epoch = state.epoch() > FIRST_EPOCH ? state.epoch() : 0; // no leader is older than that of the first
    return new Position(at.id(), at.offset() + rows, hasJoined ? at.start() : null, List.of(), epoch);
  }

  /** The answer; waits while brokers are unavailable, or streams have no leader. */
  private <T> T untilAvailable(Supplier<T> ask) {
    while (true) {
      try {
        T answer = ask.get();
        awaySinceNs = null;
        return answer;
      } catch (NatslogException error) {
        if (shouldRaise(error)) {
          throw error;
        }
      }
    }
  }

  /** Whether this error ends the query: it is not retriable, or the outage has lasted too long. */
  private boolean shouldRaise(NatslogException error) {
    if (!error.retriable || Boolean.FALSE.equals(error.facts.get("answered"))) {
      return true;
    }
    long now = System.nanoTime();
    awaySinceNs = awaySinceNs == null ? Long.valueOf(now) : awaySinceNs;
    double awayS = (now - awaySinceNs) / 1e9;
    LOG.warn("the query has been waiting for {} s: {}", Math.round(awayS), error.getMessage());
    if (awayS <= OUTAGE_TIMEOUTS * settings.timeoutS) {
      return false;
    }
    return !acceptsOlderLeader(error);
  }

  /** Whether only the leader of an older epoch responds, as after a restore: it is accepted from now on. */
  private boolean acceptsOlderLeader(NatslogException error) {
    if (!error.is("not_leader") || !(error.facts.get("id") instanceof String id)) {
      return false;
    }
    LOG.warn("stream {}: no broker has the leader epoch of the checkpoint; an older one is accepted now", id);
    Epochs.forget(id);
    accepted.add(id);
    awaySinceNs = null;
    return true;
  }

  // ---- which ranges ----

  @Override
  public InputPartition[] planInputPartitions(Offset start, Offset end) {
    Position.All begin = noted(start);
    Position.All upto = noted(end);
    if (planned != null && planned.start.equals(begin.json()) && planned.end.equals(upto.json())) {
      return Tasks.partitions(planned.tasks); // a moment ago; a task reports what has been lost since
    }
    Map<String, Position> moved = new TreeMap<>(upto.byStream);
    moved.entrySet().removeIf(one -> one.getValue().equals(begin.byStream.get(one.getKey())));
    if (moved.isEmpty()) {
      return new InputPartition[0];
    }
    Map<String, Wanted> wanted = new TreeMap<>();
    moved.forEach((name, last) -> {
      Position first = begin.byStream.get(name);
      boolean goesOn = first != null && first.id().equals(last.id());
      long joined = last.start() == null ? 0 : last.start();
      wanted.put(name, new Wanted(goesOn ? first : new Position(last.id(), joined, null), last.offset()));
    });
    Map<String, StreamState> states = untilAvailable(() -> statesFor(wanted, Map.of(), 0, true));
    List<Range> ranges = new ArrayList<>();
    Map<String, List<Position.Share>> numbered = new TreeMap<>();
    moved.forEach((name, last) -> {
      Range range = rangeOf(name, wanted.get(name).first.offset(), last, states.get(name));
      if (range != null && range.rows() > 0) {
        ranges.add(range);
      }
      numbered.put(name, last.tasks());
    });
    if (planned != null && planned.ranges.equals(ranges)) {
      return Tasks.partitions(planned.tasks);
    }
    return Tasks.partitions(untilAvailable(() -> planner.tasksAgain(ranges, numbered)));
  }

  /** The part of a batch in one stream that can still be read; null where there is none. */
  private Range rangeOf(String name, long begun, Position last, StreamState state) {
    if (state == null) {
      Loss.report(settings, name, begun, last.offset(), Loss.DELETED);
      return null;
    }
    Long validTo = state.validTo(last.id());
    if (validTo == null) {
      Loss.recreated(settings, name, begun, last.offset(), last.id(), state.id());
      return null;
    }
    long end = last.offset();
    if (end > validTo) {
      Loss.beyondFork(settings, state, end, validTo, last.id());
      if (begun >= validTo) {
        return null;
      }
      end = validTo;
    }
    long low = Math.min(effectiveStart(new Position(last.id(), begun, null), state).offset(), end);
    long high = Math.min(end, state.end());
    if (high < end) {
      Loss.shorter(settings, name, Math.max(low, high), end, high);
    }
    return new Range(name, state.id(), low, high, isOpen(new Position(last.id(), low, null)));
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new Tasks.Factory(settings, columns, Pushed.NOTHING);
  }

  // ---- Spark's checkpoint ----

  @Override
  public Offset deserializeOffset(String json) {
    return Position.All.parse(json);
  }

  /** A batch without rows of these streams had those of another source, which must not wait for this one. */
  @Override
  public void commit(Offset end) {
    String now = end.json();
    if (now.equals(committed)) {
      othersUntilNs = System.nanoTime() + (long) (1e9 * OTHERS_S);
    }
    committed = now;
  }

  @Override
  public void stop() {}

  // ---- what operators see ----

  /** The newest positions; with `lag`, how far the query is behind them. Spark uses them for its progress only. */
  @Override
  public Offset reportLatestOffset() {
    if (latest == null) {
      return null;
    }
    ObjectNode found = JsonNodeFactory.instance.objectNode();
    Map<String, Lag.Behind> lags = settings.reportsLag ? lag.of(latest, end) : Map.of();
    for (StreamState state : new TreeMap<>(latest).values()) {
      ObjectNode at = found.putObject(state.name()).put("id", state.id()).put("offset", state.end());
      Lag.Behind behind = lags.get(state.name());
      if (behind != null) {
        at.put("rows_behind", behind.rows()).put("bytes_behind", behind.bytes())
            .put("seconds_behind", behind.seconds());
        settings.losses.of(state.name()).ifPresentOrElse(
            rows -> at.put("rows_lost", rows), () -> at.putNull("rows_lost"));
      }
    }
    gone.forEach((name, at) -> {
      if (settings.reportsLag && !found.has(name)) { // nothing of it is unread; what was lost is shown all the same
        ObjectNode lost = found.putObject(name).put("id", at.id()).put("offset", at.offset())
            .put("rows_behind", 0).put("bytes_behind", 0).put("seconds_behind", 0.0);
        settings.losses.of(name).ifPresentOrElse(
            rows -> lost.put("rows_lost", rows), () -> lost.putNull("rows_lost"));
      }
    });
    reported = lags;
    return new Reported(found.toString());
  }

  private static final class Reported extends Offset {
    private final String json;

    Reported(String json) {
      this.json = json;
    }

    @Override
    public String json() {
      return json;
    }
  }

  /** The sums of what `reportLatestOffset` stated; one that is not known is left out. */
  @Override
  public Map<String, String> metrics(Optional<Offset> latestConsumed) {
    if (!settings.reportsLag || latest == null) {
      return Map.of();
    }
    Map<String, String> found = new TreeMap<>();
    ObjectNode byStream = JsonNodeFactory.instance.objectNode();
    long rows = 0;
    long bytes = 0;
    double seconds = 0;
    long lost = 0;
    boolean isLostKnown = true;
    boolean isKnown = true;
    for (String name : gone.keySet()) {
      OptionalLong lostRows = reported.containsKey(name) ? OptionalLong.of(0) : settings.losses.of(name);
      isLostKnown &= lostRows.isPresent();
      lost += lostRows.orElse(0);
    }
    for (Map.Entry<String, Lag.Behind> one : reported.entrySet()) {
      Lag.Behind behind = one.getValue();
      byStream.put(one.getKey(), behind.rows());
      rows += behind.rows();
      isKnown &= behind.bytes() != null && behind.seconds() != null;
      bytes += behind.bytes() == null ? 0 : behind.bytes();
      seconds = Math.max(seconds, behind.seconds() == null ? 0 : behind.seconds());
      OptionalLong lostRows = settings.losses.of(one.getKey());
      isLostKnown &= lostRows.isPresent();
      lost += lostRows.orElse(0);
    }
    found.put("rowsBehind", String.valueOf(rows));
    found.put("rowsBehindByStream", byStream.toString());
    if (isKnown) {
      found.put("bytesBehind", String.valueOf(bytes));
      found.put("secondsBehind", String.valueOf(seconds));
    }
    if (isLostKnown) {
      found.put("rowsLost", String.valueOf(lost));
    }
    return found;
  }
}
