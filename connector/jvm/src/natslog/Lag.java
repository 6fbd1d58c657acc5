package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * How far a query is behind, for the progress that Spark reports; as `pyspark_natslog.source.lag`.
 *
 * <p>Rows are a difference of offsets. Bytes and seconds come from a broker, by one request for all streams, only if
 * rows wait. Invariant: the report never fails, and never waits longer than `WAIT_S`. After a failure or a slow answer
 * no request is made for `PAUSE_S`, and what is not known is null.
 */
final class Lag {
  /** The unread part of a stream; null: unknown. */
  record Behind(long rows, Long bytes, Double seconds) {}

  private static final Logger LOG = LoggerFactory.getLogger("natslog.source");
  private static final double WAIT_S = 0.1;
  private static final double ASK_WITHIN_S = 2;
  private static final double PAUSE_S = 5;
  private static final double LOG_EVERY_S = 60;

  private final Broker broker;
  private CompletableFuture<JsonNode> underWay;
  private long pausedUntilNs = System.nanoTime();
  private long loggedUntilNs = System.nanoTime();

  Lag(Settings settings) {
    this.broker = Broker.brief(settings, ASK_WITHIN_S);
  }

  /** Of a reader at `end`, by stream. */
  Map<String, Behind> of(Map<String, StreamState> latest, Map<String, Position> end) {
    Map<String, Long> rows = new TreeMap<>();
    ObjectNode positions = JsonNodeFactory.instance.objectNode();
    for (StreamState state : latest.values()) {
      Position at = end.get(state.name());
      long reached = at != null && at.id().equals(state.id()) ? at.offset() : 0;
      rows.put(state.name(), Math.max(0, state.end() - reached));
      if (state.end() > reached) {
        positions.put(state.name(), reached);
      }
    }
    JsonNode stated = positions.isEmpty() ? positions : ask(positions);
    Map<String, Behind> found = new TreeMap<>();
    rows.forEach((name, count) -> {
      JsonNode lag = stated.path(name);
      // The broker computed it a little later, and excludes what retention and damage have removed.
      long behind = lag.path("rows").isIntegralNumber() ? Math.min(count, lag.get("rows").asLong()) : count;
      found.put(name, count == 0 ? new Behind(0, 0L, 0.0) : new Behind(behind,
          lag.path("bytes").isNumber() ? Long.valueOf(lag.get("bytes").asLong()) : null,
          lag.path("seconds").isNumber() ? Double.valueOf(lag.get("seconds").asDouble()) : null));
    });
    return found;
  }

  /** Makes the request beside the query, which does not wait for a slow one. */
  private JsonNode ask(ObjectNode positions) {
    boolean isBusy = underWay != null && !underWay.isDone();
    if (isBusy || System.nanoTime() - pausedUntilNs < 0) {
      return JsonNodeFactory.instance.objectNode();
    }
    underWay = CompletableFuture.supplyAsync(
        () -> broker.post("/v1/lags", positions, List.of(), 0, Broker.Answer::outdated));
    try {
      return underWay.get((long) (1000 * WAIT_S), TimeUnit.MILLISECONDS);
    } catch (TimeoutException error) {
      pause("no answer within " + (long) (1000 * WAIT_S) + " ms");
    } catch (ExecutionException error) { // a query must not fail because of a report
      pause(String.valueOf(error.getCause()));
    } catch (InterruptedException error) {
      throw Broker.interrupted();
    }
    return JsonNodeFactory.instance.objectNode();
  }

  private void pause(String why) {
    long now = System.nanoTime();
    pausedUntilNs = now + (long) (1e9 * PAUSE_S);
    if (now - loggedUntilNs >= 0) {
      loggedUntilNs = now + (long) (1e9 * LOG_EVERY_S);
      LOG.warn("bytesBehind and secondsBehind are unknown for {} s; the query continues: {}", (long) PAUSE_S, why);
    }
  }
}
