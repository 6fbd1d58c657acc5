package natslog;

import java.nio.charset.StandardCharsets;
import java.util.zip.CRC32C;

/** CRC32Cs that continue others: Java's class has no way to begin with one. Source: zlib, `crc32_combine`. */
final class Crc {
  private static final int POLYNOMIAL = 0x82f63b78;
  private static final int[] POWERS = new int[32]; // x^(2^n)

  static {
    POWERS[0] = 1 << 30;
    for (int at = 1; at < POWERS.length; at++) {
      POWERS[at] = times(POWERS[at - 1], POWERS[at - 1]);
    }
  }

  private Crc() {}

  static int of(byte[] data, int from, int to) {
    CRC32C crc = new CRC32C();
    crc.update(data, from, to - from);
    return (int) crc.getValue();
  }

  /** The CRC of bytes whose CRC is `before`, and then of these. */
  static int continued(int before, byte[] data, int from, int to) {
    int product = 1 << 31;
    int power = 3; // of bits in a byte
    for (int left = to - from; left != 0; left >>>= 1, power++) {
      if ((left & 1) != 0) {
        product = times(POWERS[power & 31], product);
      }
    }
    return times(product, before) ^ of(data, from, to);
  }

  /** As if the text at this place were zeros. */
  static int blanked(byte[] data, int blankFrom, int blankTo, int to) {
    byte[] zeros = "0".repeat(blankTo - blankFrom).getBytes(StandardCharsets.US_ASCII);
    CRC32C crc = new CRC32C();
    crc.update(data, 0, blankFrom);
    crc.update(zeros, 0, zeros.length);
    crc.update(data, blankTo, to - blankTo);
    return (int) crc.getValue();
  }

  /** Of polynomials, modulo that of CRC32C; bits are reversed. */
  private static int times(int one, int other) {
    int product = 0;
    for (int bit = 1 << 31; bit != 0; bit >>>= 1) {
      if ((one & bit) != 0) {
        product ^= other;
      }
      other = (other & 1) != 0 ? (other >>> 1) ^ POLYNOMIAL : other >>> 1;
    }
    return product;
  }
}
