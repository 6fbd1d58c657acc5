package natslog;

import com.github.luben.zstd.Zstd;
import com.github.luben.zstd.ZstdException;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import net.jpountz.lz4.LZ4FrameInputStream;
import org.apache.arrow.flatbuf.MessageHeader;
import org.apache.arrow.flatbuf.RecordBatch;
import org.apache.arrow.flatbuf.Schema;
import org.apache.spark.sql.vectorized.ColumnVector;

/**
 * Arrow IPC messages of a response, one after another. Each has some columns of stored messages. Where it comes from
 * stored batches, its metadata has a line with CRC32Cs, which prove the bytes of each column from the disk of the broker
 * to here (docs/FORMATS.md); other messages are compared with what was asked for. Buffers are used again and again: what
 * a message has is valid until the next one is read.
 */
final class Message {
  static final List<String> STORED = List.of("offset", "timestamp", "subject", "key", "headers", "value");
  private static final int[] NODES = {1, 1, 1, 1, 4, 1};
  private static final int[] BUFFERS = {2, 2, 3, 3, 9, 3};
  private static final int MOST_METADATA = 1 << 20;
  private static final int MOST_BODY = 1 << 30;
  private static final int LEAST_BODY = 1 << 20;
  private static final long LAST_US = 253_402_300_799_999_999L;
  private static final Pattern LINE = Pattern.compile(
      "v1 base_offset=(\\d{19}) end_offset=(\\d{19}) rows=(\\d{10}) header_bytes=(\\d{10}) body_bytes=(\\d{12})"
          + " columns=([0-9a-f,-]+) header_crc32c=([0-9a-f]{8})\0");

  private final String source;
  private final List<String> columns;
  private final boolean isProven;
  private final TaskMemory memory;
  private byte[] metadata = new byte[4096];
  private byte[] body = new byte[0];
  private byte[] unpacked = new byte[0];
  private RecordBatch batch;
  private Columns.Slice[] slices;
  private boolean hasSchema;
  private int bodyBytes;

  /** Offsets `[baseOffset, endOffset)`, of which `rows` have a message. Of a message that is not proven: its rows'. */
  long baseOffset;

  long endOffset;
  int rows;

  /**
   * @param columns of the response, in order
   * @param isProven whether it has CRCs
   * @param memory counts the buffers
   */
  Message(String stream, List<String> columns, boolean isProven, TaskMemory memory) {
    this.source = "stream '" + stream + "'";
    this.columns = columns;
    this.isProven = isProven;
    this.memory = memory;
  }

  /** Reads the next message; false behind the last one. */
  boolean read(InputStream in) throws IOException {
    while (true) {
      byte[] prefix = in.readNBytes(8);
      if (prefix.length < 8) {
        throw new IOException("the response ended early");
      }
      ByteBuffer lengths = ByteBuffer.wrap(prefix).order(ByteOrder.LITTLE_ENDIAN);
      int size = lengths.getInt(4);
      if (lengths.getInt(0) != -1 || size < 0 || size > MOST_METADATA) {
        throw damaged("is not an Arrow IPC message");
      }
      if (size == 0) {
        return false;
      }
      if (metadata.length < 8 + size) {
        metadata = new byte[8 + size];
      }
      System.arraycopy(prefix, 0, metadata, 0, 8);
      fill(in, metadata, 8, size);
      try {
        if (!isSchema(size)) {
          readBody(in, 8 + size);
          return true;
        }
        if (hasSchema) {
          throw damaged("is a second schema");
        }
        hasSchema = true;
      } catch (NatslogException error) {
        throw error;
      } catch (IndexOutOfBoundsException | IllegalArgumentException | NullPointerException error) {
        throw damaged("has metadata that cannot be read");
      }
    }
  }

  private boolean isSchema(int size) {
    ByteBuffer buffer = ByteBuffer.wrap(metadata, 8, size).slice().order(ByteOrder.LITTLE_ENDIAN);
    var message = org.apache.arrow.flatbuf.Message.getRootAsMessage(buffer);
    if (message.headerType() == MessageHeader.Schema) {
      Schema schema = (Schema) message.header(new Schema());
      List<String> names = new ArrayList<>();
      for (int at = 0; at < schema.fieldsLength(); at++) {
        names.add(schema.fields(at).name());
      }
      if (!names.equals(columns)) {
        throw NatslogException.corruptAnswer(source + ": the response does not have the requested columns");
      }
      return true;
    }
    if (message.headerType() != MessageHeader.RecordBatch || message.bodyLength() < 0
        || message.bodyLength() > MOST_BODY) {
      throw new IllegalArgumentException();
    }
    batch = (RecordBatch) message.header(new RecordBatch());
    bodyBytes = (int) message.bodyLength();
    return false;
  }

  private void readBody(InputStream in, int headerBytes) throws IOException {
    Matcher line = isProven ? provenLine(headerBytes) : null;
    body = filled(in, body, bodyBytes);
    if (batch.length() < 0 || batch.length() > Integer.MAX_VALUE) {
      throw new IllegalArgumentException();
    }
    rows = (int) batch.length();
    if (line != null) {
      prove(line);
    }
    unpack();
    check();
    if (line == null) {
      boundsOfRows();
    }
  }

  private void fill(InputStream in, byte[] into, int at, int count) throws IOException {
    if (in.readNBytes(into, at, count) < count) {
      throw new IOException("the response ended early");
    }
  }

  /** Grows the buffer as bytes arrive: a length that was damaged takes no more memory than what was sent. */
  private byte[] filled(InputStream in, byte[] buffer, int count) throws IOException {
    byte[] found = buffer;
    for (int have = 0; have < count; ) {
      if (have == found.length) {
        int longer = (int) Math.min(count, Math.max(LEAST_BODY, 2L * have));
        memory.grow(found.length, longer);
        found = Arrays.copyOf(found, longer);
      }
      int more = in.readNBytes(found, have, Math.min(count, found.length) - have);
      if (more == 0) {
        throw new IOException("the response ended early");
      }
      have += more;
    }
    return found;
  }

  private NatslogException damaged(String what) {
    return NatslogException.corruptAnswer(
        source + ": a part of the response " + what + ": check that the URL is that of a natslog broker");
  }

  // ---- proof ----

  private Matcher provenLine(int headerBytes) {
    Matcher line = LINE.matcher(new String(metadata, 0, headerBytes, StandardCharsets.ISO_8859_1));
    boolean holds = line.find()
        && Crc.blanked(metadata, line.start(7), line.end(7), headerBytes) == word(line.group(7))
        && Long.parseLong(line.group(4)) == headerBytes
        && Long.parseLong(line.group(5)) == bodyBytes;
    if (!holds) {
      throw NatslogException.corruptLog(source + ": a message of the response has a damaged header");
    }
    return line;
  }

  private void prove(Matcher line) {
    baseOffset = Long.parseLong(line.group(1));
    endOffset = Long.parseLong(line.group(2));
    String[] crcs = line.group(6).split(",");
    boolean holds = crcs.length == columns.size() && Long.parseLong(line.group(3)) == rows
        && rows <= endOffset - baseOffset;
    int first = 0;
    for (int at = 0; holds && at < crcs.length; at++) {
      int next = first + BUFFERS[STORED.indexOf(columns.get(at))];
      long from = batch.buffers(first).offset();
      long to = at + 1 < crcs.length ? batch.buffers(next).offset() : bodyBytes;
      String[] pair = crcs[at].split("-");
      holds = pair.length == 2 && 0 <= from && from <= to && to <= bodyBytes
          && Crc.continued(word(pair[0]), body, (int) from, (int) to) == word(pair[1]);
      first = next;
    }
    if (!holds) {
      throw new NatslogException("corrupt_log",
          source + ": the batch at offsets " + baseOffset + " to " + (endOffset - 1) + " has a wrong CRC32C", false,
          Map.of("start", baseOffset, "end", endOffset));
    }
  }

  private static int word(String hex) {
    return Integer.parseUnsignedInt(hex, 16);
  }

  // ---- buffers ----

  private void unpack() {
    int count = batch.buffersLength();
    int expected = columns.stream().mapToInt(name -> BUFFERS[STORED.indexOf(name)]).sum();
    if (count != expected) {
      throw new IllegalArgumentException();
    }
    slices = new Columns.Slice[count];
    boolean isPacked = batch.compression() != null;
    long total = 0;
    for (int at = 0; at < count; at++) {
      long from = batch.buffers(at).offset();
      long length = batch.buffers(at).length();
      if (from < 0 || length < 0 || from > bodyBytes || length > bodyBytes - from) {
        throw new IndexOutOfBoundsException();
      }
      slices[at] = new Columns.Slice(body, (int) from, (int) length);
      long claimed = isPacked && length >= 8 ? Math.max(0, slices[at].longAt(0)) : 0;
      if (claimed > MOST_BODY) {
        throw new IndexOutOfBoundsException();
      }
      total += claimed;
    }
    if (isPacked) {
      if (total > MOST_BODY) {
        throw new IndexOutOfBoundsException();
      }
      if (unpacked.length < total) {
        memory.grow(unpacked.length, total);
        unpacked = new byte[(int) total];
      }
      int end = 0;
      for (int at = 0; at < count; at++) {
        slices[at] = unpackedAt(slices[at], end);
        end += slices[at].data() == unpacked ? slices[at].length() : 0;
      }
    }
  }

  /** A packed buffer begins with its real length, or with -1 if it is not packed. */
  private Columns.Slice unpackedAt(Columns.Slice packed, int into) {
    if (packed.length() < 8) {
      return packed;
    }
    long length = packed.longAt(0);
    int from = packed.at() + 8;
    int count = packed.length() - 8;
    if (length < 0) {
      return new Columns.Slice(body, from, count);
    }
    long found;
    if (batch.compression().codec() == 1) {
      try {
        found = length == 0 ? 0 : Zstd.decompressByteArray(unpacked, into, (int) length, body, from, count);
      } catch (ZstdException error) {
        throw new IllegalArgumentException(error);
      }
    } else {
      try (LZ4FrameInputStream in = new LZ4FrameInputStream(new ByteArrayInputStream(body, from, count))) {
        found = in.readNBytes(unpacked, into, (int) length);
      } catch (IOException error) {
        throw new IllegalArgumentException(error);
      }
    }
    if (found != length) {
      throw new IllegalArgumentException();
    }
    return new Columns.Slice(unpacked, into, (int) length);
  }

  // ---- checks, so that no column reads outside of its buffers ----

  private void check() {
    int node = 0;
    int buffer = 0;
    for (String name : columns) {
      int which = STORED.indexOf(name);
      if (batch.nodes(node).length() != rows) {
        throw new IllegalArgumentException();
      }
      checkValidity(node, slices[buffer], rows);
      boolean mayBeNull = name.equals("key") || name.equals("headers");
      if (!mayBeNull && batch.nodes(node).nullCount() != 0) {
        throw NatslogException.corruptAnswer(source + ": the response has rows without " + name);
      }
      switch (name) {
        case "offset", "timestamp" -> checkNumbers(slices[buffer + 1], name.equals("timestamp"));
        case "headers" -> checkHeaders(node, buffer);
        default -> checkTexts(slices[buffer + 1], slices[buffer + 2], rows, name.equals("subject"));
      }
      node += NODES[which];
      buffer += BUFFERS[which];
    }
  }

  private void checkValidity(int node, Columns.Slice valid, int count) {
    long nulls = batch.nodes(node).nullCount();
    if (nulls < 0 || nulls > count || (nulls > 0 && valid.length() < (count + 7) / 8)) {
      throw new IndexOutOfBoundsException();
    }
  }

  private void checkNumbers(Columns.Slice numbers, boolean isTime) {
    if (numbers.length() < 8L * rows) {
      throw new IndexOutOfBoundsException();
    }
    for (int row = 0; isTime && !isProven && row < rows; row++) {
      if (numbers.longAt(row) < 0 || numbers.longAt(row) > LAST_US) {
        throw NatslogException.corruptAnswer(
            source + ": the response has timestamps outside of the years 1970 to 9999");
      }
    }
  }

  private void checkEdges(Columns.Slice edges, int count, int most) {
    if (count == 0) {
      return;
    }
    if (edges.length() < 4L * (count + 1)) {
      throw new IndexOutOfBoundsException();
    }
    int before = edges.intAt(0);
    boolean ascends = before >= 0;
    for (int at = 1; at <= count; at++) {
      int edge = edges.intAt(at);
      ascends &= edge >= before;
      before = edge;
    }
    if (!ascends || before > most) {
      throw new IndexOutOfBoundsException();
    }
  }

  private void checkTexts(Columns.Slice edges, Columns.Slice bytes, int count, boolean isText) {
    checkEdges(edges, count, bytes.length());
    if (!isText || isProven || count == 0) {
      return;
    }
    int from = edges.intAt(0);
    try {
      StandardCharsets.UTF_8.newDecoder().decode(
          ByteBuffer.wrap(bytes.data(), bytes.at() + from, edges.intAt(count) - from));
    } catch (CharacterCodingException error) {
      throw damaged("has texts that are not UTF-8");
    }
    for (int at = 0; at < count; at++) {
      int start = edges.intAt(at);
      if (start < edges.intAt(at + 1) && (bytes.data()[bytes.at() + start] & 0xc0) == 0x80) {
        throw damaged("has texts that are not UTF-8");
      }
    }
  }

  private void checkHeaders(int node, int buffer) {
    long items = batch.nodes(node + 1).length();
    if (items < 0 || items > Integer.MAX_VALUE - 1) {
      throw new IndexOutOfBoundsException();
    }
    checkEdges(slices[buffer + 1], rows, (int) items);
    checkValidity(node + 1, slices[buffer + 2], (int) items);
    for (int child = 0; child < 2; child++) {
      if (batch.nodes(node + 2 + child).length() != items) {
        throw new IllegalArgumentException();
      }
      int at = buffer + 3 + 3 * child;
      checkValidity(node + 2 + child, slices[at], (int) items);
      checkTexts(slices[at + 1], slices[at + 2], (int) items, true);
    }
  }

  /** Of rows that are not proven: their offsets must ascend. */
  private void boundsOfRows() {
    int at = columns.indexOf("offset");
    if (at < 0 || rows == 0) {
      baseOffset = endOffset = -1;
      return;
    }
    Columns.Slice offsets = slices[firstBuffer(at) + 1];
    baseOffset = offsets.longAt(0);
    long before = baseOffset - 1;
    for (int row = 0; row < rows; row++) {
      if (offsets.longAt(row) <= before) {
        throw NatslogException.corruptAnswer(source + ": the offsets of the response do not ascend");
      }
      before = offsets.longAt(row);
    }
    endOffset = before + 1;
  }

  // ---- rows and columns ----

  private int firstBuffer(int place) {
    return columns.subList(0, place).stream().mapToInt(name -> BUFFERS[STORED.indexOf(name)]).sum();
  }

  private int firstNode(int place) {
    return columns.subList(0, place).stream().mapToInt(name -> NODES[STORED.indexOf(name)]).sum();
  }

  /** The first row at or after an offset, in a message that is proven. */
  int rowAt(long offset) {
    if (offset <= baseOffset) {
      return 0;
    }
    if (offset >= endOffset) {
      return rows;
    }
    if (rows == endOffset - baseOffset) {
      return (int) (offset - baseOffset);
    }
    int at = columns.indexOf("offset");
    if (at < 0) {
      throw NatslogException.corruptAnswer(source + ": a batch lacks the column offset, by which rows are chosen");
    }
    Columns.Slice offsets = slices[firstBuffer(at) + 1];
    int low = 0;
    int high = rows;
    while (low < high) {
      int middle = (low + high) >>> 1;
      if (offsets.longAt(middle) < offset) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  /** A column of the rows from `first` on. */
  ColumnVector column(String name, int first) {
    int place = columns.indexOf(name);
    int buffer = firstBuffer(place);
    int node = firstNode(place);
    int nulls = (int) batch.nodes(node).nullCount();
    Columns.Slice valid = slices[buffer];
    return switch (name) {
      case "offset", "timestamp" -> new Columns.Numbers(Columns.typeOf(name), slices[buffer + 1], first);
      case "headers" -> new Columns.Lists(valid, nulls, slices[buffer + 1],
          new Columns.Pairs(slices[buffer + 2], (int) batch.nodes(node + 1).nullCount(),
              texts("subject", buffer + 3, node + 2, 0), texts("subject", buffer + 6, node + 3, 0)), first);
      default -> texts(name, buffer, node, first);
    };
  }

  private Columns.Texts texts(String like, int buffer, int node, int first) {
    return new Columns.Texts(Columns.typeOf(like), slices[buffer], (int) batch.nodes(node).nullCount(),
        slices[buffer + 1], slices[buffer + 2], first);
  }
}
