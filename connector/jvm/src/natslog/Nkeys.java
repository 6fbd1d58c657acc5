package natslog;

import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyPairGenerator;
import java.security.SecureRandom;
import java.security.Signature;
import java.security.interfaces.EdECPublicKey;
import java.security.spec.EdECPrivateKeySpec;
import java.security.spec.NamedParameterSpec;
import java.util.Arrays;
import java.util.Base64;

/** The nkey seed of a NATS user: an Ed25519 key as text of base 32 with a prefix and a CRC-16. Source: nats-io/nkeys. */
final class Nkeys {
  private static final String BASE_32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
  private static final int SEED_PREFIX = 18 << 3;
  private static final int USER_PREFIX = 20 << 3;
  private static final int KEY_BYTES = 32;

  private final byte[] seed;

  private Nkeys(byte[] seed) {
    this.seed = seed;
  }

  /** Null: the text is no seed of a user. */
  static Nkeys ofUser(String text) {
    byte[] data = decoded(text);
    if (data == null || data.length != 2 + KEY_BYTES + 2) {
      return null;
    }
    int first = data[0] & 0xff;
    int kind = (first & 7) << 5 | (data[1] & 0xf8) >> 3;
    int crc = (data[data.length - 2] & 0xff) | (data[data.length - 1] & 0xff) << 8;
    boolean isUsers = (first & 0xf8) == SEED_PREFIX && kind == USER_PREFIX;
    return isUsers && crc == crc16(data, data.length - 2) ? new Nkeys(Arrays.copyOfRange(data, 2, 2 + KEY_BYTES)) : null;
  }

  /** Of the nonce of a server, as CONNECT states it. */
  String signature(String nonce) throws GeneralSecurityException {
    Signature signature = Signature.getInstance("Ed25519");
    signature.initSign(
        KeyFactory.getInstance("Ed25519").generatePrivate(new EdECPrivateKeySpec(NamedParameterSpec.ED25519, seed)));
    signature.update(nonce.getBytes(StandardCharsets.UTF_8));
    return Base64.getUrlEncoder().withoutPadding().encodeToString(signature.sign());
  }

  /** The public key as text. The JDK computes it only for keys that it generates: the seed takes the place of chance. */
  String publicKey() throws GeneralSecurityException {
    KeyPairGenerator generator = KeyPairGenerator.getInstance("Ed25519");
    generator.initialize(NamedParameterSpec.ED25519, new SecureRandom() {
      @Override
      public void nextBytes(byte[] into) {
        System.arraycopy(seed, 0, into, 0, into.length);
      }
    });
    EdECPublicKey key = (EdECPublicKey) generator.generateKeyPair().getPublic();
    byte[] data = new byte[1 + KEY_BYTES + 2];
    data[0] = (byte) USER_PREFIX;
    byte[] y = key.getPoint().getY().toByteArray(); // big-endian
    for (int at = 0; at < Math.min(KEY_BYTES, y.length); at++) {
      data[1 + at] = y[y.length - 1 - at];
    }
    data[KEY_BYTES] |= (byte) (key.getPoint().isXOdd() ? 0x80 : 0);
    int crc = crc16(data, 1 + KEY_BYTES);
    data[1 + KEY_BYTES] = (byte) crc;
    data[2 + KEY_BYTES] = (byte) (crc >> 8);
    return encoded(data);
  }

  private static byte[] decoded(String text) {
    byte[] found = new byte[text.length() * 5 / 8];
    int bits = 0;
    int held = 0;
    int filled = 0;
    for (int at = 0; at < text.length(); at++) {
      int value = BASE_32.indexOf(text.charAt(at));
      if (value < 0) {
        return null;
      }
      held = held << 5 | value;
      bits += 5;
      if (bits >= 8) {
        bits -= 8;
        found[filled++] = (byte) (held >> bits);
        held &= (1 << bits) - 1;
      }
    }
    return found;
  }

  private static String encoded(byte[] data) {
    StringBuilder found = new StringBuilder();
    int bits = 0;
    int held = 0;
    for (byte one : data) {
      held = held << 8 | one & 0xff;
      bits += 8;
      while (bits >= 5) {
        bits -= 5;
        found.append(BASE_32.charAt(held >> bits & 31));
      }
      held &= (1 << bits) - 1;
    }
    return bits == 0 ? found.toString() : found.append(BASE_32.charAt(held << 5 - bits & 31)).toString();
  }

  /** CRC-16/XMODEM. */
  private static int crc16(byte[] data, int length) {
    int crc = 0;
    for (int at = 0; at < length; at++) {
      crc ^= (data[at] & 0xff) << 8;
      for (int bit = 0; bit < 8; bit++) {
        crc = (crc & 0x8000) != 0 ? crc << 1 ^ 0x1021 : crc << 1;
      }
    }
    return crc & 0xffff;
  }
}
