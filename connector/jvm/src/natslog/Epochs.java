package natslog;

import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

/**
 * The highest leader epoch that was received for each stream, of all clients of this process: a statement about a
 * stream's bounds from an older one is outdated. One that no broker has confirmed for ten minutes is removed, because a
 * cluster that was restored from a backup starts with older epochs.
 */
final class Epochs {
  private record Seen(long epoch, long atNs) {}

  private static final long REMEMBERED_NS = 600L * 1_000_000_000;
  private static final int MOST_STREAMS = 100_000;
  private static final Map<String, Seen> SEEN = new ConcurrentHashMap<>();

  private Epochs() {}

  /** 0 where none is known. */
  static long highest(String streamId) {
    Seen seen = SEEN.get(streamId);
    return seen == null || System.nanoTime() - seen.atNs >= REMEMBERED_NS ? 0 : seen.epoch;
  }

  /** Whether this is the newest known epoch of the stream; it is stored if it is. */
  static boolean note(String streamId, long epoch) {
    boolean isNewest = epoch >= highest(streamId);
    if (isNewest && epoch > 0) {
      if (SEEN.size() >= MOST_STREAMS && !SEEN.containsKey(streamId)) {
        SEEN.remove(SEEN.keySet().iterator().next());
      }
      SEEN.put(streamId, new Seen(epoch, System.nanoTime()));
    }
    return isNewest;
  }

  /** The next epoch that is stated is accepted, also an older one. */
  static void forget(String streamId) {
    SEEN.remove(streamId);
  }

  /** Why a statement must not be used; null if it may be, or names no epoch. */
  static NatslogException outdated(Object streamId, Object epoch) {
    if (!(streamId instanceof String id) || !(epoch instanceof Long number) || note(id, number)) {
      return null;
    }
    return NatslogException.outdated(
        "the response is from leader epoch " + number + ", but epoch " + highest(id) + " of this stream was already "
            + "received: the stream has another leader now",
        Map.of("id", id, "leader_epoch", number));
  }
}
