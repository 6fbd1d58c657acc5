package natslog;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** The streams that the options select, as one table. */
final class NatslogTable implements SupportsRead, SupportsWrite {
  private final StructType schema;
  private final Map<String, String> properties;

  NatslogTable(StructType schema, Map<String, String> properties) {
    this.schema = schema;
    this.properties = properties;
  }

  @Override
  public String name() {
    return "natslog";
  }

  @Override
  public StructType schema() {
    return schema;
  }

  @Override
  public Set<TableCapability> capabilities() {
    return Set.of(
        TableCapability.BATCH_READ, TableCapability.MICRO_BATCH_READ, TableCapability.BATCH_WRITE,
        TableCapability.STREAMING_WRITE, TableCapability.TRUNCATE);
  }

  private Table python(String what) {
    return PythonSource.provider(what).getTable(schema, new Transform[0], properties);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    boolean isOfCatalog = TableOptions.are(properties) || TableOptions.areKeptIn(info.schema());
    Map<String, String> given = info.options().asCaseSensitiveMap();
    String pythons = isOfCatalog ? "writing to a table of the catalog" : SinkSettings.pythons(given);
    if (pythons != null) {
      return ((SupportsWrite) python(pythons)).newWriteBuilder(info);
    }
    return new NatsWrite.Builder(SinkSettings.of(given), info.schema());
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    Map<String, String> given = TableOptions.ofRead(properties, options.asCaseSensitiveMap());
    String pythons = Settings.pythons(given);
    if (pythons != null) {
      return ((SupportsRead) python("option " + pythons)).newScanBuilder(new CaseInsensitiveStringMap(given));
    }
    DefaultSource.check(schema, new Settings(given, null));
    return new Builder(given, schema);
  }

  /** Takes the columns that a query reads, and what it leaves out. */
  private static final class Builder
      implements ScanBuilder, SupportsPushDownRequiredColumns, SupportsPushDownV2Filters, SupportsPushDownLimit,
          SupportsPushDownAggregates {
    private final Map<String, String> options;
    private StructType schema;
    private Pushed pushed = Pushed.NOTHING;
    private Predicate[] filters = {};
    private Stated stated;

    Builder(Map<String, String> options, StructType schema) {
      this.options = options;
      this.schema = schema;
    }

    @Override
    public void pruneColumns(StructType required) {
      schema = required;
    }

    /** Spark applies all of them again. */
    @Override
    public Predicate[] pushPredicates(Predicate[] predicates) {
      List<Predicate> used = new ArrayList<>();
      for (Predicate one : predicates) {
        Pushed more = pushed.with(one);
        if (!more.equals(pushed)) {
          used.add(one);
        }
        pushed = more;
      }
      filters = used.toArray(new Predicate[0]);
      return predicates;
    }

    @Override
    public Predicate[] pushedPredicates() {
      return filters;
    }

    @Override
    public boolean pushLimit(int limit) {
      pushed = pushed.with(limit);
      return true;
    }

    @Override
    public boolean isPartiallyPushed() {
      return true;
    }

    /** Without filters, brokers state them. */
    @Override
    public boolean supportCompletePushDown(Aggregation aggregation) {
      return pushAggregation(aggregation);
    }

    @Override
    public boolean pushAggregation(Aggregation aggregation) {
      Aggregates wanted = Aggregates.of(aggregation);
      boolean isOfAll = new Settings(options, null).subjectFilter == null && pushed.equals(Pushed.NOTHING);
      if (wanted == null || !isOfAll) {
        return false;
      }
      if (stated == null) {
        Object[] values = new BatchRead(new Settings(options, false), List.of(), pushed).aggregated(wanted);
        stated = values == null ? null : new Stated(options, wanted.schema(), values);
      }
      return stated != null;
    }

    @Override
    public Scan build() {
      return stated != null ? stated : new Reading(options, schema, pushed);
    }
  }

  /** One row, which is known when the query is planned: there is no job. */
  private record Stated(Map<String, String> options, StructType schema, Object[] values) implements LocalScan {
    @Override
    public StructType readSchema() {
      return schema;
    }

    @Override
    public String description() {
      return "natslog " + new Settings(options, null).selection() + ": " + String.join(", ", schema.fieldNames())
          + ", as brokers state it";
    }

    @Override
    public InternalRow[] rows() {
      return new InternalRow[] {new GenericInternalRow(values)};
    }
  }

  private static final class Reading implements Scan, SupportsReportStatistics {
    private final Map<String, String> options;
    private final StructType schema;
    private final Pushed pushed;
    private BatchRead batch;
    private StreamRead stream;

    Reading(Map<String, String> options, StructType schema, Pushed pushed) {
      this.options = options;
      this.schema = schema;
      this.pushed = pushed;
    }

    @Override
    public StructType readSchema() {
      return schema;
    }

    @Override
    public String description() {
      return "natslog " + new Settings(options, null).selection() + " [" + String.join(", ", columns()) + "]";
    }

    private List<String> columns() {
      return new ArrayList<>(List.of(schema.fieldNames()));
    }

    /** In real time a row is handed on when it comes. */
    @Override
    public ColumnarSupportMode columnarSupportMode() {
      return stream != null && stream.isRealTime ? ColumnarSupportMode.UNSUPPORTED : ColumnarSupportMode.SUPPORTED;
    }

    /** Planned once: the plan states the size that Spark asks for. */
    @Override
    public Batch toBatch() {
      batch = batch == null ? new BatchRead(new Settings(options, false), columns(), pushed) : batch;
      return batch;
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
      stream = StreamRead.of(new Settings(options, true), columns());
      stream.source = checkpointLocation.replaceFirst(".*/", "");
      return stream;
    }

    @Override
    public Statistics estimateStatistics() {
      BatchRead planned = stream != null ? null : (BatchRead) toBatch();
      return new Statistics() {
        @Override
        public OptionalLong sizeInBytes() {
          return planned == null ? OptionalLong.empty() : OptionalLong.of(planned.bytes());
        }

        @Override
        public OptionalLong numRows() {
          return planned == null ? OptionalLong.empty() : OptionalLong.of(planned.rows());
        }
      };
    }
  }
}
