package natslog;

import java.util.Map;
import org.apache.spark.TaskContext;
import org.apache.spark.memory.MemoryConsumer;
import org.apache.spark.memory.MemoryMode;

/** What the buffers of a task take, counted against the memory that Spark grants the task. */
final class TaskMemory implements AutoCloseable {
  private final Counted counted;
  private long held;

  private TaskMemory(Counted counted) {
    this.counted = counted;
  }

  /** Of the task that runs in this thread; on the driver nothing is counted. */
  static TaskMemory ofThisTask() {
    TaskContext task = TaskContext.get();
    return new TaskMemory(task == null ? null : new Counted(task));
  }

  /**
   * Counts a buffer that is about to take the place of a smaller one.
   *
   * @throws NatslogException Spark does not grant as much, also after others have spilled
   */
  void grow(long from, long to) {
    long more = to - from;
    long granted = counted == null ? more : counted.acquireMemory(more);
    held += granted;
    if (granted < more) {
      throw new NatslogException("config",
          "the task needs " + mib(held - granted + more) + " MiB for a batch of messages, and Spark grants it "
              + mib(held) + " MiB: raise spark.executor.memory (on one machine: spark.driver.memory), or run fewer "
              + "tasks at once", false, Map.of());
    }
  }

  private static long mib(long bytes) {
    return bytes + (1 << 20) - 1 >> 20;
  }

  /** The buffers are not used any more. */
  @Override
  public void close() {
    if (counted != null) {
      counted.freeMemory(held);
    }
    held = 0;
  }

  private static final class Counted extends MemoryConsumer {
    Counted(TaskContext task) {
      super(task.taskMemoryManager(), task.taskMemoryManager().pageSizeBytes(), MemoryMode.ON_HEAP);
    }

    /** A batch is in use until the next one is read. */
    @Override
    public long spill(long size, MemoryConsumer trigger) {
      return 0;
    }
  }
}
