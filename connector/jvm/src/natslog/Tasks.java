package natslog;

import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** From planned ranges to Spark's tasks. */
final class Tasks {
  private Tasks() {}

  /** What one task reads, with all facts that it needs. */
  record Task(List<Range> ranges) implements InputPartition {
    @Override
    public String[] preferredLocations() {
      Set<String> hosts = new LinkedHashSet<>();
      for (Range one : ranges) {
        if (!one.urls().isEmpty()) {
          String origin = Broker.originOf(one.urls().get(0));
          if (origin != null) {
            hosts.add(origin.substring(origin.indexOf("//") + 2, origin.lastIndexOf(':')));
          }
        }
      }
      return hosts.toArray(new String[0]);
    }
  }

  record Factory(Settings settings, List<String> columns, Pushed pushed) implements PartitionReaderFactory {
    @Override
    public boolean supportColumnarReads(InputPartition partition) {
      return true;
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
      return new RangeReader(settings, columns, pushed, ((Task) partition).ranges());
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      throw new UnsupportedOperationException("natslog reads columns");
    }
  }

  static InputPartition[] partitions(List<List<Range>> tasks) {
    return tasks.stream().map(Task::new).toArray(InputPartition[]::new);
  }

  /** How many tasks run at once. */
  static int cores() {
    return Math.max(1, SparkSession.active().sparkContext().defaultParallelism());
  }
}
