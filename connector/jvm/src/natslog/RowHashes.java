package natslog;

import java.nio.charset.StandardCharsets;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * What a row consists of, as 128 bits, and the message id that is made of them: bit for bit as
 * `natslog.wire.row_hashes` makes them, so that a batch which both sinks have sent is stored once. Golden vectors:
 * `tests/golden/row-hashes-v1.json`.
 *
 * <p>Of one row at a time: `begin`, the texts of the row in order, its headers, `finish`.
 */
final class RowHashes {
  static final int ID_BYTES = 17;

  private static final long P1 = 0x9E3779B185EBCA87L;
  private static final long P2 = 0xC2B2AE3D27D4EB4FL;
  private static final long P4 = 0x85EBCA77C2B2AE63L;
  private static final long ABSENT = -1;
  private static final byte[] ALPHABET =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_".getBytes(StandardCharsets.US_ASCII);

  private final long[] key;
  private long first;
  private long second;

  /**
   * @param context what the rows are numbered in: query, batch and partition; null: hashes do not depend on positions
   */
  RowHashes(String context) {
    key = context == null ? null : Blake2b.words(context.getBytes(StandardCharsets.UTF_8));
  }

  void begin(long number) {
    first = key == null ? 0 : key[0] + number;
    second = key == null ? 0 : key[1] ^ number;
  }

  /** The subject, key or value of the row, in this order; null where there is none. */
  void mix(UTF8String text) {
    if (text == null) {
      mixWords(ABSENT, ABSENT);
      return;
    }
    Object base = text.getBaseObject();
    long at = text.getBaseOffset();
    long length = text.numBytes();
    long end = at + length;
    for (; at + Long.BYTES <= end; at += Long.BYTES) {
      long word = Platform.getLong(base, at);
      mixWords(word, word);
    }
    if (at < end) {
      long word = 0;
      for (int shift = 0; at < end; at++, shift += Byte.SIZE) {
        word |= (Platform.getByte(base, at) & 0xffL) << shift;
      }
      mixWords(word, word);
    }
    mixWords(length, length);
  }

  private void mixWords(long one, long other) {
    first = Long.rotateLeft(first + one * P2, 31) * P1;
    second = Long.rotateLeft(second ^ (Long.rotateLeft(other * P2, 31) * P1), 27) * P1 + P4;
  }

  /** One of the headers of the row, in order, behind its texts. */
  void mixHeader(UTF8String name, UTF8String value) {
    long rowFirst = first;
    long rowSecond = second;
    first = 0;
    second = 0;
    mix(name);
    mix(value);
    long one = first;
    long other = second;
    first = rowFirst;
    second = rowSecond;
    mixWords(one, other);
  }

  /** @param headers how many the row has; below zero where it has no list of them */
  void finish(int headers) {
    mixWords(headers < 0 ? ABSENT : headers, headers < 0 ? ABSENT : headers);
    long last = first;
    first = mixed(last + Long.rotateLeft(second, 32));
    second = mixed(second + Long.rotateLeft(last, 17));
  }

  private static long mixed(long value) {
    long mixed = (value ^ (value >>> 33)) * 0xFF51AFD7ED558CCDL;
    mixed = (mixed ^ (mixed >>> 33)) * 0xC4CEB9FE1A85EC53L;
    return mixed ^ (mixed >>> 33);
  }

  /** The two words of the finished row: a digest of rows is the sum of each. */
  long first() {
    return first;
  }

  long second() {
    return second;
  }

  /** 96 bits of the finished row as `~` and 16 letters. */
  void putId(byte[] into, int at) {
    into[at] = '~';
    long value = first;
    for (int place = 1; place < ID_BYTES; place++) {
      value = place == 11 ? second : value;
      into[at + place] = ALPHABET[(int) (value & 63)];
      value >>>= 6;
    }
  }
}
