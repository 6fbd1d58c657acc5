package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * Runs in a task on an executor: the rows of its ranges, one stored batch at a time. If a response is damaged or ends
 * early, the next request begins behind the rows that were passed on.
 */
final class RangeReader implements PartitionReader<ColumnarBatch> {
  private static final int OUTDATED_ANSWERS = 20;
  private static final int MOST_IDLE = 100_000;

  /** Of one answer. Stored batches go from the broker's files to the socket; what it filters is in its memory. */
  private static final int STORED_BYTES = 32 * 1024 * 1024;

  private static final int FILTERED_BYTES = 8 * 1024 * 1024;

  private final Settings settings;
  private final Broker broker;
  private final List<String> columns;
  private final List<String> asked;
  private final List<Range> ranges;
  private final String subject;
  private final TaskMemory memory = TaskMemory.ofThisTask();
  private boolean isCount; // only the number of rows is wanted
  private long left; // rows that are wanted
  private int idle; // messages without progress
  private int number = -1;
  private long at;
  private long end;
  private long answerEnd;
  private long missing;
  private int failures;
  private int outdated;
  private boolean isFiltered;
  private boolean isProven;
  private Broker.Answer answer;
  private Message message;
  private ColumnarBatch batch;

  RangeReader(Settings settings, List<String> columns, Pushed pushed, List<Range> ranges) {
    this.settings = settings;
    this.left = pushed.limit();
    this.subject = settings.subjectFilter != null ? settings.subjectFilter : pushed.subject();
    this.broker = new Broker(settings);
    this.columns = columns;
    this.ranges = ranges;
    this.isCount = columns.isEmpty() && subject == null && ranges.stream().allMatch(one -> one.passed() == null);
    LinkedHashSet<String> stored = new LinkedHashSet<>(columns);
    stored.remove("stream");
    stored.add("offset"); // by which rows of batches with gaps are chosen
    this.asked = new ArrayList<>(stored);
  }

  /** How many rows these ranges have, if brokers state that. */
  static OptionalLong count(Settings settings, List<Range> ranges) {
    long rows = 0;
    try (RangeReader reader = new RangeReader(settings, List.of(), Pushed.NOTHING, ranges)) {
      while (reader.isCount && reader.next()) {
        rows += reader.batch.numRows();
      }
      return reader.isCount ? OptionalLong.of(rows) : OptionalLong.empty();
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  @Override
  public boolean next() throws IOException {
    while (left > 0) {
      if (answer == null && at >= end) {
        if (number + 1 >= ranges.size()) {
          return false;
        }
        Range next = ranges.get(++number);
        Epochs.note(next.id(), next.epoch());
        at = next.start();
        end = next.end();
        continue;
      }
      try {
        if (answer == null && isCount) {
          if (counted()) {
            return true;
          }
          continue;
        }
        if (answer == null) {
          open();
        }
        if (!message.read(answer.body())) {
          endOfAnswer();
        } else if (took()) {
          failures = outdated = idle = 0;
          return true;
        }
      } catch (IOException error) {
        failed(error.getMessage(), null);
      } catch (NatslogException error) {
        if (error.is("offset_out_of_range", "stream_not_found", "stream_recreated") || isExplained(error)) {
          lost(error);
        } else if (error.is("corrupt_log", "corrupt_answer")) {
          failed(error.getMessage(), error);
        } else {
          closeAnswer();
          throw error;
        }
      }
    }
    return false;
  }

  /** Rows without columns: the broker states how many, where the identity may read all subjects. */
  private boolean counted() {
    long upto = Math.min(end, at + Integer.MAX_VALUE - 1);
    Broker.Answer given = broker.ask("GET", "/v1/streams/" + Broker.inPath(range().stream()) + "/extent",
        Map.of("start", at, "end", upto), null, List.of(), 0, Broker.Answer::outdated);
    String id = given.header().apply("Natslog-Stream-Id");
    JsonNode found = Json.parse(given.text());
    long rows = found != null && found.path("rows").canConvertToInt() ? found.get("rows").asInt() : -1;
    boolean isAsked = found != null && found.path("start").asLong(-1) == at && found.path("end").asLong(-1) == upto;
    if (!range().id().equals(id) || !isAsked || rows < 0 || rows > upto - at) {
      isCount = false;
      return false;
    }
    at = upto;
    hand(new ColumnVector[0], (int) rows);
    return batch.numRows() > 0;
  }

  private void hand(ColumnVector[] vectors, int rows) {
    batch = new ColumnarBatch(vectors, (int) Math.min(left, rows));
    left -= batch.numRows();
  }

  /** Whether the broker itself has found damage, and says where. */
  private static boolean isExplained(NatslogException error) {
    return error.is("corrupt_log") && error.facts.containsKey("file");
  }

  private Range range() {
    return ranges.get(number);
  }

  private void open() {
    Range range = range();
    Map<String, Object> query = new LinkedHashMap<>();
    query.put("start", at);
    query.put("end", end);
    query.put("columns", String.join(",", asked));
    boolean isWhole = subject == null && range.passed() == null;
    query.put("max_bytes", isWhole ? STORED_BYTES : FILTERED_BYTES);
    query.put("subject", subject);
    query.put("passed", range.passed());
    List<String> prefer = range.urls();
    if (failures > 0 && prefer.size() > 1) { // damaged on the network, or by that broker: another one shows which
      prefer = new ArrayList<>(prefer);
      Collections.rotate(prefer, -failures);
    }
    long start = at;
    Broker.Answer opened = broker.ask("GET", "/v1/streams/" + Broker.inPath(range.stream()) + "/messages", query, null,
        prefer, 0, given -> judge(given, range, start));
    answer = opened; // which is closed if it cannot be used
    String id = opened.header().apply("Natslog-Stream-Id");
    if (!range.id().equals(id)) {
      throw new NatslogException("stream_recreated",
          "stream '" + range.stream() + "' was deleted and created again (id " + id + ", not " + range.id()
              + "): offsets of the old stream are not valid in the new one", false, Map.of("stream", range.stream()));
    }
    Long next = opened.number("Natslog-Next-Offset");
    if (next == null) {
      throw new NatslogException("internal",
          "the response has no Natslog headers: check that the URL is that of a natslog broker", false, Map.of());
    }
    if (next > end || next < at) {
      throw NatslogException.corruptAnswer(
          "stream '" + range.stream() + "': the response ends at " + next + ", not in " + at + " to " + end);
    }
    if (next == at) {
      throw new NatslogException("offset_out_of_range",
          "stream '" + range.stream() + "' ends at offset " + at + ", before " + end + ": the log is shorter than it "
              + "was", false, Map.of());
    }
    String kind = opened.header().apply("Natslog-Batches");
    isFiltered = !isWhole || "true".equals(opened.header().apply("Natslog-Limited"));
    Long removed = opened.number("Natslog-Removed");
    missing = next - at - (removed == null ? 0 : removed);
    answerEnd = next;
    isProven = "columns".equals(kind);
    memory.close(); // of the message before
    message = new Message(range.stream(), asked, isProven, memory);
  }

  /**
   * Rows are committed whichever broker serves them, unless they are of a stream that was deleted meanwhile. Only the
   * newest leader can state that there are no rows.
   */
  private NatslogException judge(Broker.Answer given, Range range, long start) {
    String id = given.header().apply("Natslog-Stream-Id");
    if (id != null && !id.equals(range.id())
        && StreamState.position(broker, range.stream()).id().equals(range.id())) {
      return NatslogException.outdated(
          "a broker has not yet received the deletion of the stream with id " + id, Map.of());
    }
    Long next = given.number("Natslog-Next-Offset");
    if (next != null && next > start) {
      return null;
    }
    return given.outdated();
  }

  /** The batch of the rows of this message that were asked for; false where there are none. */
  private boolean took() {
    int first = 0;
    int last = message.rows;
    if (isProven) {
      long low = Math.max(at, message.baseOffset);
      long high = Math.min(answerEnd, message.endOffset);
      if (low != at) {
        throw NatslogException.corruptAnswer(
            "stream '" + range().stream() + "': offsets " + at + " to " + (low - 1) + " are missing in the response");
      }
      if (high < low) {
        throw NatslogException.corruptAnswer(
            "stream '" + range().stream() + "': the batch at offset " + message.baseOffset + " was sent twice");
      }
      noteProgress(high > at);
      first = message.rowAt(low);
      last = message.rowAt(high);
      at = high;
    } else {
      if (last > 0 && (message.baseOffset < at || message.endOffset > answerEnd)) {
        throw NatslogException.corruptAnswer(
            "stream '" + range().stream() + "': the offsets of the response are not " + at + " to " + (answerEnd - 1));
      }
      noteProgress(last > 0);
      missing -= last;
      at = last > 0 ? message.endOffset : at;
    }
    if (last <= first) {
      return false;
    }
    ColumnVector[] vectors = new ColumnVector[columns.size()];
    for (int place = 0; place < vectors.length; place++) {
      String name = columns.get(place);
      vectors[place] = name.equals("stream") ? new Columns.Same(range().stream()) : message.column(name, first);
    }
    hand(vectors, last - first);
    return true;
  }

  /** A server that sends messages without rows for ever would keep the task. */
  private void noteProgress(boolean hasProgress) {
    if (!hasProgress && ++idle > MOST_IDLE) {
      throw NatslogException.corruptAnswer(
          "stream '" + range().stream() + "': the response has more than " + MOST_IDLE + " messages without rows");
    }
  }

  private void endOfAnswer() {
    boolean isWhole = isProven ? at == answerEnd : missing == 0 || (isFiltered && missing > 0);
    if (!isWhole) {
      throw NatslogException.corruptAnswer(
          "stream '" + range().stream() + "': the response lacks rows of the offsets up to " + answerEnd);
    }
    at = answerEnd;
    closeAnswer();
  }

  private void failed(String why, NatslogException error) throws IOException {
    closeAnswer();
    if (++failures > Math.max(1, settings.retries)) {
      if (error != null) {
        throw error;
      }
      throw NatslogException.unavailable("stream '" + range().stream() + "': " + why);
    }
    Broker.pause(settings.retryIntervalS);
  }

  private void lost(NatslogException error) {
    closeAnswer();
    long first = range().leftFrom(at, end, error);
    if (first > at) {
      at = first;
      return;
    }
    long[] readable = Loss.leftOf(broker, settings, range().stream(), range().id(), at, end, error);
    if (readable[0] == at && readable[1] == end) {
      if (++outdated > OUTDATED_ANSWERS) {
        throw error;
      }
      Broker.pause(0.25);
    }
    at = readable[0];
    end = readable[1];
  }

  private void closeAnswer() {
    if (answer != null) {
      answer.close();
    }
    answer = null;
    idle = 0;
  }

  @Override
  public ColumnarBatch get() {
    return batch;
  }

  @Override
  public void close() {
    closeAnswer();
    memory.close();
  }
}
