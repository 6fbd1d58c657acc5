package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Comparator;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/** Plans of brokers (`POST /v1/plans`), with losses that are confirmed; as `pyspark_natslog.source.read_plans`. */
final class ReadPlans {
  /** Offsets `[start, end)` that cannot be read; `end` null where it is not known. `why`: as in `/openapi.json`. */
  record Lost(long start, Long end, String why) {}

  /** A stream, and its offsets `[start, end)` that are read now; `rows` wait, read now or not (null: unknown). */
  record Stream(StreamState state, long start, long end, Long rows, List<Lost> lost) {
    long waitingRows() {
      return rows == null ? state.end() - start : rows;
    }

    /** Rather than to pass over removed offsets only. */
    boolean tookRows() {
      return end > start && (rows == null || rows != 0);
    }
  }

  /** `others`: whether streams with a position that are not selected exist: `exists` or `deleted`. */
  record Plan(Map<String, Stream> streams, Map<String, String> others, List<List<Range>> tasks) {
    List<String> lossy(Collection<String> ignored) {
      List<String> found = new ArrayList<>();
      streams.forEach((name, one) -> {
        if (!one.lost.isEmpty()) {
          found.add(name);
        }
      });
      others.forEach((name, state) -> {
        if (state.equals("deleted") && !ignored.contains(name)) {
          found.add(name);
        }
      });
      return found;
    }
  }

  /**
   * Where a reader continues in the stream with this id.
   *
   * @param end of the range that is to be read; null: all that the limits allow
   * @param isOpen whether it begins where the log did, so that what was removed since is not lost
   * @param tasks of a batch that is planned again: how it was divided
   */
  record From(String id, long start, Long end, boolean isOpen, List<Position.Share> tasks) {
    private Map<String, Object> body() {
      Map<String, Object> body = new HashMap<>();
      body.put("id", id);
      body.put("start", start);
      body.put("end", end);
      body.put("is_open", isOpen);
      body.put("tasks", tasks.stream().map(share -> List.of(share.task(), share.end())).toList());
      return body;
    }
  }

  /**
   * What is read next.
   *
   * @param selection of streams: `streams`, `pattern` or `group`
   * @param positions in the order in which streams get a part of a limit that is too small for all
   * @param ends what streams are not read beyond; null: there is no such limit, and new streams are read
   * @param limits `min_rows`, `max_rows`, `max_bytes` of the whole read
   * @param isRepeated whether the tasks are those of the positions
   * @param seen the streams as the reader has them; the answer waits for `waitMs` until one of them differs
   */
  record Asked(Map<String, Object> selection, Map<String, From> positions, Map<String, Position> ends,
      Map<String, Long> limits, boolean isRepeated, Map<String, StreamState> seen, long waitMs) {
    /** Of these positions only. */
    static Asked of(Map<String, From> positions, boolean isRepeated) {
      Map<String, Object> selection = Map.of("streams", positions.keySet());
      return new Asked(selection, positions, null, Map.of(), isRepeated, Map.of(), 0);
    }

    Asked withoutWait() {
      return new Asked(selection, positions, ends, limits, isRepeated, Map.of(), 0);
    }

    boolean isPlanned(String stream) {
      return ends == null || positions.containsKey(stream) || ends.containsKey(stream);
    }

    private Map<String, Object> body(Map<String, Object> tasks) {
      Map<String, Object> body = new HashMap<>(selection);
      Map<String, Object> from = new LinkedHashMap<>();
      positions.forEach((name, at) -> from.put(name, at.body()));
      Map<String, Object> upto = new HashMap<>();
      (ends == null ? Map.<String, Position>of() : ends)
          .forEach((name, at) -> upto.put(name, List.of(at.id(), at.offset())));
      body.put("positions", from);
      body.put("ends", upto);
      body.put("with_new", ends == null);
      body.put("limits", limits);
      body.put("tasks", tasks);
      body.put("is_repeated", isRepeated);
      body.put("seen", StreamState.known(seen));
      body.put("wait_ms", waitMs);
      return body;
    }
  }

  private static final long USUAL_ROW_BYTES = 128;

  private final Broker broker;
  private final Settings settings;
  private final OlderBrokers older;

  ReadPlans(Broker broker, Settings settings) {
    this.broker = broker;
    this.settings = settings;
    this.older = new OlderBrokers(broker, settings);
  }

  /**
   * The plan. Something that it states as lost is lost only if the newest leader has confirmed it for some time.
   *
   * @param ignored streams with a position that may be missing
   */
  Plan planned(Asked asked, Collection<String> ignored) {
    List<Asked> first = new ArrayList<>(List.of(asked));
    return StreamState.confirmed(() -> {
      Plan plan = plan(first.isEmpty() ? asked.withoutWait() : first.remove(0));
      List<String> lossy = plan.lossy(ignored);
      lossy.forEach(name -> StreamState.newest(broker, name)); // afterwards, older leaders are ignored
      return lossy.isEmpty() ? plan : plan(asked.withoutWait());
    }, plan -> !plan.lossy(ignored).isEmpty());
  }

  private Plan plan(Asked asked) {
    if (older.areAsked()) {
      return older.plan(asked);
    }
    try {
      return requested(asked);
    } catch (NatslogException error) {
      if (!error.is("not_found", "payload_too_large")) {
        throw error;
      }
      older.note();
      return older.plan(asked);
    }
  }

  private Plan requested(Asked asked) {
    NatslogException[] problem = new NatslogException[1];
    JsonNode[] body = new JsonNode[1];
    String text = Json.text(asked.body(taskLimits()));
    try {
      broker.ask("POST", "/v1/plans", Map.of(), Broker.Content.json(text), List.of(), asked.waitMs / 1000.0, answer -> {
        NatslogException outdated = StreamState.unlessCurrent(answer);
        body[0] = Json.parse(answer.text());
        problem[0] = problemIn(body[0]);
        return outdated != null || asked.waitMs > 0 ? outdated : problem[0];
      });
    } catch (NatslogException error) {
      throw error.is("broker_unavailable") && problem[0] != null ? problem[0] : error;
    }
    // the wait has ended: it is not repeated with the request
    return problem[0] == null ? parsed(body[0], asked) : requested(asked.withoutWait());
  }

  private Map<String, Object> taskLimits() {
    Map<String, Object> found = new HashMap<>();
    found.put("cores", Tasks.cores());
    found.put("min_tasks", settings.minTasks);
    found.put("max_rows", settings.taskRows);
    found.put("usual_bytes", settings.usualTaskBytes);
    found.put("max_bytes", settings.mostTaskBytes);
    found.put("read_from", settings.readFrom);
    found.put("rack", settings.rack);
    return found;
  }

  private static NatslogException problemIn(JsonNode body) {
    if (body == null || !body.path("streams").isObject()) {
      return NatslogException.corruptAnswer("the plan of a read has unexpected contents");
    }
    if (body.path("problem").isObject()) {
      return Broker.errorIn(body.get("problem"));
    }
    for (JsonNode stream : body.get("streams")) {
      NatslogException outdated = StreamState.outdated(stream);
      if (outdated != null) {
        return outdated;
      }
    }
    return null;
  }

  private static Plan parsed(JsonNode body, Asked asked) {
    Map<String, Stream> streams = new TreeMap<>();
    body.get("streams").fields().forEachRemaining(one -> {
      List<Lost> lost = new ArrayList<>();
      for (JsonNode part : one.getValue().path("lost")) {
        lost.add(new Lost(part.path("start").asLong(), whole(part.path("end")), part.path("why").asText()));
      }
      JsonNode stream = one.getValue();
      streams.put(one.getKey(), new Stream(StreamState.planned(one.getKey(), stream), stream.path("start").asLong(),
          stream.path("end").asLong(), whole(stream.path("rows")), lost));
    });
    Map<String, String> others = new HashMap<>();
    body.path("others").fields().forEachRemaining(one -> others.put(one.getKey(), one.getValue().asText()));
    List<List<Range>> tasks = new ArrayList<>();
    for (JsonNode task : body.path("tasks")) {
      List<Range> ranges = new ArrayList<>();
      for (JsonNode part : task) {
        String name = part.path("stream").asText();
        String id = streams.get(name).state.id();
        From from = asked.positions.get(name);
        ranges.add(range(part, name, id, from == null || (from.isOpen && from.id.equals(id))));
      }
      tasks.add(ranges);
    }
    return new Plan(streams, others, tasks);
  }

  /** A part as brokers state it. */
  static Range range(JsonNode part, String stream, String id, boolean isOpen) {
    List<String> urls = new ArrayList<>();
    part.path("urls").forEach(url -> urls.add(url.asText()));
    long start = part.path("start").asLong(-1);
    long end = part.path("end").asLong(-1);
    Long bytes = whole(part.path("bytes"));
    long size = bytes == null ? (end - start) * USUAL_ROW_BYTES : bytes;
    return new Range(stream, id, start, end, urls, size, Epochs.highest(id), isOpen, null);
  }

  private static Long whole(JsonNode value) {
    return value.isIntegralNumber() ? Long.valueOf(value.asLong()) : null;
  }

  /** How the tasks share each stream's range; nothing if one task reads everything. */
  static Map<String, List<Position.Share>> shares(List<List<Range>> tasks) {
    Map<String, List<Position.Share>> shares = new TreeMap<>();
    for (int number = 0; tasks.size() > 1 && number < tasks.size(); number++) {
      for (Range one : tasks.get(number)) {
        shares.computeIfAbsent(one.stream(), name -> new ArrayList<>()).add(new Position.Share(number, one.end()));
      }
    }
    shares.replaceAll((stream, ends) -> {
      ends.sort(Comparator.comparingLong(Position.Share::end));
      List<Position.Share> lastOfRuns = new ArrayList<>();
      for (int at = 0; at < ends.size(); at++) {
        if (at + 1 == ends.size() || ends.get(at + 1).task() != ends.get(at).task()) {
          lastOfRuns.add(ends.get(at));
        }
      }
      return lastOfRuns;
    });
    return shares;
  }
}
