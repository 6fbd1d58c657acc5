package natslog;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;

/** BLAKE2b with a digest of 16 bytes and no key, which the JDK lacks. Source: RFC 7693. */
final class Blake2b {
  private static final int DIGEST_BYTES = 16;
  private static final int BLOCK_BYTES = 128;
  private static final int ROUNDS = 12;
  private static final long[] IV = {
    0x6a09e667f3bcc908L, 0xbb67ae8584caa73bL, 0x3c6ef372fe94f82bL, 0xa54ff53a5f1d36f1L,
    0x510e527fade682d1L, 0x9b05688c2b3e6c1fL, 0x1f83d9abfb41bd6bL, 0x5be0cd19137e2179L
  };
  private static final int[][] SIGMA = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}
  };

  private Blake2b() {}

  /** The digest as two little-endian words. */
  static long[] words(byte[] data) {
    long[] state = IV.clone();
    state[0] ^= 0x01010000L ^ DIGEST_BYTES;
    int blocks = Math.max(1, (data.length + BLOCK_BYTES - 1) / BLOCK_BYTES);
    byte[] padded = Arrays.copyOf(data, blocks * BLOCK_BYTES);
    for (int block = 0; block < blocks; block++) {
      boolean isLast = block == blocks - 1;
      long[] words = new long[16];
      ByteBuffer.wrap(padded, block * BLOCK_BYTES, BLOCK_BYTES).order(ByteOrder.LITTLE_ENDIAN).asLongBuffer().get(words);
      compress(state, words, isLast ? data.length : (block + 1L) * BLOCK_BYTES, isLast);
    }
    return Arrays.copyOf(state, DIGEST_BYTES / Long.BYTES);
  }

  private static void compress(long[] state, long[] words, long hashedBytes, boolean isLast) {
    long[] v = Arrays.copyOf(state, 16);
    System.arraycopy(IV, 0, v, 8, 8);
    v[12] ^= hashedBytes;
    if (isLast) {
      v[14] = ~v[14];
    }
    for (int round = 0; round < ROUNDS; round++) {
      int[] order = SIGMA[round % SIGMA.length];
      for (int at = 0; at < 4; at++) {
        mix(v, at, 4 + at, 8 + at, 12 + at, words[order[2 * at]], words[order[2 * at + 1]]);
      }
      for (int at = 0; at < 4; at++) {
        mix(v, at, 4 + (at + 1) % 4, 8 + (at + 2) % 4, 12 + (at + 3) % 4,
            words[order[8 + 2 * at]], words[order[9 + 2 * at]]);
      }
    }
    for (int at = 0; at < 8; at++) {
      state[at] ^= v[at] ^ v[8 + at];
    }
  }

  private static void mix(long[] v, int a, int b, int c, int d, long x, long y) {
    v[a] += v[b] + x;
    v[d] = Long.rotateRight(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = Long.rotateRight(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = Long.rotateRight(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = Long.rotateRight(v[b] ^ v[c], 63);
  }
}
