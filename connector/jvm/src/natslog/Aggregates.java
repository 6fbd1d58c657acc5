package natslog;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.List;
import java.util.OptionalLong;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.aggregate.AggregateFunc;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.expressions.aggregate.Max;
import org.apache.spark.sql.connector.expressions.aggregate.Min;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * `count(*)`, and `min` and `max` of offset and timestamp, without reading the rows: brokers state the number, and both
 * columns ascend, so that the first and the last row of each range have the rest.
 */
final class Aggregates {
  private static final List<String> COLUMNS = List.of("offset", "timestamp");
  private static final int WIDER = 8;

  private final List<AggregateFunc> functions;

  private Aggregates(List<AggregateFunc> functions) {
    this.functions = functions;
  }

  /** Null: some of it is not answered here. */
  static Aggregates of(Aggregation aggregation) {
    List<AggregateFunc> functions = List.of(aggregation.aggregateExpressions());
    boolean isKnown = functions.stream().allMatch(one -> one instanceof CountStar || column(one) != null);
    return isKnown && aggregation.groupByExpressions().length == 0 ? new Aggregates(functions) : null;
  }

  private static String column(AggregateFunc function) {
    Expression of = function instanceof Min min ? min.column() : function instanceof Max max ? max.column() : null;
    String name = of instanceof NamedReference named ? String.join(".", named.fieldNames()) : "";
    return COLUMNS.contains(name) ? name : null;
  }

  StructType schema() {
    StructType schema = new StructType();
    for (AggregateFunc one : functions) {
      DataType type = one instanceof CountStar ? DataTypes.LongType : Columns.typeOf(column(one));
      schema = schema.add(one.describe(), type);
    }
    return schema;
  }

  /** The values of the only row; null where brokers do not state the number of rows. */
  Object[] values(Settings settings, List<Range> ranges) {
    OptionalLong count = OptionalLong.empty();
    if (functions.stream().anyMatch(CountStar.class::isInstance)) {
      count = RangeReader.count(settings, ranges);
      if (count.isEmpty()) {
        return null;
      }
    }
    List<long[]> firsts = functions.stream().anyMatch(Min.class::isInstance) ? edges(settings, ranges, true) : List.of();
    List<long[]> lasts = functions.stream().anyMatch(Max.class::isInstance) ? edges(settings, ranges, false) : List.of();
    List<Object> values = new ArrayList<>();
    for (AggregateFunc one : functions) {
      int place = one instanceof CountStar ? -1 : COLUMNS.indexOf(column(one));
      OptionalLong value = one instanceof CountStar ? count
          : one instanceof Min ? firsts.stream().mapToLong(row -> row[place]).min()
          : lasts.stream().mapToLong(row -> row[place]).max();
      values.add(value.isPresent() ? value.getAsLong() : null);
    }
    return values.toArray();
  }

  /** Offset and timestamp of the first row of each range, or of the last one; ranges without rows have none. */
  private static List<long[]> edges(Settings settings, List<Range> ranges, boolean isFirst) {
    List<long[]> found = new ArrayList<>();
    for (Range range : ranges) {
      long[] edge = edge(settings, range, isFirst);
      if (edge != null) {
        found.add(edge);
      }
    }
    return found;
  }

  /** Messages may have been removed at the edge: ever wider parts are read until one has a row. */
  private static long[] edge(Settings settings, Range range, boolean isFirst) {
    long low = range.start();
    long high = range.end();
    for (long width = 1; low < high; width *= WIDER) {
      long from = isFirst ? low : Math.max(low, high - width);
      long to = isFirst ? Math.min(high, low + width) : high;
      long[] edge = rowOf(settings, new Range(range.stream(), range.id(), from, to, range.isOpen()), isFirst);
      if (edge != null) {
        return edge;
      }
      low = isFirst ? to : low;
      high = isFirst ? high : from;
    }
    return null;
  }

  private static long[] rowOf(Settings settings, Range range, boolean isFirst) {
    long[] row = null;
    try (RangeReader reader = new RangeReader(settings, COLUMNS, Pushed.NOTHING, List.of(range))) {
      while ((row == null || !isFirst) && reader.next()) {
        ColumnarBatch batch = reader.get();
        int at = isFirst ? 0 : batch.numRows() - 1;
        row = new long[] {batch.column(0).getLong(at), batch.column(1).getLong(at)};
      }
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    return row;
  }
}
