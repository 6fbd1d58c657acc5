package natslog;

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
class StreamRead implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
  private static final Logger LOG = LoggerFactory.getLogger("natslog.source");
  private static final int OUTAGE_TIMEOUTS = 6;
  private static final double IDLE_WAIT_S = 0.4;
  private static final double OTHERS_S = 10;
  private static final long FIRST_EPOCH = 1;
  private static final String REAL_TIME = "org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode";

  /** What was planned last. `begins`: the positions from which it goes on, behind what is lost. */
  record Planned(String start, String end, List<List<Range>> tasks, Map<String, Position> begins) {}

  private record Begun(String id, long offset) {}

  final Settings settings;
  final List<String> columns;
  private final Broker broker;
  private final ReadPlans plans;
  private final Lag lag;
  private final Admitter admitter;
  private final Set<Begun> open = new HashSet<>(); // where the logs began when this query did
  private final Set<String> accepted = new HashSet<>(); // ids of streams whose older leader is accepted
  private final Set<String> left = new HashSet<>(); // streams of the checkpoint that exist and are not selected now
  private final Map<String, Position> gone = new TreeMap<>(); // streams that were deleted
  private Map<String, Position> target;
  private Map<String, StreamState> latest;
  Map<String, Position> end = Map.of();
  private Map<String, Lag.Behind> reported = Map.of();
  Planned planned;
  String source = ""; // its name among those of the query: of its folder in the checkpoint
  boolean isRealTime; // batches end by their time, and rows are handed on as they come
  private Offset initial;
  private String idleAt;
  private long idleRows;
  private String committed;
  private long othersUntilNs = System.nanoTime();
  private Long awaySinceNs;

  StreamRead(Settings settings, List<String> columns) {
    this.settings = settings;
    this.columns = columns;
    this.broker = new Broker(settings, Settings.FIRST_ANSWER_WITHIN_S);
    this.plans = new ReadPlans(broker, settings);
    this.lag = new Lag(settings);
    this.admitter = new Admitter(settings);
  }

  /** With the real-time mode where this Spark has it. */
  static StreamRead of(Settings settings, List<String> columns) {
    try {
      Class.forName(REAL_TIME, false, StreamRead.class.getClassLoader());
    } catch (ClassNotFoundException error) {
      return new StreamRead(settings, columns);
    }
    return RealTime.read(settings, columns);
  }

  /** Loaded only where Spark has the interfaces, and with it what it names. */
  private static final class RealTime {
    static StreamRead read(Settings settings, List<String> columns) {
      return new RealTimeRead(settings, columns);
    }
  }

  // ---- how far ----

  /** Determined once: Spark asks for it again when it plans the first batch. */
  @Override
  public Offset initialOffset() {
    if (initial == null) {
      initial = resolvedStart();
    }
    return initial;
  }

  private Offset resolvedStart() {
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
    boolean isLimited = !(limit instanceof ReadAllAvailable);
    ReadPlans.Asked asked = asked(startJson, from.byStream, isLimited);
    idleAt = null;
    ReadPlans.Plan plan;
    if (target != null) { // returning the same position would end the run too early
      plan = untilAvailable(() -> plans.planned(asked, left));
    } else {
      try {
        plan = plans.planned(asked, left);
      } catch (NatslogException error) {
        if (shouldRaise(error)) {
          throw error;
        }
        return from;
      }
    }
    awaySinceNs = null;
    latest = new TreeMap<>();
    plan.streams().forEach((name, one) -> latest.put(name, one.state()));
    noteMissing(from.byStream, plan, asked);
    Map<String, List<Position.Share>> shares = ReadPlans.shares(plan.tasks());
    Map<String, Position> begins = new TreeMap<>();
    Map<String, Position> upto = new TreeMap<>();
    plan.streams().forEach((name, one) -> {
      Position before = from.byStream.get(name);
      begins.put(name, begun(before, one));
      upto.put(name, moved(begins.get(name), before, one, shares.getOrDefault(name, List.of())));
    });
    from.byStream.forEach((name, at) -> {
      if (left.contains(name)) {
        begins.putIfAbsent(name, at);
        upto.putIfAbsent(name, at);
      }
    });
    if (isLimited) {
      admitter.note(plan.streams());
    }
    Position.All found = new Position.All(upto);
    end = upto;
    planned = new Planned(startJson, found.json(), withoutPassed(plan.tasks(), begins), begins);
    if (found.json().equals(startJson)) {
      idleAt = startJson;
      idleRows = plan.streams().values().stream().mapToLong(ReadPlans.Stream::waitingRows).sum();
    }
    return found;
  }

  /** Whether it is read: one that has left the selection keeps its position. */
  boolean isSelected(String stream) {
    return !left.contains(stream);
  }

  private ReadPlans.Asked asked(String start, Map<String, Position> from, boolean isLimited) {
    long waitMs = waitForNewsMs(start);
    Map<String, ReadPlans.From> positions = new LinkedHashMap<>();
    for (String name : admitter.inTurn(from.keySet())) {
      if (settings.couldHold(name)) {
        Position at = from.get(name);
        positions.put(name, new ReadPlans.From(at.id(), at.offset(), null, isOpen(at), List.of()));
      }
    }
    Map<String, Long> limits = isLimited ? admitter.limits(target != null) : Map.of();
    return new ReadPlans.Asked(StreamState.selection(settings), positions, target, limits, false,
        waitMs > 0 ? latest : Map.of(), waitMs);
  }

  /** For how long brokers may wait until something differs: not before a trigger has found no rows. */
  private long waitForNewsMs(String start) {
    if (isRealTime || !start.equals(idleAt) || latest == null || target != null || System.nanoTime() - othersUntilNs < 0) {
      return 0;
    }
    return (long) (1000 * Math.min(IDLE_WAIT_S, admitter.dueInS(idleRows)));
  }

  /** Positions from Spark. Answers of leaders of older epochs than theirs are ignored. */
  Position.All noted(Offset offset) {
    Position.All found = offset instanceof Position.All all ? all : Position.All.parse(offset.json());
    for (Position at : found.byStream.values()) {
      if (!accepted.contains(at.id())) {
        Epochs.note(at.id(), at.epoch());
      }
    }
    return found;
  }

  private Map<String, StreamState> states() {
    return StreamState.selected(broker, settings);
  }

  /** Where reading continues in a stream. One that is new, or was created again, has `start`. */
  private Position begun(Position at, ReadPlans.Stream stream) {
    StreamState state = stream.state();
    boolean goesOn = at != null && at.id().equals(state.id());
    if (at == null || (goesOn && isOpen(at))) {
      open.add(new Begun(state.id(), stream.start()));
    }
    if (target != null && (!target.containsKey(state.name()) || !target.get(state.name()).id().equals(state.id()))) {
      target.put(state.name(), new Position(state.id(), state.end(), null)); // created again since
    }
    if (!goesOn) {
      return new Position(state.id(), stream.start(), stream.start());
    }
    Long start = at.start() == null ? null : Long.valueOf(stream.start());
    return at.offset() == stream.start() ? at
        : new Position(at.id(), stream.start(), start, List.of(), 0, at.passedSets(stream.start()));
  }

  private boolean isOpen(Position at) {
    return isOpen(at.id(), at.offset());
  }

  /** Reports losses. A stream that was read and is not planned has left the selection, or it was deleted. */
  private void noteMissing(Map<String, Position> from, ReadPlans.Plan plan, ReadPlans.Asked asked) {
    left.removeAll(plan.streams().keySet());
    Map<String, ReadPlans.From> known = new TreeMap<>(asked.positions());
    known.keySet().removeAll(left);
    from.forEach((name, at) -> {
      if (plan.streams().containsKey(name) || left.contains(name)) {
        return;
      }
      if ("deleted".equals(plan.others().get(name))) {
        gone.put(name, at);
        return;
      }
      LOG.warn("{} does not select stream '{}': it is not read, and the checkpoint keeps its position {}. If it is "
          + "selected again, it continues there", settings.selection(), name, at.offset());
      left.add(name);
    });
    Loss.report(settings, plan, known);
  }

  /** The position behind what is read. One that does not move keeps its text. */
  private static Position moved(Position at, Position before, ReadPlans.Stream stream, List<Position.Share> tasks) {
    if (stream.end() == stream.start()) {
      return at;
    }
    return moved(at, before, stream.end(), tasks, stream.state().epoch());
  }

  static Position moved(Position at, Position before, long upto, List<Position.Share> tasks, long epoch) {
    boolean hasJoined = before == null || !before.id().equals(at.id());
    long noted = epoch > FIRST_EPOCH ? epoch : 0; // no leader is older than the first
    return new Position(at.id(), upto, hasJoined ? at.start() : null, tasks, noted, at.passedSets(upto));
  }

  /** Whether nothing was read yet from where the log began, so that what retention removes is not missing. */
  boolean isOpen(String id, long start) {
    return open.contains(new Begun(id, start));
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
    Map<String, ReadPlans.From> positions = new TreeMap<>();
    moved.forEach((name, last) -> {
      Position first = begin.byStream.get(name);
      boolean goesOn = first != null && first.id().equals(last.id());
      long from = goesOn ? first.offset() : last.start() == null ? 0 : last.start();
      positions.put(name, new ReadPlans.From(last.id(), from, last.offset(), isOpen(last.id(), from), last.tasks()));
    });
    ReadPlans.Plan plan = untilAvailable(() -> plans.planned(ReadPlans.Asked.of(positions, true), List.of()));
    Loss.report(settings, plan, positions);
    boolean isEmpty = plan.tasks().stream().allMatch(List::isEmpty);
    return isEmpty ? new InputPartition[0] : Tasks.partitions(withoutPassed(plan.tasks(), begin.byStream));
  }

  /** The same ranges, without rows that other readers of the same streams had passed. */
  private static List<List<Range>> withoutPassed(List<List<Range>> tasks, Map<String, Position> begins) {
    return tasks.stream().map(task -> task.stream().map(one -> {
      Position at = begins.get(one.stream());
      return at != null && at.id().equals(one.id()) ? one.behind(at) : one;
    }).toList()).toList();
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
