package natslog;

import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A row as a message: its texts, why NATS would not accept it, and its frame. One object is used for all rows of a task;
 * the texts are views of the memory of Spark's row.
 */
final class OutgoingRow {
  static final int MOST_SUBJECT_BYTES = 1024;
  static final String TOMBSTONE = "Natslog-Tombstone";

  private static final int FRAME_BYTES = 160; // verb, blanks, lengths, line ends, names of headers, two numbers
  private static final byte[] VERSION = ascii("NATS/1.0\r\n");
  private static final byte[] KEY_NAME = ascii("Natslog-Key: ");
  private static final byte[] ID_NAME = ascii("Nats-Msg-Id: ");
  private static final byte[] ACK_NAME = ascii("Natslog-Ack-To: ");
  private static final int PAIR_BYTES = 4; // `: ` and the end of the line

  UTF8String subject;
  UTF8String key;
  UTF8String value;
  UTF8String[] names = new UTF8String[8];
  UTF8String[] values = new UTF8String[8];
  /** How many headers; below zero where the row has no list of them. */
  int headers = -1;
  private UTF8String givenId;
  private final byte[] ownId = new byte[RowHashes.ID_BYTES];
  private boolean hasOwnId;

  private static byte[] ascii(String text) {
    return text.getBytes(StandardCharsets.US_ASCII);
  }

  void addHeader(UTF8String name, UTF8String text) {
    headers = Math.max(0, headers);
    if (headers == names.length) {
      names = Arrays.copyOf(names, 2 * headers);
      values = Arrays.copyOf(values, 2 * headers);
    }
    names[headers] = name;
    values[headers++] = text;
  }

  /** With `tombstones`, a row with a key and without a value deletes its key. */
  void asTombstone() {
    if (value != null || key == null) {
      return;
    }
    value = UTF8String.EMPTY_UTF8;
    UTF8String mark = UTF8String.fromString(TOMBSTONE);
    for (int at = 0; at < headers; at++) {
      if (mark.equals(names[at])) {
        return;
      }
    }
    addHeader(mark, UTF8String.fromString("true"));
  }

  /** Of position and content; called when all texts are there. */
  void makeId(RowHashes hashes, long number) {
    hashes.begin(number);
    hashes.mix(subject);
    hashes.mix(key);
    hashes.mix(value);
    for (int at = 0; at < headers; at++) {
      hashes.mixHeader(names[at], values[at]);
    }
    hashes.finish(headers);
    hashes.putId(ownId, 0);
    hasOwnId = true;
    givenId = null;
  }

  /** Of the column that the option names; null: the row has none. */
  void setId(UTF8String id) {
    givenId = id;
    hasOwnId = false;
  }

  UTF8String ownId() {
    return UTF8String.fromBytes(ownId.clone());
  }

  boolean hasId() {
    return hasOwnId || givenId != null;
  }

  // ---- what NATS does not accept ----

  /** Why the row has no subject that it could be sent to, or no value; null where it has both. */
  String problem() {
    if (value == null) {
      return "value is null";
    }
    if (subject == null) {
      return "subject is null";
    }
    if (!isPlainSubject(subject)) {
      return "subject is not one plain NATS subject";
    }
    return subject.numBytes() > MOST_SUBJECT_BYTES ? "subject is longer than " + MOST_SUBJECT_BYTES + " bytes" : null;
  }

  /** Why the rest of it cannot be sent, or null. @param moreBytes of a further header */
  String problem(int maxPayloadBytes, int moreBytes) {
    long size = value.numBytes() + linesBytes() + moreBytes
        + VERSION.length + ID_NAME.length + (hasId() ? idBytes() : 0) + 2 * 2;
    if (size > maxPayloadBytes) {
      return "message is larger than the server's limit of " + maxPayloadBytes + " bytes";
    }
    String unlike = " is not one line of UTF-8 text without leading or trailing blanks";
    if (key != null && !isOneLine(key)) {
      return "key" + unlike;
    }
    if (givenId != null && !isOneLine(givenId)) {
      return "message id" + unlike;
    }
    for (int at = 0; at < headers; at++) {
      if (!isHeader(names[at], values[at])) {
        return "a header name or value is not allowed";
      }
    }
    return null;
  }

  static boolean isHeader(UTF8String name, UTF8String text) {
    if (name == null || text == null || name.numBytes() == 0) {
      return false;
    }
    for (int at = 0; at < name.numBytes(); at++) {
      byte letter = byteAt(name, at);
      if (letter <= ' ' || letter > '~' || letter == ':') {
        return false;
      }
    }
    return isInLine(text);
  }

  static boolean isPlainSubject(UTF8String text) {
    int length = text.numBytes();
    int tokenStart = 0;
    for (int at = 0; at <= length; at++) {
      byte letter = at == length ? (byte) '.' : byteAt(text, at);
      if (letter == '.') {
        byte only = at - tokenStart == 1 ? byteAt(text, tokenStart) : 0;
        if (at == tokenStart || only == '*' || only == '>') {
          return false;
        }
        tokenStart = at + 1;
      } else if (letter >= 0 && letter <= ' ' || letter == 0x7f) {
        return false;
      }
    }
    return true;
  }

  private static boolean isInLine(UTF8String text) {
    int length = text.numBytes();
    if (length == 0) {
      return true;
    }
    for (int at = 0; at < length; at++) {
      byte letter = byteAt(text, at);
      if (letter == '\r' || letter == '\n') {
        return false;
      }
    }
    return !isBlank(byteAt(text, 0)) && !isBlank(byteAt(text, length - 1));
  }

  private static boolean isOneLine(UTF8String text) {
    if (!isInLine(text)) {
      return false;
    }
    for (int at = 0; at < text.numBytes(); at++) {
      if (byteAt(text, at) < 0) {
        return isUtf8(text.getBytes());
      }
    }
    return true;
  }

  static boolean isUtf8(byte[] text) {
    try {
      StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(text));
      return true;
    } catch (CharacterCodingException error) {
      return false;
    }
  }

  /** `UTF8String.getByte`, which is not public before Spark 4.0. */
  private static byte byteAt(UTF8String text, int at) {
    return Platform.getByte(text.getBaseObject(), text.getBaseOffset() + at);
  }

  private static boolean isBlank(byte letter) {
    return letter == ' ' || letter == '\t';
  }

  // ---- the frame ----

  private int idBytes() {
    return givenId != null ? givenId.numBytes() : ownId.length;
  }

  private int linesBytes() {
    return headersBytes() + (key == null ? 0 : KEY_NAME.length + key.numBytes() + 2);
  }

  /** What the lines of its own headers take. */
  int headersBytes() {
    int bytes = 0;
    for (int at = 0; at < headers; at++) {
      bytes += (names[at] == null ? 0 : names[at].numBytes()) + (values[at] == null ? 0 : values[at].numBytes());
      bytes += PAIR_BYTES;
    }
    return bytes;
  }

  int mostBytes(int replyBytes) {
    return Math.addExact(
        FRAME_BYTES + subject.numBytes() + linesBytes() + idBytes() + 2 * replyBytes, value.numBytes());
  }

  /**
   * Writes `PUB`, or `HPUB` where there is a header.
   *
   * @param number of the message, which its ack states; below zero: without ack
   * @param ways where the ack is requested: bits of `Publisher.BY_REPLY` and `BY_HEADER`
   * @return where it ends
   */
  int put(byte[] out, int start, byte[] replyPrefix, long number, int ways) {
    boolean hasAckHeader = number >= 0 && (ways & Publisher.BY_HEADER) != 0;
    int headerBytes = linesBytes();
    headerBytes += hasId() ? ID_NAME.length + idBytes() + 2 : 0;
    headerBytes += hasAckHeader ? ACK_NAME.length + replyPrefix.length + digits(number) + 2 : 0;
    headerBytes += headerBytes > 0 ? VERSION.length + 2 : 0;
    int at = start;
    if (headerBytes > 0) {
      out[at++] = 'H';
    }
    out[at] = 'P';
    out[at + 1] = 'U';
    out[at + 2] = 'B';
    out[at + 3] = ' ';
    at = put(out, at + 4, subject);
    out[at++] = ' ';
    if (number >= 0 && (ways & Publisher.BY_REPLY) != 0) {
      at = putNumber(out, put(out, at, replyPrefix), number);
      out[at++] = ' ';
    }
    if (headerBytes > 0) {
      at = putNumber(out, at, headerBytes);
      out[at++] = ' ';
    }
    at = endLine(out, putNumber(out, at, headerBytes + value.numBytes()));
    if (headerBytes > 0) {
      at = putHeaders(out, at);
      if (hasAckHeader) {
        at = endLine(out, putNumber(out, put(out, put(out, at, ACK_NAME), replyPrefix), number));
      }
      at = endLine(out, at);
    }
    return endLine(out, put(out, at, value));
  }

  private int putHeaders(byte[] out, int start) {
    int at = put(out, start, VERSION);
    if (key != null) {
      at = endLine(out, put(out, put(out, at, KEY_NAME), key));
    }
    for (int each = 0; each < headers; each++) {
      at = put(out, at, names[each]);
      out[at++] = ':';
      out[at++] = ' ';
      at = endLine(out, put(out, at, values[each]));
    }
    if (givenId != null) {
      at = endLine(out, put(out, put(out, at, ID_NAME), givenId));
    } else if (hasOwnId) {
      at = endLine(out, put(out, put(out, at, ID_NAME), ownId));
    }
    return at;
  }

  private static int put(byte[] out, int at, UTF8String text) {
    text.writeToMemory(out, Platform.BYTE_ARRAY_OFFSET + at);
    return at + text.numBytes();
  }

  private static int put(byte[] out, int at, byte[] text) {
    System.arraycopy(text, 0, out, at, text.length);
    return at + text.length;
  }

  private static int endLine(byte[] out, int at) {
    out[at] = '\r';
    out[at + 1] = '\n';
    return at + 2;
  }

  private static int digits(long number) {
    int count = 1;
    for (long rest = number / 10; rest > 0; rest /= 10) {
      count++;
    }
    return count;
  }

  private static int putNumber(byte[] out, int at, long number) {
    int end = at + digits(number);
    long rest = number;
    for (int place = end - 1; place >= at; place--) {
      out[place] = (byte) ('0' + rest % 10);
      rest /= 10;
    }
    return end;
  }
}
