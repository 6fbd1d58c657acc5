package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.function.Predicate;
import java.util.function.Supplier;

/**
 * A stream as its leader describes it: offsets `[start, end)` can be read.
 *
 * @param epoch of the leader; 0 where the broker did not state it
 * @param lineage of each stream that this one was restored from: up to which offset its positions are valid here
 */
record StreamState(String name, String id, long start, long end, long epoch, Map<String, Long> lineage)
    implements Serializable {
  private static final double PERSISTS_S = 2;
  private static final double AGAIN_S = 0.25;

  /** Up to which offset positions in the stream of this id are valid here; null: they are not. */
  Long validTo(String streamId) {
    return streamId.equals(id) ? Long.valueOf(1L << 62) : lineage.get(streamId);
  }

  private static StreamState of(JsonNode body) {
    Map<String, Long> lineage = new HashMap<>();
    for (JsonNode fork : body.path("lineage")) {
      if (fork.path("id").isTextual() && fork.path("offset").isIntegralNumber()) {
        lineage.put(fork.get("id").asText(), fork.get("offset").asLong());
      }
    }
    if (!body.path("name").isTextual() || !body.path("id").isTextual()) {
      throw new NatslogException("internal",
          "the description of a stream has unexpected contents: check that the URL is that of a natslog broker", false,
          Map.of());
    }
    return new StreamState(body.get("name").asText(), body.get("id").asText(),
        body.path("log_start_offset").asLong(), body.path("high_watermark").asLong(),
        body.path("leader_epoch").asLong(0), lineage);
  }

  /** As a plan states it. */
  static StreamState planned(String name, JsonNode body) {
    Map<String, Long> lineage = new HashMap<>();
    body.path("lineage").fields().forEachRemaining(one -> lineage.put(one.getKey(), one.getValue().asLong()));
    return new StreamState(name, body.path("id").asText(), body.path("log_start_offset").asLong(),
        body.path("high_watermark").asLong(), body.path("leader_epoch").asLong(0), lineage);
  }

  static NatslogException outdated(JsonNode body) {
    return Epochs.outdated(body.path("id").asText(null), body.path("leader_epoch").asLong(0));
  }

  /** All streams that the options select and that exist now, by name. */
  static Map<String, StreamState> selected(Broker broker, Settings settings) {
    return selected(broker, selection(settings), Map.of(), 0);
  }

  /** As requests state it. */
  static Map<String, Object> selection(Settings settings) {
    return settings.pattern != null ? Map.of("pattern", settings.pattern)
        : settings.group != null ? Map.of("group", settings.group) : Map.of("streams", settings.names);
  }

  /** Id and end of each, as requests state them. */
  static Map<String, Object> known(Map<String, StreamState> seen) {
    Map<String, Object> known = new TreeMap<>();
    seen.forEach((name, state) -> known.put(name, List.of(state.id, state.end)));
    return known;
  }

  /** Waits for a stream that has no leader at the moment; for `waitMs` until something differs from what was seen. */
  static Map<String, StreamState> selected(
      Broker broker, Map<String, Object> selection, Map<String, StreamState> seen, long waitMs) {
    Map<String, Object> body = new LinkedHashMap<>(selection);
    if (waitMs > 0) {
      body.put("seen", known(seen));
      body.put("wait_ms", waitMs);
    }
    JsonNode listed = broker.post("/v1/positions", body, List.of(), waitMs / 1000.0, StreamState::unlessCurrent);
    Map<String, StreamState> found = new TreeMap<>();
    for (JsonNode one : listed) {
      String name = one.path("name").asText();
      try {
        boolean isStated = one.has("high_watermark") && outdated(one) == null;
        found.put(name, isStated ? of(one) : position(broker, name));
      } catch (NatslogException error) {
        if (!error.is("stream_not_found")) { // deleted since: the caller distinguishes
          throw error;
        }
      }
    }
    return found;
  }

  static NatslogException unlessCurrent(Broker.Answer answer) {
    boolean isCurrent = !"false".equals(answer.header().apply("Natslog-Current"));
    return isCurrent ? null : new NatslogException("metadata_unavailable",
        "the broker has no session with the metadata leader: its list may be outdated", true, Map.of());
  }

  private static String path(String name) {
    return "/v1/streams/" + Broker.inPath(name);
  }

  /** Waits for a leader that is being chosen. */
  static StreamState position(Broker broker, String name) {
    NatslogException[] problem = new NatslogException[1];
    JsonNode[] body = new JsonNode[1];
    try {
      broker.ask("GET", path(name), Map.of(), null, List.of(), 0, answer -> {
        body[0] = Json.parse(answer.text());
        if (body[0] == null) {
          return NatslogException.corruptAnswer("the description of stream " + name + " is not JSON");
        }
        problem[0] = body[0].has("high_watermark")
            ? outdated(body[0]) : Broker.errorIn(body[0].path("problem"));
        return problem[0];
      });
      return of(body[0]);
    } catch (NatslogException error) {
      throw error.is("broker_unavailable") && problem[0] != null ? problem[0] : error;
    }
  }

  /** By the newest leader of all that respond; null if there is no such stream. */
  static StreamState newest(Broker broker, String name) {
    List<JsonNode> stated = new ArrayList<>();
    for (JsonNode one : broker.ofEach(path(name))) {
      if (one.has("high_watermark") && outdated(one) == null) {
        stated.add(one);
      }
    }
    if (!stated.isEmpty()) {
      stated.sort(Comparator.comparingLong(one -> one.path("leader_epoch").asLong(0)));
      return of(stated.get(stated.size() - 1));
    }
    try {
      return position(broker, name);
    } catch (NatslogException error) {
      if (error.is("stream_not_found")) {
        return null;
      }
      throw error;
    }
  }

  /** The first answer that shows no loss, or the last one after two seconds in which all showed one. */
  static <T> T confirmed(Supplier<T> ask, Predicate<T> isLoss) {
    long until = System.nanoTime() + (long) (PERSISTS_S * 1e9);
    T state = ask.get();
    while (isLoss.test(state) && System.nanoTime() < until) {
      Broker.pause(AGAIN_S);
      state = ask.get();
    }
    return state;
  }
}
