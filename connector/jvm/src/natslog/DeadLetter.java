package natslog;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.core.json.JsonWriteFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.json.JsonMapper;
import java.util.Arrays;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A row that cannot be sent, as a message to the dead letter subject, as `pyspark_natslog.sink.dead_letters` makes it:
 * its value, cut to what the server accepts, and in headers the reason, its subject and its origin; its own key and
 * headers if they are allowed and there is room.
 */
final class DeadLetter {
  private static final int HEADER_ROOM_BYTES = 512;
  private static final int SHOWN_CHARS = 1000;
  private static final ObjectMapper ASCII_JSON = JsonMapper.builder().enable(JsonWriteFeature.ESCAPE_NON_ASCII).build();

  private DeadLetter() {}

  /**
   * @param row its message id is that of the letter
   * @param origin `Stream` and `Offset`, where the rows have such columns
   */
  static OutgoingRow of(OutgoingRow row, String reason, Map<String, String> origin, String subject, int maxPayloadBytes) {
    OutgoingRow letter = new OutgoingRow();
    letter.subject = UTF8String.fromString(subject);
    letter.setId(row.ownId());
    add(letter, "Natslog-Error", reason);
    if (row.subject != null) {
      String text = row.subject.toString();
      add(letter, "Natslog-Subject", inLine(text.substring(0, text.offsetByCodePoints(0,
          Math.min(SHOWN_CHARS, text.codePointCount(0, text.length()))))));
    }
    new TreeMap<>(origin).descendingMap().forEach((name, text) -> add(letter, "Natslog-" + name, inLine(text)));
    int roomBytes = maxPayloadBytes - HEADER_ROOM_BYTES - letter.headersBytes();
    byte[] value = row.value == null ? new byte[0] : row.value.getBytes();
    OutgoingRow own = ownHeaders(row);
    boolean hasRoom = value.length + own.headersBytes() <= roomBytes;
    if (value.length > roomBytes) {
      add(letter, "Natslog-Truncated", String.valueOf(value.length));
      value = Arrays.copyOf(value, Math.max(0, roomBytes));
    }
    for (int at = 0; hasRoom && at < own.headers; at++) {
      letter.addHeader(own.names[at], own.values[at]);
    }
    letter.value = UTF8String.fromBytes(value);
    return letter;
  }

  private static void add(OutgoingRow letter, String name, String text) {
    letter.addHeader(UTF8String.fromString(name), UTF8String.fromString(text));
  }

  /** The row's key and headers, without those that a message cannot contain. */
  private static OutgoingRow ownHeaders(OutgoingRow row) {
    OutgoingRow found = new OutgoingRow();
    UTF8String name = UTF8String.fromString("Natslog-Key");
    if (row.key != null) {
      UTF8String key = UTF8String.fromString(row.key.toString()); // bytes that are not UTF-8 are replaced
      if (OutgoingRow.isHeader(name, key)) {
        found.addHeader(name, key);
      }
    }
    for (int at = 0; at < row.headers; at++) {
      if (OutgoingRow.isHeader(row.names[at], row.values[at])) {
        found.addHeader(row.names[at], row.values[at]);
      }
    }
    return found;
  }

  /** The text itself if a header line can contain it, else as JSON. */
  private static String inLine(String text) {
    boolean isPrintable = text.codePoints().allMatch(DeadLetter::isPrintable) && text.equals(text.strip());
    try {
      return isPrintable ? text : ASCII_JSON.writeValueAsString(text);
    } catch (JsonProcessingException error) {
      throw new IllegalArgumentException(error); // a text always has one
    }
  }

  private static boolean isPrintable(int letter) {
    return switch (Character.getType(letter)) {
      case Character.UNASSIGNED, Character.CONTROL, Character.FORMAT, Character.SURROGATE, Character.PRIVATE_USE,
          Character.LINE_SEPARATOR, Character.PARAGRAPH_SEPARATOR -> false;
      case Character.SPACE_SEPARATOR -> letter == ' ';
      default -> true;
    };
  }
}
