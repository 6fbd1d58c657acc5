package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.sql.connector.read.streaming.Offset;

/**
 * The next offset to read of the stream with this id, as it stands in Spark's checkpoint; see
 * `pyspark_natslog.source.offsets`, which writes the same text.
 *
 * @param start where it began, if the stream joined the query with this position; else null
 * @param tasks number of the task and exclusive end of what it reads, ends rising; empty where one has all
 * @param epoch of the leader that stated that the messages before the offset are there; 0 where it is not known
 */
record Position(String id, long offset, Long start, List<Share> tasks, long epoch) {
  private static final int MOST_TASKS = 10_000_000;

  record Share(int task, long end) implements Serializable {}

  Position(String id, long offset, Long start) {
    this(id, offset, start, List.of(), 0);
  }

  Position with(List<Share> newTasks) {
    return new Position(id, offset, start, newTasks, epoch);
  }

  /** Positions by stream, with the text that Spark stores and compares. */
  static final class All extends Offset {
    final TreeMap<String, Position> byStream;

    All(Map<String, Position> positions) {
      byStream = new TreeMap<>(positions);
    }

    /** Of a checkpoint. */
    static All parse(String json) {
      JsonNode body = Json.parse(json);
      try {
        if (body == null || !body.isObject()) {
          throw new IllegalArgumentException();
        }
        Map<String, Position> found = new TreeMap<>();
        for (Iterator<Map.Entry<String, JsonNode>> fields = body.fields(); fields.hasNext(); ) {
          Map.Entry<String, JsonNode> one = fields.next();
          found.put(one.getKey(), position(one.getValue()));
        }
        return new All(found);
      } catch (IllegalArgumentException error) {
        throw NatslogException.config(
            "the checkpoint contains " + json + ", which is not an offset of natslog: it belongs to another query; set "
                + "another checkpointLocation");
      }
    }

    private static Position position(JsonNode at) {
      if (!at.isObject() || !at.path("id").isTextual() || !(at.path("tasks").isArray() || !at.has("tasks"))) {
        throw new IllegalArgumentException();
      }
      List<Share> tasks = new ArrayList<>();
      for (JsonNode share : at.path("tasks")) {
        if (share.size() != 2) {
          throw new IllegalArgumentException();
        }
        long task = whole(share.get(0));
        if (task >= MOST_TASKS) {
          throw new IllegalArgumentException();
        }
        tasks.add(new Share((int) task, whole(share.get(1))));
      }
      boolean hasStart = at.has("start") && !at.get("start").isNull();
      return new Position(at.get("id").asText(), whole(at.get("offset")),
          hasStart ? Long.valueOf(whole(at.get("start"))) : null, tasks,
          at.has("epoch") ? whole(at.get("epoch")) : 0);
    }

    private static long whole(JsonNode value) {
      if (value == null || !value.isIntegralNumber() || !value.canConvertToLong() || value.asLong() < 0) {
        throw new IllegalArgumentException();
      }
      return value.asLong();
    }

    @Override
    public String json() {
      return Json.text(node()).replace(":", ": ").replace(",", ", ");
    }

    private ObjectNode node() {
      ObjectNode found = JsonNodeFactory.instance.objectNode();
      byStream.forEach((name, at) -> found.set(name, at.node()));
      return found;
    }
  }

  private ObjectNode node() {
    ObjectNode body = JsonNodeFactory.instance.objectNode();
    body.put("id", id).put("offset", offset);
    if (epoch > 0) {
      body.put("epoch", epoch);
    }
    if (start != null) {
      body.put("start", start);
    }
    if (!tasks.isEmpty()) {
      ArrayNode shares = body.putArray("tasks");
      tasks.forEach(share -> shares.addArray().add(share.task).add(share.end));
    }
    return body;
  }
}
