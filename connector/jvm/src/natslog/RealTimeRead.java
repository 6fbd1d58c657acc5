package natslog;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode;

/**
 * The same source in lines of Spark that have the real-time mode (4.1 and later): this class is loaded only there.
 *
 * <p>Theory of operation. A batch has no end when it begins. One task for each stream reads its tail until the time of
 * the batch is over, and reports where it is; these positions are the end of the batch. They are the same positions as
 * those of micro-batches, so that a query changes from one to the other, and what is lost is found, as there, when the
 * next batch is planned.
 */
final class RealTimeRead extends StreamRead implements SupportsRealTimeMode {
  private static final String LOCAL = "local";

  private Position.All from;

  RealTimeRead(Settings settings, List<String> columns) {
    super(settings, columns);
  }

  @Override
  public void prepareForRealTimeMode() {
    settings.refuseLimits();
    isRealTime = true;
  }

  /** Where streams end now. A batch in real time is not limited by it. */
  @Override
  public Offset latestOffset(Offset start, ReadLimit limit) {
    return super.latestOffset(start, isRealTime ? ReadLimit.allAvailable() : limit);
  }

  @Override
  public InputPartition[] planInputPartitions(Offset start) {
    from = noted(start);
    if (planned == null || !planned.start().equals(from.json())) {
      latestOffset(start, ReadLimit.allAvailable());
    }
    end = planned.begins();
    List<InputPartition> tasks = new ArrayList<>();
    planned.begins().forEach((name, at) -> {
      for (int share = 0; isSelected(name) && share < settings.realTimeReaders; share++) {
        tasks.add(new TailReader.Task(
            source, name, at, isOpen(at.id(), at.offset()), share, settings.realTimeReaders));
      }
    });
    checkSlots(tasks.size());
    return tasks.toArray(InputPartition[]::new);
  }

  /** Tasks of a batch that do not run at once would find its time to be over, and never read anything. */
  private static void checkSlots(int tasks) {
    int slots = Tasks.cores();
    if (tasks > slots && SparkSession.active().sparkContext().master().startsWith(LOCAL)) {
      throw NatslogException.config(
          "a query in real time reads each stream by a task of its own, all of them at once: " + tasks + " tasks need as "
              + "many cores, and this Spark has " + slots + ": start it with more (for example, master local[" + 2 * tasks
              + "]), or select fewer streams");
    }
  }

  @Override
  public Offset mergeOffsets(PartitionOffset[] offsets) {
    Map<String, List<TailReader.Reached>> byStream = new TreeMap<>();
    for (PartitionOffset one : offsets) {
      TailReader.Reached reached = (TailReader.Reached) one;
      byStream.computeIfAbsent(reached.stream(), name -> new ArrayList<>()).add(reached);
    }
    Map<String, Position> upto = new TreeMap<>(planned.begins());
    byStream.forEach((name, reached) -> upto.computeIfPresent(name,
        (unused, at) -> merged(at, from.byStream.get(name), reached)));
    end = upto;
    return new Position.All(upto);
  }

  /** Behind the rows that all readers of a stream have read, with what single ones have read beyond it. */
  private Position merged(Position at, Position before, List<TailReader.Reached> reached) {
    String by = settings.realTimeReadersBy;
    List<Long> ends = new ArrayList<>(Collections.nCopies(settings.realTimeReaders, at.offset()));
    List<Position.Passed> passed = new ArrayList<>();
    for (Position.Passed one : at.passed()) {
      if (one.by().equals(by) && one.ends().size() == ends.size()) {
        ends = new ArrayList<>(one.ends());
      } else {
        passed.add(one); // of another number of readers: valid as long as it is further than all of these
      }
    }
    long epoch = 0;
    for (TailReader.Reached one : reached) {
      ends.set(one.share(), Math.max(ends.get(one.share()), one.offset()));
      epoch = Math.max(epoch, one.epoch());
    }
    if (Collections.max(ends) == at.offset()) {
      return at;
    }
    passed.add(new Position.Passed(by, ends));
    Position whole = new Position(at.id(), at.offset(), at.start(), List.of(), at.epoch(), passed);
    return moved(whole, before, Collections.min(ends), List.of(), epoch);
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return isRealTime ? new TailReader.Factory(settings, columns) : super.createReaderFactory();
  }
}
