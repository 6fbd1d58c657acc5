package natslog;

import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteOrder;
import java.util.Arrays;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/** Columns over the bytes of Arrow buffers: nothing is copied until Spark takes a value. */
final class Columns {
  static final DataType PAIR = new StructType().add("key", DataTypes.StringType).add("value", DataTypes.StringType);
  private static final VarHandle LONGS =
      MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);
  private static final VarHandle INTS = MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.LITTLE_ENDIAN);

  private Columns() {}

  static DataType typeOf(String column) {
    return switch (column) {
      case "stream", "subject" -> DataTypes.StringType;
      case "offset" -> DataTypes.LongType;
      case "timestamp" -> DataTypes.TimestampType;
      case "headers" -> new ArrayType(PAIR, true);
      default -> DataTypes.BinaryType;
    };
  }

  /** Bytes of one Arrow buffer. */
  record Slice(byte[] data, int at, int length) {
    long longAt(int index) {
      return (long) LONGS.get(data, at + 8 * index);
    }

    int intAt(int index) {
      return (int) INTS.get(data, at + 4 * index);
    }

    boolean bitAt(int index) {
      return (data[at + (index >> 3)] >> (index & 7) & 1) != 0;
    }
  }

  /** What all columns share: validity, and the first row. */
  private abstract static class Column extends ColumnVector {
    private final Slice valid;
    final int first;
    private final int nulls;

    Column(DataType type, Slice valid, int nulls, int first) {
      super(type);
      this.valid = nulls == 0 ? null : valid;
      this.nulls = nulls;
      this.first = first;
    }

    @Override
    public void close() {}

    @Override
    public boolean hasNull() {
      return nulls > 0;
    }

    @Override
    public int numNulls() {
      return nulls;
    }

    @Override
    public boolean isNullAt(int row) {
      return valid != null && !valid.bitAt(first + row);
    }

    @Override
    public boolean getBoolean(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public byte getByte(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public short getShort(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public int getInt(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public long getLong(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public float getFloat(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public double getDouble(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public ColumnarArray getArray(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public ColumnarMap getMap(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
      throw new UnsupportedOperationException();
    }

    @Override
    public UTF8String getUTF8String(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public byte[] getBinary(int row) {
      throw new UnsupportedOperationException();
    }

    @Override
    public ColumnVector getChild(int ordinal) {
      throw new UnsupportedOperationException();
    }
  }

  /** `offset`, `timestamp`. */
  static final class Numbers extends Column {
    private final Slice values;

    Numbers(DataType type, Slice values, int first) {
      super(type, null, 0, first);
      this.values = values;
    }

    @Override
    public long getLong(int row) {
      return values.longAt(first + row);
    }
  }

  /** `subject`, `key`, `value`, and the texts of headers. The offsets were checked: see `Message`. */
  static final class Texts extends Column {
    private final Slice edges;
    private final Slice bytes;

    Texts(DataType type, Slice valid, int nulls, Slice edges, Slice bytes, int first) {
      super(type, valid, nulls, first);
      this.edges = edges;
      this.bytes = bytes;
    }

    @Override
    public UTF8String getUTF8String(int row) {
      if (isNullAt(row)) {
        return null;
      }
      int start = edges.intAt(first + row);
      return UTF8String.fromBytes(bytes.data(), bytes.at() + start, edges.intAt(first + row + 1) - start);
    }

    @Override
    public byte[] getBinary(int row) {
      if (isNullAt(row)) {
        return null;
      }
      int from = bytes.at() + edges.intAt(first + row);
      return Arrays.copyOfRange(bytes.data(), from, bytes.at() + edges.intAt(first + row + 1));
    }
  }

  /** `headers`. */
  static final class Lists extends Column {
    private final Slice edges;
    private final ColumnVector items;

    Lists(Slice valid, int nulls, Slice edges, ColumnVector items, int first) {
      super(typeOf("headers"), valid, nulls, first);
      this.edges = edges;
      this.items = items;
    }

    @Override
    public ColumnarArray getArray(int row) {
      int start = edges.intAt(first + row);
      return new ColumnarArray(items, start, edges.intAt(first + row + 1) - start);
    }
  }

  static final class Pairs extends Column {
    private final ColumnVector[] fields;

    Pairs(Slice valid, int nulls, ColumnVector... fields) {
      super(PAIR, valid, nulls, 0);
      this.fields = fields;
    }

    @Override
    public ColumnVector getChild(int ordinal) {
      return fields[ordinal];
    }
  }

  /** `stream`. */
  static final class Same extends Column {
    private final UTF8String text;

    Same(String text) {
      super(DataTypes.StringType, null, 0, 0);
      this.text = UTF8String.fromString(text);
    }

    @Override
    public UTF8String getUTF8String(int row) {
      return text;
    }
  }
}
