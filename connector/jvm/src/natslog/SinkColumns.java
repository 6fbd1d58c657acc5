package natslog;

import java.io.Serializable;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/** The columns of the rows that are written: which the sink reads, and where they stand. */
final class SinkColumns implements Serializable {
  private static final List<String> TEXT_OR_BYTES = List.of("string", "binary");
  private static final String PAIRS = "array<struct<key:string,value:string>>";
  private static final String MAP = "map<string,string>";

  private final StructType schema;
  private final SinkSettings settings;
  private final int value;
  private final int subject;
  private final int key;
  private final int headers;
  private final int id;
  private final int source; // the columns of the source that name a row, with `exactlyOnce`
  private final int sourceOffset;
  private final boolean areMaps; // headers
  private final boolean[] areBytes; // by column

  /** @throws NatslogException a column is missing, or of a wrong type */
  SinkColumns(StructType schema, SinkSettings settings) {
    this.schema = schema;
    this.settings = settings;
    List<String> names = Arrays.asList(schema.fieldNames());
    if (!names.contains("value")) {
      throw NatslogException.config(
          "the sink requires a column value (string or binary)" + Given.didYouMean("value", names));
    }
    if (settings.hasTombstones && !names.contains("key")) {
      throw NatslogException.config(
          "option tombstones requires a column key (string or binary): a tombstone deletes a key");
    }
    Map<String, List<String>> allowed = new LinkedHashMap<>();
    allowed.put("value", TEXT_OR_BYTES);
    allowed.put("subject", List.of("string"));
    allowed.put("key", TEXT_OR_BYTES);
    allowed.put("headers", List.of(PAIRS, MAP));
    if (settings.idColumn != null) {
      allowed.put(settings.idColumn, List.of("string"));
      if (!names.contains(settings.idColumn)) {
        throw NatslogException.config(
            "option msgIdColumn: there is no column '" + settings.idColumn + "'"
                + Given.didYouMean(settings.idColumn, names));
      }
    }
    if (settings.stream != null) {
      allowed.put("stream", List.of("string"));
      allowed.put("offset", List.of("bigint"));
      if (!names.containsAll(List.of("stream", "offset"))) {
        throw NatslogException.config(
            "exactlyOnce requires the columns stream and offset, by which rows of the source are told apart: keep them "
                + "in the query (they are not written)");
      }
    }
    allowed.forEach((name, kinds) -> {
      if (names.contains(name) && !kinds.contains(typeOf(name))) {
        throw NatslogException.config(
            "column '" + name + "' is " + typeOf(name) + "; the sink accepts " + String.join(" or ", kinds)
                + ": cast it");
      }
    });
    value = names.indexOf("value");
    subject = settings.subject == null ? names.indexOf("subject") : -1;
    key = names.indexOf("key");
    headers = names.indexOf("headers");
    source = names.indexOf("stream");
    sourceOffset = names.indexOf("offset");
    id = settings.idColumn == null ? -1 : names.indexOf(settings.idColumn);
    areMaps = headers >= 0 && typeOf("headers").equals(MAP);
    areBytes = new boolean[names.size()];
    for (int at = 0; at < areBytes.length; at++) {
      areBytes[at] = schema.fields()[at].dataType().simpleString().equals("binary");
    }
    if (settings.subject == null && subject < 0 && settings.stream == null) {
      throw NatslogException.config(
          "the sink requires a subject: set .option(\"subject\", \"alerts.quakes\"), or add a column subject");
    }
  }

  private String typeOf(String name) {
    return schema.apply(name).dataType().simpleString();
  }

  /**
   * Fills `row` with the texts of a row of Spark, but for its message id.
   *
   * @param constant the subject of the option, or null
   */
  void read(InternalRow from, UTF8String constant, OutgoingRow row) {
    row.subject = constant != null ? constant : text(from, subject);
    row.key = text(from, key);
    row.value = text(from, value);
    row.headers = -1;
    if (headers >= 0 && !from.isNullAt(headers)) {
      row.headers = 0;
      if (areMaps) {
        addMap(from.getMap(headers), row);
      } else {
        addPairs(from.getArray(headers), row);
      }
    }
    if (settings.hasTombstones) {
      row.asTombstone();
    }
  }

  /** Whether each row states its subject. */
  boolean haveSubjects() {
    return subject >= 0;
  }

  /** With `exactlyOnce`: whether the row of the source is of this stream. */
  boolean isOf(InternalRow from, UTF8String stream) {
    return !from.isNullAt(source) && from.getUTF8String(source).equals(stream);
  }

  /** The offset of that row. */
  long sourceOffset(InternalRow from) {
    return from.isNullAt(sourceOffset) ? -1 : from.getLong(sourceOffset);
  }

  /** Of the option `msgIdColumn`; null where there is none. */
  UTF8String id(InternalRow from) {
    return text(from, id);
  }

  private UTF8String text(InternalRow from, int column) {
    if (column < 0 || from.isNullAt(column)) {
      return null;
    }
    if (from instanceof UnsafeRow) {
      return from.getUTF8String(column); // of binary columns, too: both are bytes in place
    }
    return areBytes[column] ? UTF8String.fromBytes(from.getBinary(column)) : from.getUTF8String(column);
  }

  private static void addPairs(ArrayData pairs, OutgoingRow row) {
    for (int at = 0; at < pairs.numElements(); at++) {
      InternalRow pair = pairs.isNullAt(at) ? null : pairs.getStruct(at, 2);
      row.addHeader(
          pair == null || pair.isNullAt(0) ? null : pair.getUTF8String(0),
          pair == null || pair.isNullAt(1) ? null : pair.getUTF8String(1));
    }
  }

  private static void addMap(MapData map, OutgoingRow row) {
    for (int at = 0; at < map.numElements(); at++) {
      row.addHeader(
          map.keyArray().getUTF8String(at),
          map.valueArray().isNullAt(at) ? null : map.valueArray().getUTF8String(at));
    }
  }

  /** A column that dead letters state as text, `null` as `None`; null where the rows do not have it. */
  String shown(InternalRow from, String name) {
    int column = Arrays.asList(schema.fieldNames()).indexOf(name);
    if (column < 0) {
      return null;
    }
    DataType type = schema.fields()[column].dataType();
    return from.isNullAt(column) ? "None" : String.valueOf(from.get(column, type));
  }
}
