package natslog;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.unsafe.types.UTF8String;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Publishes the rows of one task, in order, each while the acks of those before are on their way. The message id of a
 * row is a hash of its position (query, batch, partition, row) and of its content, as in the Python sink.
 */
final class NatsWriter implements DataWriter<InternalRow> {
  /** How many rows a task published as dead letters. */
  record Published(long deadLetters) implements WriterCommitMessage {}

  private static final Logger LOG = LoggerFactory.getLogger("natslog.sink");
  private static final int MOST_SUBJECTS = 10_000;
  private static final int SHOWN_CHARS = 100;

  private final SinkSettings settings;
  private final SinkColumns columns;
  private final RowHashes hashes;
  private final UTF8String constant;
  private final Publisher publisher;
  private final Broker broker;
  private final Map<UTF8String, Integer> ways = new HashMap<>(); // of subjects that were asked for
  private final OutgoingRow row = new OutgoingRow();
  private final int maxPayloadBytes;
  private UTF8String lastSubject;
  private int lastWays;
  private long written;
  private long deadLetters;
  private boolean isFlushed;
  private boolean hasWarned;

  /** @param context what the rows are numbered in: `query:batch:partition:` */
  NatsWriter(SinkSettings settings, SinkColumns columns, String context) {
    this.settings = settings;
    this.columns = columns;
    hashes = new RowHashes(context);
    constant = settings.subject == null ? null : UTF8String.fromString(settings.subject);
    isFlushed = "flush".equals(settings.ack);
    broker = settings.brokers == null ? null : new Broker(settings.brokers);
    publisher = new Publisher(settings);
    publisher.open();
    maxPayloadBytes = publisher.maxPayloadBytes();
  }

  @Override
  public void write(InternalRow from) {
    columns.read(from, constant, row);
    UTF8String id = columns.id(from);
    boolean hasOwnId = settings.idColumn == null || settings.deadLetterSubject != null;
    if (hasOwnId) {
      row.makeId(hashes, written);
    }
    if (settings.idColumn != null) {
      row.setId(id);
    }
    String problem = row.problem();
    int asked = problem == null ? waysOf(row.subject) : 0;
    int moreBytes = (asked & Publisher.BY_HEADER) != 0 ? publisher.ackHeaderBytes() : 0;
    if (problem == null) {
      problem = row.problem(maxPayloadBytes, moreBytes);
    }
    if (problem == null) {
      send(row, asked);
    } else if (settings.deadLetterSubject != null) {
      deadLetters++;
      OutgoingRow letter =
          DeadLetter.of(row, problem, origin(from), settings.deadLetterSubject, maxPayloadBytes - moreBytes);
      send(letter, waysOf(letter.subject));
    } else {
      throw Acking.failed("a row cannot be sent: " + problem + ": row " + written + " (subject " + shownSubject() + ")");
    }
    written++;
  }

  private void send(OutgoingRow outgoing, int asked) {
    isFlushed |= asked == 0 && settings.ack == null;
    try {
      publisher.send(outgoing, asked);
    } catch (NatslogException error) {
      forgetAfter(error);
      throw error;
    }
  }

  private void forgetAfter(NatslogException error) {
    if (broker != null && error.is("publish_failed")) {
      Destinations.forget(settings.brokers.servers); // the streams may have changed
    }
  }

  private Map<String, String> origin(InternalRow from) {
    Map<String, String> found = new HashMap<>();
    for (String name : List.of("stream", "offset")) {
      String text = columns.shown(from, name);
      if (text != null) {
        found.put(name.equals("stream") ? "Stream" : "Offset", text);
      }
    }
    return found;
  }

  private String shownSubject() {
    String text = row.subject == null ? null : row.subject.toString();
    if (text == null) {
      return "null";
    }
    return "'" + (text.length() <= SHOWN_CHARS ? text : text.substring(0, SHOWN_CHARS) + "…") + "'";
  }

  // ---- who acks ----

  /** How rows on this subject are asked for acks: bits, 0: the server confirms them, or there are no acks. */
  private int waysOf(UTF8String subject) {
    if (broker == null) {
      return "stored".equals(settings.ack) ? Publisher.BY_REPLY : 0;
    }
    if (subject.equals(lastSubject)) {
      return lastWays;
    }
    Integer found = ways.get(subject);
    if (found == null) {
      found = recorded(subject.toString());
      if (ways.size() == MOST_SUBJECTS) {
        ways.clear();
      }
      ways.put(subject.clone(), found);
    }
    lastSubject = subject.clone();
    lastWays = found;
    return found;
  }

  private int recorded(String subject) {
    int found;
    try {
      found = Destinations.ways(broker, settings.brokers.servers, subject, settings.ackStreams);
    } catch (NatslogException error) {
      if (error.is("config")) {
        throw NatslogException.config("option ackStreams: " + error.getMessage());
      }
      if (!error.is("broker_unavailable")) {
        throw error;
      }
      throw NatslogException.unavailable(
          "no broker stated which streams record the subjects of the rows (" + error.getMessage() + "). Correct "
              + ".option(\"servers\", …); or, if no stream is to ack the rows, set .option(\"ack\", \"flush\"): they are "
              + "then sent at most once");
    }
    if (found == 0 && settings.ack != null) {
      return Publisher.BY_REPLY;
    }
    if (found == 0 && !hasWarned) {
      hasWarned = true;
      LOG.warn("no stream acks the subject '{}' (and perhaps others): its rows are sent at most once (ack flush). To "
          + "store them, create a stream (natslog stream create); to accept this, set .option(\"ack\", \"flush\")", subject);
    }
    return found;
  }

  // ---- the end ----

  @Override
  public WriterCommitMessage commit() {
    try {
      publisher.awaitAcks(isFlushed);
    } catch (NatslogException error) {
      forgetAfter(error);
      throw error;
    }
    return new Published(deadLetters);
  }

  /** What was published remains; a retry sends the same ids. */
  @Override
  public void abort() {
    close();
  }

  @Override
  public void close() {
    publisher.close();
  }
}
