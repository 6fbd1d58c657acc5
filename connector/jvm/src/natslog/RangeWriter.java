package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.Supplier;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Appends what follows from the rows of a source stream to a stream, each of them once, while a batch in real time runs.
 *
 * <p>Theory of operation. Each request appends, all or nothing, what follows from the source rows of a range of offsets.
 * It is a batch of a producer, whose number is the end of that range; the producer is named for the query, the source
 * stream, and the reader's share of it. The target's broker appends a batch only behind the one that the request names as
 * the last one. So the target itself states which source rows it has the output of, and a task that begins has the broker
 * of the source leave them out. Rows leave when the reader is asked for the next one, which is when all that follows from
 * a source row is there; rows that come while a request is under way leave together, by the next one.
 *
 * <p>Invariant: a request contains all that follows from a source row, or nothing of it.
 */
final class RangeWriter implements DataWriter<InternalRow>, SourceProgress.Sink {
  private record Done() implements WriterCommitMessage {}

  private static final Pattern LANE = Pattern.compile("(subject|key)-([1-9][0-9]{0,2})-([0-9]{1,3})");
  private static final int MOST_SHARES = 256;
  private static final long WAITING_BYTES = 4L * 1024 * 1024; // while a request is under way
  private static final long MOST_BYTES = 15L * 1024 * 1024; // of a request; brokers accept 16 MiB
  private static final double PATIENCE_S = 120; // with a target that has no leader
  private static final double RETRY_S = 0.25;

  private final SinkSettings settings;
  private final SinkColumns columns;
  private final String query;
  private final String path;
  private final Broker broker;
  private final UTF8String constant;
  private final OutgoingRow row = new OutgoingRow();
  private final SourceProgress progress;
  private UTF8String stream; // the one that the task reads; null: none yet

  private final ReentrantLock lock = new ReentrantLock();
  private final Condition hasChanged = lock.newCondition();
  private final ArrowRows rows; // all of the following under the lock, too
  private String producer;
  private List<String> leaders = List.of(); // of the target: the URLs to ask first
  private long last; // batch of the producer
  private int complete; // rows of source rows that are complete
  private long through; // the source offset before which everything is complete
  private byte[] leaving; // rows that are sent, or are to be sent next; null: none
  private long leavingThrough;
  private RuntimeException failure;
  private volatile boolean isClosed;

  RangeWriter(SinkSettings settings, SinkColumns columns) {
    this.settings = settings;
    this.columns = columns;
    query = TaskContext.get().getLocalProperty("sql.streaming.queryId");
    path = "/v1/streams/" + Broker.inPath(settings.stream) + "/appends";
    broker = new Broker(settings.brokers);
    constant = settings.subject == null ? null : UTF8String.fromString(settings.subject);
    rows = new ArrowRows(constant == null && columns.haveSubjects());
    progress = SourceProgress.ofThisTask();
    progress.write(this);
    Thread sender = new Thread(this::run, "natslog-appender");
    sender.setDaemon(true);
    sender.start();
  }

  // ---- the task ----

  @Override
  public List<Position.Passed> begin(TailReader.Task task, String by) {
    stream = UTF8String.fromString(task.stream());
    String source = task.source().matches("[A-Za-z0-9_-]{1,32}") ? task.source()
        : "x" + Integer.toHexString(task.source().hashCode());
    String prefix = "rt." + query + "." + source + "." + task.from().id() + ".";
    producer = prefix + by + "-" + task.shares() + "-" + task.share();
    JsonNode found = patiently(() -> broker.get(path, Map.of("prefix", prefix))).path("batches");
    last = found.path(producer).asLong(0);
    leaders = new ArrayList<>();
    patiently(() -> broker.get(path + "/" + producer, Map.of())).path("urls").forEach(url -> leaders.add(url.asText()));
    Map<String, Long[]> sets = new TreeMap<>();
    found.fields().forEachRemaining(one -> {
      Matcher lane = LANE.matcher(one.getKey().substring(prefix.length()));
      int share = lane.matches() ? Integer.parseInt(lane.group(3)) : 0;
      int shares = lane.matches() ? Integer.parseInt(lane.group(2)) : 0;
      if (share < shares && shares <= MOST_SHARES) {
        sets.computeIfAbsent(lane.group(1) + "-" + shares, unused -> filled(shares))[share] = one.getValue().asLong();
      }
    });
    return sets.entrySet().stream()
        .map(one -> new Position.Passed(one.getKey().replaceFirst("-.*", ""), List.of(one.getValue()))).toList();
  }

  private static Long[] filled(int count) {
    Long[] found = new Long[count];
    Arrays.fill(found, 0L);
    return found;
  }

  @Override
  public void write(InternalRow from) {
    if (!columns.isOf(from, stream) || !progress.isAt(columns.sourceOffset(from))) {
      throw NatslogException.config(
          "exactlyOnce=true is for queries in real time (trigger realTime) in which each row is read, changed or filtered, "
              + "and written by the same task, with its columns stream and offset: without Python functions, "
              + "aggregations, joins of streams, repartitioning or sorting. Remove them, or write at least once with "
              + "path=nats");
    }
    columns.read(from, constant, row);
    lock.lock();
    try {
      while (rows.bytes() > WAITING_BYTES && leaving != null && failure == null) {
        await();
      }
      raiseIfFailed();
      rows.add(row);
      if (rows.bytes() > MOST_BYTES) {
        throw NatslogException.config(
            "what follows from one row of the source (offset " + columns.sourceOffset(from) + ") has more than "
                + (MOST_BYTES - WAITING_BYTES) + " bytes; exactlyOnce appends it as a whole: divide it in another way, or "
                + "write at least once with path=nats");
      }
    } finally {
      lock.unlock();
    }
  }

  @Override
  public void passed(long before) {
    lock.lock();
    try {
      raiseIfFailed();
      complete = rows.rows();
      through = before;
      leave();
    } finally {
      lock.unlock();
    }
  }

  /** Hands what is complete to the sender, unless it is busy. Under the lock. */
  private void leave() {
    if (leaving == null && complete > 0 && complete == rows.rows()) {
      leaving = rows.taken();
      leavingThrough = through;
      complete = 0;
      hasChanged.signalAll();
    }
  }

  /** When the task has no more rows. */
  @Override
  public WriterCommitMessage commit() {
    progress.end();
    lock.lock();
    try {
      leave();
      while (leaving != null && failure == null) {
        await();
      }
      raiseIfFailed();
      return new Done();
    } finally {
      lock.unlock();
    }
  }

  private void await() {
    try {
      hasChanged.await();
    } catch (InterruptedException error) {
      throw Broker.interrupted();
    }
  }

  private void raiseIfFailed() {
    if (failure != null) {
      throw failure;
    }
  }

  /** What was appended stays; a repetition finds it there. */
  @Override
  public void abort() {
    close();
  }

  @Override
  public void close() {
    lock.lock();
    try {
      if (!isClosed) {
        isClosed = true;
        rows.close();
        hasChanged.signalAll();
      }
    } finally {
      lock.unlock();
    }
  }

  // ---- the thread that sends ----

  private void run() {
    lock.lock();
    try {
      while (!isClosed) {
        if (leaving == null) {
          hasChanged.await();
          continue;
        }
        append();
        last = leavingThrough;
        leaving = null;
        if (!isClosed) {
          leave();
        }
        hasChanged.signalAll();
      }
    } catch (Throwable error) { // whatever it is: the task must not wait for ever
      failure = error instanceof RuntimeException known ? known : new IllegalStateException("the sender failed", error);
      hasChanged.signalAll();
    } finally {
      lock.unlock();
    }
  }

  /** With the lock, which it releases while it waits for the broker. */
  private void append() {
    Map<String, Object> asked = new LinkedHashMap<>();
    asked.put("after", last);
    asked.put("subject", settings.subject);
    String target = path + "/" + producer + "/" + leavingThrough + "/rows";
    Broker.Content content = new Broker.Content("application/vnd.apache.arrow.stream", leaving);
    lock.unlock();
    try {
      patiently(() -> {
        String said = broker.ask("POST", target, asked, content, leaders, 0, answer -> null).text();
        JsonNode appended = Json.parse(said);
        if (appended == null || !appended.path("end").isIntegralNumber()) {
          throw NatslogException.corruptAnswer("the answer to an append does not state offsets: check the URL");
        }
        return appended;
      });
    } finally {
      lock.lock();
    }
  }

  /** Repeats a request for as long as the target may be without a leader, unless the task has ended. */
  private JsonNode patiently(Supplier<JsonNode> request) {
    long untilNs = System.nanoTime() + (long) (1e9 * PATIENCE_S);
    while (true) {
      try {
        return request.get();
      } catch (NatslogException error) {
        if (!error.retriable || isClosed || System.nanoTime() > untilNs) {
          throw error.is("not_found") ? tooOld(error) : error;
        }
        Broker.pause(RETRY_S);
      }
    }
  }

  private static NatslogException tooOld(NatslogException error) {
    return NatslogException.config(
        error.getMessage() + " (the brokers of the target must be of version 0.3 or later for exactlyOnce=true)");
  }
}
