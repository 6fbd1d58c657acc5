package natslog;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.List;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.BaseVariableWidthVector;
import org.apache.arrow.vector.FieldVector;
import org.apache.arrow.vector.VarBinaryVector;
import org.apache.arrow.vector.VarCharVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.complex.ListVector;
import org.apache.arrow.vector.complex.StructVector;
import org.apache.arrow.vector.ipc.ArrowStreamWriter;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.arrow.vector.types.pojo.FieldType;
import org.apache.spark.sql.util.ArrowUtils;
import org.apache.spark.unsafe.types.UTF8String;

/** Rows that are appended by one request, as the Arrow IPC stream that brokers take. Used by one thread at a time. */
final class ArrowRows implements AutoCloseable {
  private static final int VALUE_BYTES = 5; // an offset, and a bit that states whether it is null

  private final BufferAllocator memory = ArrowUtils.rootAllocator().newChildAllocator("natslog-sink", 0, Long.MAX_VALUE);
  private final VarBinaryVector value = new VarBinaryVector("value", memory);
  private final VarBinaryVector key = new VarBinaryVector("key", memory);
  private final VarCharVector subject = new VarCharVector("subject", memory);
  private final ListVector headers = headers(memory);
  private final StructVector pairs = (StructVector) headers.getDataVector();
  private final VarCharVector names = (VarCharVector) pairs.getChild("key");
  private final VarCharVector texts = (VarCharVector) pairs.getChild("value");
  private final boolean hasSubjects;
  private int rows;
  private int headerPairs;
  private long bytes;

  /** @param hasSubjects each row has one; else all get the one that the request or the stream names */
  ArrowRows(boolean hasSubjects) {
    this.hasSubjects = hasSubjects;
  }

  private static ListVector headers(BufferAllocator memory) {
    FieldType text = FieldType.notNullable(ArrowType.Utf8.INSTANCE);
    Field pair = new Field("element", FieldType.notNullable(ArrowType.Struct.INSTANCE),
        List.of(new Field("key", text, null), new Field("value", text, null)));
    Field field = new Field("headers", FieldType.nullable(ArrowType.List.INSTANCE), List.of(pair));
    return (ListVector) field.createVector(memory);
  }

  int rows() {
    return rows;
  }

  /** About as many as `taken` returns. */
  long bytes() {
    return bytes;
  }

  void add(OutgoingRow row) {
    put(value, row.value);
    put(key, row.key);
    if (hasSubjects) {
      put(subject, row.subject);
    }
    if (row.headers >= 0) {
      headers.startNewValue(rows);
      for (int at = 0; at < row.headers; at++, headerPairs++) {
        pairs.setIndexDefined(headerPairs);
        set(names, headerPairs, row.names[at]);
        set(texts, headerPairs, row.values[at]);
      }
      headers.endValue(rows, row.headers);
    } else {
      headers.setNull(rows);
    }
    rows++;
    bytes += VALUE_BYTES; // of the list of headers
  }

  private void put(BaseVariableWidthVector column, UTF8String text) {
    set(column, rows, text);
  }

  private void set(BaseVariableWidthVector column, int at, UTF8String text) {
    if (text == null) {
      column.setNull(at);
      bytes += VALUE_BYTES;
      return;
    }
    byte[] content = text.getBytes();
    column.setSafe(at, content);
    bytes += content.length + VALUE_BYTES;
  }

  /** The rows, which are not kept. */
  byte[] taken() {
    List<FieldVector> columns = new ArrayList<>(List.of(value, key, headers));
    if (hasSubjects) {
      columns.add(subject);
    }
    columns.forEach(column -> column.setValueCount(rows));
    VectorSchemaRoot root = new VectorSchemaRoot(columns);
    root.setRowCount(rows);
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    try (ArrowStreamWriter writer = new ArrowStreamWriter(root, null, out)) {
      writer.writeBatch();
      writer.end();
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    columns.forEach(FieldVector::reset);
    rows = 0;
    headerPairs = 0;
    bytes = 0;
    return out.toByteArray();
  }

  @Override
  public void close() {
    for (FieldVector column : List.of(value, key, headers, subject)) {
      column.close();
    }
    memory.close();
  }
}
