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
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.spark.sql.connector.read.streaming.Offset;

/**
 * The next offset to read of the stream with this id, as it stands in Spark's checkpoint; see
 * `pyspark_natslog.source.offsets`, which writes the same text.
 *
 * @param start where it began, if the stream joined the query with this position; else null
 * @param tasks number of the task and exclusive end of what it reads, ends rising; empty where one has all
 * @param epoch of the leader that stated that the messages before the offset are there; 0 where it is not known
 * @param passed where several readers shared the stream, how far each of them had come: sets of shares, of which some
 *     were read further than the offset
 */
record Position(String id, long offset, Long start, List<Share> tasks, long epoch, List<Passed> passed)
    implements Serializable {
  private static final int MOST_TASKS = 10_000_000;

  record Share(int task, long end) implements Serializable {}

  /** Of each share, by `subject` or `key`, the offset below which all of its rows were read. */
  record Passed(String by, List<Long> ends) implements Serializable {
    long most() {
      return ends.stream().mapToLong(Long::longValue).max().orElse(0);
    }
  }

  Position(String id, long offset, Long start) {
    this(id, offset, start, List.of(), 0, List.of());
  }

  Position with(List<Share> newTasks) {
    return new Position(id, offset, start, newTasks, epoch, passed);
  }

  /** What matters still for who has read up to there. */
  List<Passed> passedSets(long upto) {
    return passed.stream().filter(one -> one.most() > upto).toList();
  }

  /** The same as requests have it, with further sets; null: nothing. */
  String passedBeyond(long upto, List<Passed> more) {
    String text = Stream.concat(passed.stream(), more.stream()).filter(one -> one.most() > upto)
        .map(one -> one.by + ":" + String.join(",", one.ends.stream().map(String::valueOf).toList()))
        .collect(Collectors.joining(";"));
    return text.isEmpty() ? null : text;
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
          at.has("epoch") ? whole(at.get("epoch")) : 0, passed(at.path("passed")));
    }

    private static List<Passed> passed(JsonNode sets) {
      List<Passed> found = new ArrayList<>();
      for (JsonNode one : sets) {
        List<Long> ends = new ArrayList<>();
        one.path("ends").forEach(end -> ends.add(whole(end)));
        if (ends.isEmpty() || !List.of("subject", "key").contains(one.path("by").asText())) {
          throw new IllegalArgumentException();
        }
        found.add(new Passed(one.get("by").asText(), ends));
      }
      return found;
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
    if (!passed.isEmpty()) {
      ArrayNode sets = body.putArray("passed");
      passed.forEach(one -> {
        ArrayNode ends = sets.addObject().put("by", one.by).putArray("ends");
        one.ends.forEach(ends::add);
      });
    }
    return body;
  }
}
