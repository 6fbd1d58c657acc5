package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;

/**
 * What the answers of streams mean for the messages in flight: which are acked, when the others are sent again, and when
 * they are given up. The rules are those of `natslog.client.publisher`. Without clock and threads, as `InFlight`.
 */
final class Acking {
  private static final long MS_NS = 1_000_000;
  private static final long TICK_NS = 250 * MS_NS;
  private static final long RESEND_NS = 2_000 * MS_NS;
  private static final long RESEND_ANYWAY_NS = 10_000 * MS_NS; // although other messages are acked
  private static final long RESEND_REFUSED_NS = 100 * MS_NS;
  private static final long RESEND_REFUSED_AT_MOST_NS = 400 * MS_NS;
  private static final long GIVE_UP_REFUSED_NS = 1_000 * MS_NS;

  private final InFlight inFlight;
  private final List<String> streams;
  private final double timeoutS;
  private long progressNs; // of acks, or since when something waits
  private String refusal = "";
  private long refusedForGood = -1; // a message that would be refused again
  private boolean hasNoResponders;
  private long refusedNs;
  private long resendRefusedNs; // how long what is sent again waits while there are refusals; 0: there are none

  /**
   * @param streams each of which must ack each message; none: the first ack of any stream counts
   * @param timeoutS for how long messages wait without a single new ack
   */
  Acking(InFlight inFlight, List<String> streams, double timeoutS) {
    this.inFlight = inFlight;
    this.streams = streams;
    this.timeoutS = timeoutS;
  }

  /** The first message that waits was written. */
  void begin(long nowNs) {
    progressNs = nowNs;
  }

  /** How often `overdue` and `late` are to be asked. */
  long tickNs() {
    return resendRefusedNs > 0 ? RESEND_REFUSED_NS / 2 : TICK_NS;
  }

  /** Frames that are to be sent again now; empty where there are none. */
  byte[] late(long nowNs) {
    long afterNs = resendRefusedNs > 0 ? resendRefusedNs : RESEND_NS;
    boolean isStuck = nowNs - progressNs > Math.min(TICK_NS, afterNs);
    byte[] found = inFlight.late(nowNs - (isStuck ? afterNs : RESEND_ANYWAY_NS), nowNs);
    if (found.length > 0 && resendRefusedNs > 0) {
      resendRefusedNs = Math.min(2 * resendRefusedNs, RESEND_REFUSED_AT_MOST_NS);
    }
    return found;
  }

  /** Why what waits is given up, or null. */
  NatslogException overdue(long nowNs) {
    if (!inFlight.isEmpty() && nowNs - progressNs > 1e9 * timeoutS) {
      return failed(why(" within " + Broker.seconds(timeoutS)));
    }
    boolean isHopeless = nowNs - progressNs > GIVE_UP_REFUSED_NS && inFlight.waitsFor(refusedForGood);
    return isHopeless ? failed(why("")) : null;
  }

  static NatslogException failed(String message) {
    return new NatslogException("publish_failed", message, true, Map.of());
  }

  private String why(String within) {
    String head = inFlight.waiting() + " rows were not acked" + within + " (the first to subject '"
        + inFlight.firstSubject() + "'): ";
    if (!streams.isEmpty()) {
      head += "the ack of stream '" + streams.get(inFlight.firstMissingStream()) + "' is missing: ";
    }
    if (!refusal.isEmpty()) {
      return head + "the stream refused them: " + refusal;
    }
    return head + (hasNoResponders
        ? "no stream receives messages on that subject now: no stream records it, or its stream has no leader."
        : "no stream answered. Check that a broker is running and that a stream records the subject.");
  }

  /** An answer to the message of this number, with this payload. */
  void answered(long number, byte[] buffer, int payload, int payloadEnd, long nowNs) {
    long count = Ack.messages(buffer, payload, payloadEnd);
    if (count == 0) {
      refused(number, buffer, payload, payloadEnd, nowNs);
      return;
    }
    int stream = streams.isEmpty() ? 0 : Ack.stream(buffer, payload, payloadEnd, streams);
    if (stream >= 0 && inFlight.ack(stream, number, count)) {
      progressNs = nowNs;
      resendRefusedNs = nowNs - refusedNs > RESEND_NS ? 0 : resendRefusedNs;
    }
  }

  /** An empty answer is the server's "no responders"; any other one is the reason of a stream. */
  private void refused(long number, byte[] buffer, int payload, int payloadEnd, long nowNs) {
    refusedNs = nowNs;
    if (resendRefusedNs == 0) { // mostly a stream changes its leader: that is known at once, and soon over
      resendRefusedNs = RESEND_REFUSED_NS;
    }
    if (payload == payloadEnd) {
      hasNoResponders = true;
      return;
    }
    String text = new String(buffer, payload, payloadEnd - payload, StandardCharsets.UTF_8);
    JsonNode body = Json.parse(text);
    JsonNode error = body == null ? null : body.path("error");
    if (error == null || !error.path("description").isTextual()) {
      refusal = text.substring(0, Math.min(200, text.length()));
      return;
    }
    String stream = body.path("stream").asText(null);
    if (streams.isEmpty() || stream == null || streams.contains(stream)) {
      refusal = error.path("description").asText();
      int code = error.path("code").asInt();
      if (code >= 400 && code < 500 && code != 429) {
        refusedForGood = number;
      }
    }
  }
}
