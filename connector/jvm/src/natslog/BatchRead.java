package natslog;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;

/** Reads `[start, end)` of each stream, as the options say; by default all that is committed now. */
final class BatchRead implements Batch {
  private final Settings settings;
  private final List<String> columns;
  private final Pushed pushed;
  private List<List<Range>> tasks;

  BatchRead(Settings settings, List<String> columns, Pushed pushed) {
    this.settings = settings;
    this.columns = columns;
    this.pushed = pushed;
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return Tasks.partitions(tasks());
  }

  /** About as many bytes as are stored for all rows and columns. */
  long bytes() {
    return tasks().stream().flatMap(List::stream).mapToLong(Range::bytes).sum();
  }

  /** At most as many rows. */
  long rows() {
    return tasks().stream().flatMap(List::stream).mapToLong(Range::rows).sum();
  }

  /** What the query aggregates; null where brokers do not state it. */
  Object[] aggregated(Aggregates wanted) {
    return wanted.values(settings, ranges(new Broker(settings, Settings.FIRST_ANSWER_WITHIN_S)));
  }

  private List<List<Range>> tasks() {
    tasks = tasks == null ? planned() : tasks;
    return tasks;
  }

  private List<List<Range>> planned() {
    Broker broker = new Broker(settings, Settings.FIRST_ANSWER_WITHIN_S);
    Map<String, ReadPlans.From> positions = new TreeMap<>();
    ranges(broker).stream().filter(one -> one.rows() > 0).forEach(one -> positions.put(
        one.stream(), new ReadPlans.From(one.id(), one.start(), one.end(), one.isOpen(), List.of())));
    if (positions.isEmpty()) {
      return List.of();
    }
    ReadPlans.Plan plan = new ReadPlans(broker, settings).planned(ReadPlans.Asked.of(positions, false), List.of());
    Loss.report(settings, plan, positions);
    return plan.tasks();
  }

  private List<Range> ranges(Broker broker) {
    Map<String, StreamState> states = StreamState.selected(broker, settings);
    checkAllThere(settings, states);
    Resolver resolver = new Resolver(broker, settings);
    List<Range> ranges = new ArrayList<>();
    for (StreamState state : states.values()) {
      long end = resolver.end(state);
      long start = resolver.start(state, end, states.keySet());
      if (start > end && mayCross(state.name())) {
        start = end;
      }
      if (start > end) {
        throw NatslogException.config(
            "stream '" + state.name() + "': the start, offset " + start + ", is above the end, offset " + end);
      }
      boolean isOpen = settings.start.isLogStart(state.name());
      start = Math.max(start, Math.max(pushed.from(), resolver.at(state, pushed.fromUs(), start)));
      end = Math.min(end, Math.min(pushed.to(), resolver.at(state, pushed.toUs(), end)));
      ranges.add(new Range(state.name(), state.id(), start, end, isOpen));
    }
    return ranges;
  }

  /** Raises: a stream that is named does not exist. */
  static void checkAllThere(Settings settings, Map<String, StreamState> states) {
    for (String name : settings.names) {
      if (!states.containsKey(name)) {
        throw NatslogException.notFound(
            "there is no stream '" + name + "': create it, or correct the option stream");
      }
    }
  }

  /** The end is resolved before the start; if the start is a time or a cursor, messages may have been recorded since. */
  private boolean mayCross(String stream) {
    Long firstUs = settings.start.timeUsOf(stream);
    Long lastUs = settings.end.timeUsOf(stream);
    boolean isCursor = firstUs == null && settings.start.of(stream).startsWith(Settings.CURSOR);
    if (isCursor) {
      return lastUs == null && settings.end.of(stream).equals("latest");
    }
    return firstUs != null && (lastUs == null ? settings.end.of(stream).equals("latest") : firstUs <= lastUs);
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new Tasks.Factory(settings, columns, pushed);
  }
}
