package natslog;

import java.nio.charset.StandardCharsets;
import java.util.List;

/** Reads the acks of streams, as `natslog.wire.kernels_out.mark_acks` does. */
final class Ack {
  private static final byte[] SEQ = "\"seq\"".getBytes(StandardCharsets.US_ASCII);
  private static final byte[] ERROR = "\"error\":".getBytes(StandardCharsets.US_ASCII);
  private static final byte[] MESSAGES = "\"messages\":".getBytes(StandardCharsets.US_ASCII);
  private static final byte[] STREAM = "\"stream\":".getBytes(StandardCharsets.US_ASCII);

  private Ack() {}

  /** How many messages the payload is an ack for; 0 if it has no field `seq`, or one that is called `error`. */
  static long messages(byte[] data, int start, int end) {
    boolean isAck = false;
    long messages = 1;
    for (int at = start; at < end; at++) {
      if (data[at] != '"') {
        continue;
      }
      if (stands(SEQ, data, at, end)) {
        isAck = true;
      } else if (stands(ERROR, data, at, end)) {
        return 0;
      } else if (stands(MESSAGES, data, at, end)) {
        int digits = at + MESSAGES.length;
        int stop = digits;
        while (stop < end && data[stop] >= '0' && data[stop] <= '9') {
          stop++;
        }
        messages = Math.max(1, NatsConnection.number(data, digits, stop));
      }
    }
    return isAck ? messages : 0;
  }

  /** Which of the streams has sent it; -1 where none of them. */
  static int stream(byte[] data, int start, int end, List<String> streams) {
    int at = start;
    while (at < end && !stands(STREAM, data, at, end)) {
      at++;
    }
    at += STREAM.length;
    while (at < end && (data[at] == ' ' || data[at] == '"')) {
      at++;
    }
    int stop = at;
    while (stop < end && data[stop] != '"') {
      stop++;
    }
    return at >= end ? -1 : streams.indexOf(new String(data, at, stop - at, StandardCharsets.UTF_8));
  }

  private static boolean stands(byte[] text, byte[] data, int at, int end) {
    if (at + text.length > end) {
      return false;
    }
    for (int place = 0; place < text.length; place++) {
      if (data[at + place] != text[place]) {
        return false;
      }
    }
    return true;
  }
}
