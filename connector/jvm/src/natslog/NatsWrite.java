package natslog;

import java.nio.ByteBuffer;
import java.util.HexFormat;
import java.util.UUID;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend;
import org.apache.spark.sql.types.StructType;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Rows published to NATS by the tasks of a batch write or of a streaming query. Nothing is staged. */
record NatsWrite(SinkSettings settings, SinkColumns columns, boolean replacesRows) implements Write {
  private static final Logger LOG = LoggerFactory.getLogger("natslog.sink");

  /** Output modes append; update, whose rows are new messages; and complete, which publishes all of them again. */
  static final class Builder implements SupportsTruncate, SupportsStreamingUpdateAsAppend {
    private final SinkSettings settings;
    private final SinkColumns columns;
    private boolean replacesRows;

    Builder(SinkSettings settings, StructType schema) {
      this.settings = settings;
      columns = new SinkColumns(schema, settings);
    }

    @Override
    public WriteBuilder truncate() {
      replacesRows = true;
      return this;
    }

    @Override
    public Write build() {
      return new NatsWrite(settings, columns, replacesRows);
    }
  }

  @Override
  public String description() {
    return "natslog " + (settings.stream != null ? "stream " + settings.stream : settings.subject == null ? "by column subject" : "subject " + settings.subject);
  }

  @Override
  public BatchWrite toBatch() {
    if (settings.stream != null) {
      throw NatslogException.config("option exactlyOnce is for streaming queries in real time: remove it");
    }
    if (replacesRows) {
      throw NatslogException.config(
          "the sink can only append, mode(\"append\"): published messages cannot be replaced");
    }
    UUID random = UUID.randomUUID();
    byte[] bytes = ByteBuffer.allocate(16).putLong(random.getMostSignificantBits())
        .putLong(random.getLeastSignificantBits()).array();
    String run = settings.transaction != null ? settings.transaction : HexFormat.of().formatHex(bytes);
    return new OfBatch(settings, new Factory(settings, columns, run));
  }

  @Override
  public StreamingWrite toStreaming() {
    if (settings.transaction != null) {
      throw transactionOfQuery();
    }
    return new OfQuery(settings, new Factory(settings, columns, null));
  }

  static NatslogException transactionOfQuery() {
    return NatslogException.config(
        "options txnAppId and txnVersion are for batch writes (df.write), as in foreachBatch; a streaming query numbers "
            + "its batches itself: remove them");
  }

  private record OfBatch(SinkSettings settings, Factory factory) implements BatchWrite {
    @Override
    public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
      return factory;
    }

    @Override
    public void commit(WriterCommitMessage[] messages) {
      report(settings, messages);
    }

    @Override
    public void abort(WriterCommitMessage[] messages) {}
  }

  private record OfQuery(SinkSettings settings, Factory factory) implements StreamingWrite {
    @Override
    public StreamingDataWriterFactory createStreamingWriterFactory(PhysicalWriteInfo info) {
      return factory;
    }

    @Override
    public void commit(long epochId, WriterCommitMessage[] messages) {
      report(settings, messages);
    }

    @Override
    public void abort(long epochId, WriterCommitMessage[] messages) {}
  }

  private static void report(SinkSettings settings, WriterCommitMessage[] messages) {
    long dead = 0;
    for (WriterCommitMessage message : messages) {
      dead += message instanceof NatsWriter.Published published ? published.deadLetters() : 0;
    }
    if (dead > 0) {
      LOG.warn("{} rows could not be sent; they were published to '{}' as dead letters",
          dead, settings.deadLetterSubject);
    }
  }

  /** @param run the name of a batch write; null: of a streaming query, whose tasks get the query's id from Spark */
  private record Factory(SinkSettings settings, SinkColumns columns, String run)
      implements DataWriterFactory, StreamingDataWriterFactory {
    @Override
    public DataWriter<InternalRow> createWriter(int partitionId, long taskId) {
      return new NatsWriter(settings, columns, run + ":" + partitionId + ":");
    }

    @Override
    public DataWriter<InternalRow> createWriter(int partitionId, long taskId, long epochId) {
      return writerOf(settings, columns, partitionId, epochId);
    }
  }

  static DataWriter<InternalRow> writerOf(SinkSettings settings, SinkColumns columns, long partition, long epoch) {
    return settings.stream != null ? new RangeWriter(settings, columns)
        : new NatsWriter(settings, columns, contextOf(partition, epoch));
  }

  /** What the rows of a task of a streaming query are numbered in. */
  private static String contextOf(long partitionId, long epochId) {
    return TaskContext.get().getLocalProperty("sql.streaming.queryId") + ":" + epochId + ":" + partitionId + ":";
  }
}
