package natslog;

import java.io.IOException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeRead;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Runs in a task on an executor: the rows of one stream as they are committed, over one response that does not end
 * (`GET /v1/streams/{name}/tail`).
 *
 * <p>While no broker serves the stream, requests are repeated; the task ends with its batch, at the position that it has
 * reached, and the driver decides for how long an outage is waited for. Invariant: `at` is behind the last row that was
 * handed on, and no row before it was left out.
 */
final class TailReader implements SupportsRealTimeRead<InternalRow> {
  /**
   * A stream, and the position from which it is read. `source`: which one of the query reads it. `isOpen`: as of a range.
   * `share`: the number of the reader, where `shares` readers divide the rows among them.
   */
  record Task(String source, String stream, Position from, boolean isOpen, int share, int shares) implements InputPartition {}

  /** Where a task is at the end of its batch. `epoch`: of the leader that sent the last rows; 0: of none. */
  record Reached(String stream, int share, long offset, long epoch) implements PartitionOffset {}

  record Factory(Settings settings, List<String> columns) implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new TailReader(settings, columns, (Task) partition);
    }
  }

  private static final Logger LOG = LoggerFactory.getLogger("natslog.source");
  private static final long LOG_EVERY_NS = 10_000_000_000L;

  /** The broker sends something each second. */
  private static final long SILENT_MS = 5_000;

  private static final double ANSWER_WITHIN_S = 2;
  private static final int US_PER_MS = 1000;

  private final Settings settings;
  private final List<String> columns;
  private final List<String> asked;
  private final Task task;
  private final Broker broker;
  private final TaskMemory memory = TaskMemory.ofThisTask();
  private SourceProgress progress;
  private String passed; // rows that are not sent again, as requests have it; null: none
  private Broker.Answer answer;
  private Message message;
  private ColumnarBatch batch;
  private ColumnVector offsets;
  private ColumnVector times;
  private int row; // the next one of the batch
  private long at;
  private long behind; // the offset behind the message that was read last
  private long epoch;
  private long heardNs;
  private int damaged; // answers, one after another
  private long silentUntilNs = System.nanoTime();
  private boolean isOpen;

  TailReader(Settings settings, List<String> columns, Task task) {
    this.settings = settings;
    this.columns = columns;
    this.task = task;
    this.at = task.from().offset();
    this.behind = at;
    this.isOpen = task.isOpen();
    this.broker = Broker.brief(settings, ANSWER_WITHIN_S);
    LinkedHashSet<String> stored = new LinkedHashSet<>(columns);
    stored.remove("stream");
    stored.addAll(List.of("offset", "timestamp"));
    this.asked = new ArrayList<>(stored);
  }

  @Override
  public PartitionOffset getOffset() {
    return new Reached(task.stream(), task.share(), at, epoch);
  }

  /** As Spark 4.1 calls it. */
  @Override
  public RecordStatus nextWithTimeout(Long timeoutMs) throws IOException {
    return nextUntil(System.nanoTime() + 1_000_000 * timeoutMs);
  }

  /** As later versions do. */
  @Override
  public RecordStatus nextWithTimeout(Long startMs, Long timeoutMs) throws IOException {
    return nextWithTimeout(timeoutMs);
  }

  private RecordStatus nextUntil(long untilNs) {
    if (progress == null) {
      begin();
    }
    progress.passed(at);
    while (batch == null || row == batch.numRows()) {
      at = behind;
      progress.passed(at);
      if (!hasRead(untilNs)) {
        return RecordStatus.newStatusWithoutArrivalTime(false);
      }
    }
    progress.read(offsets.getLong(row));
    at = offsets.getLong(row) + 1;
    return RecordStatus.newStatusWithArrivalTimeMs(times.getLong(row++) / US_PER_MS);
  }

  private void begin() {
    progress = SourceProgress.ofThisTask();
    passed = task.from().passedBeyond(at, progress.begin(task, settings.realTimeReadersBy));
  }

  @Override
  public boolean next() {
    throw new UnsupportedOperationException("a tail has no end: it is read in real time only");
  }

  @Override
  public InternalRow get() {
    return batch.getRow(row - 1);
  }

  /** Whether another message was read, with rows or without; false where the time is over. */
  private boolean hasRead(long untilNs) {
    while (true) {
      long leftMs = (untilNs - System.nanoTime()) / 1_000_000;
      if (leftMs <= 0) {
        return false;
      }
      try {
        if (answer == null) {
          open();
        }
        long silentMs = (System.nanoTime() - heardNs) / 1_000_000;
        if (answer.body().hasMore(Math.min(leftMs, Math.max(1, SILENT_MS - silentMs)))) {
          heardNs = System.nanoTime();
          if (message.read(answer.body())) {
            take();
            return true;
          }
          closeAnswer(); // the broker does not lead the stream any more, or stops
        } else if (silentMs >= SILENT_MS) {
          closeAnswer(); // it is gone, or cut off
        }
      } catch (IOException error) {
        tryAgain(error.getMessage(), untilNs);
      } catch (NatslogException error) {
        closeAnswer();
        boolean isDamaged = error.is("corrupt_log", "corrupt_answer");
        if (error.is("offset_out_of_range")) {
          passOverRemoved(error);
        } else if (isDamaged ? ++damaged <= settings.retries : error.retriable) {
          tryAgain(error.getMessage(), untilNs);
        } else {
          throw error.is("not_found") ? tooOld() : error;
        }
      }
    }
  }

  private void open() {
    Map<String, Object> query = new LinkedHashMap<>();
    query.put("start", at);
    query.put("columns", String.join(",", asked));
    query.put("subject", settings.subjectFilter);
    query.put("passed", passed);
    if (task.shares() > 1) {
      query.put("share", settings.realTimeReadersBy + ":" + task.share() + "/" + task.shares());
    }
    answer = broker.tail(task.stream(), query);
    String id = answer.header().apply("Natslog-Stream-Id");
    if (!task.from().id().equals(id)) {
      throw new NatslogException("stream_recreated",
          "stream '" + task.stream() + "' was deleted and created again (id " + id + ", not " + task.from().id()
              + "): offsets of the old stream are not valid in the new one", false, Map.of("stream", task.stream()));
    }
    Long stated = answer.number("Natslog-Leader-Epoch");
    epoch = stated == null ? epoch : Math.max(epoch, stated);
    memory.close(); // of the message before
    message = new Message(task.stream(), asked, true, memory);
    batch = null;
    heardNs = System.nanoTime();
  }

  /** Takes the rows of the message that was read. */
  private void take() {
    if (message.baseOffset != at) {
      throw NatslogException.corruptAnswer(
          "stream '" + task.stream() + "': the response goes on at offset " + message.baseOffset + ", not " + at);
    }
    ColumnVector[] vectors = new ColumnVector[columns.size()];
    for (int place = 0; place < vectors.length; place++) {
      String name = columns.get(place);
      vectors[place] = name.equals("stream") ? new Columns.Same(task.stream()) : message.column(name, 0);
    }
    offsets = message.column("offset", 0);
    times = message.column("timestamp", 0);
    batch = new ColumnarBatch(vectors, message.rows);
    row = 0;
    behind = message.endOffset;
    damaged = 0;
    isOpen &= message.rows == 0;
  }

  /** Messages were removed before they were read: that is a loss, unless nothing was read yet from the log's start. */
  private void passOverRemoved(NatslogException error) {
    StreamState now = StreamState.newest(broker, task.stream());
    if (now == null || !now.id().equals(task.from().id()) || now.start() <= at) {
      throw error; // what that means is found out when the next batch is planned
    }
    if (!isOpen) {
      Loss.report(settings, task.stream(), at, now.start(), Loss.REMOVED);
    }
    at = behind = now.start();
  }

  private static NatslogException tooOld() {
    return NatslogException.config(
        "the brokers do not serve tails of streams, which a query in real time reads: upgrade them to 0.3, or use a "
            + "trigger of micro-batches");
  }

  private void tryAgain(String why, long untilNs) {
    closeAnswer();
    long now = System.nanoTime();
    if (now - silentUntilNs >= 0) {
      silentUntilNs = now + LOG_EVERY_NS;
      LOG.warn("stream '{}': reading at offset {} is tried again: {}", task.stream(), at, why);
    }
    Broker.pause(Math.max(0, Math.min(settings.retryIntervalS, (untilNs - now) / 1e9)));
  }

  private void closeAnswer() {
    if (answer != null) {
      answer.close();
    }
    answer = null;
  }

  @Override
  public void close() {
    closeAnswer();
    memory.close();
  }
}
