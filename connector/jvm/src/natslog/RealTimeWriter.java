package natslog;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.Map;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.CatalystTypeConverters;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.types.StructType;

/**
 * The sink as Spark's `ForeachWriter`, which is on the list of sinks that Spark allows in real-time mode. Options, ids
 * and guarantees are those of `format("natslog")`; `pyspark_natslog.real_time_writer` makes it.
 */
public final class RealTimeWriter extends ForeachWriter<Row> {
  private final SinkSettings settings;
  private final SinkColumns columns;
  private final StructType schema;
  private transient DataWriter<InternalRow> writer;
  private transient scala.Function1<Object, Object> converted;

  /** @param options of the sink, of `path=nats` */
  public RealTimeWriter(StructType schema, Map<String, String> options) {
    String pythons = SinkSettings.pythons(options);
    if (pythons != null) {
      throw NatslogException.config(pythons + ": the sink in the JVM does not have it, and no other one runs in "
          + "real-time mode: remove it");
    }
    settings = SinkSettings.of(options);
    if (settings.transaction != null) {
      throw NatsWrite.transactionOfQuery();
    }
    columns = new SinkColumns(schema, settings);
    this.schema = schema;
  }

  @Override
  public boolean open(long partitionId, long epochId) {
    converted = CatalystTypeConverters.createToCatalystConverter(schema);
    writer = NatsWrite.writerOf(settings, columns, partitionId, epochId);
    return true;
  }

  @Override
  public void process(Row row) {
    try {
      writer.write((InternalRow) converted.apply(row));
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  /** At the end of the task, which succeeds only if this returns: all rows are acked then. */
  @Override
  public void close(Throwable error) {
    if (writer == null) {
      return; // it was not opened
    }
    try (DataWriter<InternalRow> closed = writer) {
      if (error == null) {
        closed.commit();
      }
    } catch (IOException failure) {
      throw new UncheckedIOException(failure);
    }
  }
}
