package natslog;

import java.util.List;
import org.apache.spark.TaskContext;

/**
 * How far the reader of a task in real time has come, for a sink in the same task that stores each row once.
 *
 * <p>Theory of operation. Spark runs reader and sink of a task in one thread, and asks for the next row when the sink has
 * everything that follows from the one before, as long as the plan between them has only maps and filters. So when the
 * reader is asked, all rows before its position have passed. A plan in which rows are exchanged, sorted or buffered is
 * recognised by rows that do not belong to the row that was read last.
 */
final class SourceProgress {
  /** A sink that stores rows by the offsets of the source rows which they come from. */
  interface Sink {
    /**
     * Called before the first row is read.
     *
     * @return of which rows the target has the output, so that they need not be read again
     */
    List<Position.Passed> begin(TailReader.Task task, String by);

    /** The sink has everything that follows from the rows of the stream before this offset. */
    void passed(long offset);
  }

  private static final ThreadLocal<SourceProgress> OF_THREAD = new ThreadLocal<>();

  private final long taskAttempt;
  private Sink sink;
  private TailReader.Task task;
  private long offset = -1; // of the row that was read last

  private SourceProgress(long taskAttempt) {
    this.taskAttempt = taskAttempt;
  }

  static SourceProgress ofThisTask() {
    TaskContext context = TaskContext.get();
    long attempt = context == null ? -1 : context.taskAttemptId();
    SourceProgress found = OF_THREAD.get();
    if (found == null || found.taskAttempt != attempt) {
      found = new SourceProgress(attempt);
      OF_THREAD.set(found);
    }
    return found;
  }

  void write(Sink to) {
    if (task != null) {
      throw NatslogException.config(
          "exactlyOnce=true: stream '" + task.stream() + "' was read before its rows could be written: something in the "
              + "plan reads ahead (mapPartitions); remove it");
    }
    sink = to;
  }

  // ---- the reader ----

  /** As `Sink.begin`. */
  List<Position.Passed> begin(TailReader.Task read, String by) {
    if (task != null) {
      throw NatslogException.config(
          "a task in real time reads stream '" + read.stream() + "' after stream '" + task.stream() + "': read each "
              + "stream in a task of its own (do not use coalesce)");
    }
    task = read;
    return sink == null ? List.of() : sink.begin(read, by);
  }

  /** Called for each row, and at least once a second. */
  void passed(long before) {
    offset = -1;
    if (sink != null) {
      sink.passed(before);
    }
  }

  void read(long at) {
    offset = at;
  }

  // ---- the sink ----

  /** The task has no more rows. Its reader was perhaps not asked again: the time of the batch is over. */
  void end() {
    if (offset >= 0) {
      passed(offset + 1);
    }
  }

  /** Whether the row that was read last has this offset. */
  boolean isAt(long at) {
    return at == offset && at >= 0;
  }
}
