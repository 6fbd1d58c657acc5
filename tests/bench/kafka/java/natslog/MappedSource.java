package natslog;

import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Stream;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * The limit of the columnar reader: its code for messages and columns (CRCs included), with mapped files in the place of
 * brokers and sockets. Option `path`: a folder of files, each of which is one response; `columns`: theirs; `parts`.
 */
public final class MappedSource implements TableProvider {
  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    StructType schema = new StructType();
    for (String name : options.get("columns").split(",")) {
      schema = schema.add(name, Columns.typeOf(name));
    }
    return schema;
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    return new Folder(schema, properties.get("path"), Integer.parseInt(properties.get("parts")));
  }

  private record Part(List<String> files) implements InputPartition {}

  private record Folder(StructType schema, String path, int parts) implements SupportsRead, Scan, Batch {
    @Override
    public String name() {
      return "mapped";
    }

    @Override
    public Set<TableCapability> capabilities() {
      return Set.of(TableCapability.BATCH_READ, TableCapability.MICRO_BATCH_READ);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return () -> this;
    }

    @Override
    public StructType readSchema() {
      return schema;
    }

    @Override
    public ColumnarSupportMode columnarSupportMode() {
      return ColumnarSupportMode.SUPPORTED;
    }

    @Override
    public Batch toBatch() {
      return this;
    }

    @Override
    public InputPartition[] planInputPartitions() {
      List<String> files;
      try (Stream<Path> found = Files.list(Path.of(path))) {
        files = found.map(Path::toString).sorted().toList();
      } catch (IOException error) {
        throw new IllegalStateException(error);
      }
      InputPartition[] found = new InputPartition[parts];
      for (int at = 0; at < parts; at++) {
        found[at] = new Part(new ArrayList<>(files.subList(files.size() * at / parts, files.size() * (at + 1) / parts)));
      }
      return found;
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new Factory(List.of(schema.fieldNames()));
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
      return new Once(this);
    }
  }

  /** All files are one micro-batch. */
  private record Once(Folder files) implements MicroBatchStream {
    @Override
    public Offset latestOffset() {
      return At.of("1");
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
      return start.equals(end) ? new InputPartition[0] : files.planInputPartitions();
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return files.createReaderFactory();
    }

    @Override
    public Offset initialOffset() {
      return At.of("0");
    }

    @Override
    public Offset deserializeOffset(String json) {
      return At.of(json);
    }

    @Override
    public void commit(Offset end) {}

    @Override
    public void stop() {}
  }

  private static final class At extends Offset {
    private final String number;

    private At(String number) {
      this.number = number;
    }

    static At of(String number) {
      return new At(number);
    }

    @Override
    public String json() {
      return number;
    }
  }

  private record Factory(List<String> columns) implements PartitionReaderFactory {
    @Override
    public boolean supportColumnarReads(InputPartition partition) {
      return true;
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
      return new Reader(columns, ((Part) partition).files());
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      throw new UnsupportedOperationException();
    }
  }

  private static final class Reader implements PartitionReader<ColumnarBatch> {
    private final List<String> columns;
    private final List<String> stored;
    private final List<String> files;
    private int next;
    private InputStream in;
    private Message message;
    private final TaskMemory memory = TaskMemory.ofThisTask();
    private ColumnarBatch batch;

    Reader(List<String> columns, List<String> files) {
      this.columns = columns;
      this.files = files;
      this.stored = columns.stream().filter(name -> !name.equals("stream")).toList();
    }

    @Override
    public boolean next() throws IOException {
      while (true) {
        if (in == null) {
          if (next == files.size()) {
            return false;
          }
          in = new Mapped(Path.of(files.get(next++)));
          memory.close(); // of the message before
          message = new Message("mapped", stored, true, memory);
        }
        if (!message.read(in)) {
          in = null;
          continue;
        }
        ColumnVector[] vectors = new ColumnVector[columns.size()];
        for (int place = 0; place < vectors.length; place++) {
          String name = columns.get(place);
          vectors[place] = name.equals("stream") ? new Columns.Same("mapped") : message.column(name, 0);
        }
        batch = new ColumnarBatch(vectors, message.rows);
        return true;
      }
    }

    @Override
    public ColumnarBatch get() {
      return batch;
    }

    @Override
    public void close() {
      memory.close();
    }
  }

  private static final class Mapped extends InputStream {
    private final ByteBuffer bytes;

    Mapped(Path path) throws IOException {
      try (FileChannel channel = FileChannel.open(path)) {
        bytes = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
      }
    }

    @Override
    public int read() {
      return bytes.hasRemaining() ? bytes.get() & 0xFF : -1;
    }

    @Override
    public int read(byte[] into, int at, int count) {
      int some = Math.min(count, bytes.remaining());
      if (some == 0 && count > 0) {
        return -1;
      }
      bytes.get(into, at, some);
      return some;
    }

    @Override
    public int readNBytes(byte[] into, int at, int count) {
      int some = Math.min(count, bytes.remaining());
      bytes.get(into, at, some);
      return some;
    }
  }
}
