package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/**
 * From ranges of streams to tasks: cut on batch boundaries by bytes, rows and count, evened out, and packed, by the same
 * rules as `pyspark_natslog.source.splits`. A task is a list of ranges.
 */
final class Planner {
  private static final long WORTH_ROWS = 64 * 1024;
  private static final long WORTH_BYTES = 8L * 1024 * 1024;
  private static final long USUAL_ROW_BYTES = WORTH_BYTES / WORTH_ROWS;
  private static final int ROUNDS = 2;
  private static final int OUTDATED_ANSWERS = 20;

  private final Broker broker;
  private final Settings settings;

  Planner(Broker broker, Settings settings) {
    this.broker = broker;
    this.settings = settings;
  }

  /** Tasks that cover each range once. */
  List<List<Range>> tasks(List<Range> ranges, int cores) {
    List<Range> wanted = ranges.stream().filter(one -> one.rows() > 0).toList();
    if (wanted.isEmpty()) {
      return List.of();
    }
    List<List<Range>> pieces = cutAll(wanted, List.of());
    int count = taskCount(pieces, cores);
    return pack(cutFiner(pieces, count).stream().flatMap(List::stream).toList(), count);
  }

  /** How the tasks share each stream's range; nothing if one task reads everything. */
  static Map<String, List<Position.Share>> shares(List<List<Range>> tasks) {
    Map<String, List<Position.Share>> shares = new TreeMap<>();
    for (int number = 0; tasks.size() > 1 && number < tasks.size(); number++) {
      for (Range one : tasks.get(number)) {
        shares.computeIfAbsent(one.stream(), name -> new ArrayList<>()).add(new Position.Share(number, one.end()));
      }
    }
    for (Map.Entry<String, List<Position.Share>> one : shares.entrySet()) {
      List<Position.Share> ends = one.getValue();
      ends.sort(Comparator.comparingLong(Position.Share::end));
      List<Position.Share> lastOfRuns = new ArrayList<>();
      for (int at = 0; at < ends.size(); at++) {
        if (at + 1 == ends.size() || ends.get(at + 1).task() != ends.get(at).task()) {
          lastOfRuns.add(ends.get(at));
        }
      }
      one.setValue(lastOfRuns);
    }
    return shares;
  }

  /** The tasks as of a batch's first plan: each has the same rows in the same order, without rows lost since. */
  List<List<Range>> tasksAgain(List<Range> ranges, Map<String, List<Position.Share>> numbered) {
    List<List<Position.Share>> shares = new ArrayList<>();
    List<Integer> counts = new ArrayList<>();
    int count = 1;
    for (Range whole : ranges) {
      List<Position.Share> share = numbered.getOrDefault(whole.stream(), List.of());
      shares.add(share.isEmpty() ? List.of(new Position.Share(0, whole.end())) : share);
      counts.add(Math.max(1, share.size()));
    }
    for (List<Position.Share> share : numbered.values()) {
      for (Position.Share one : share) {
        count = Math.max(count, one.task() + 1);
      }
    }
    List<List<Range>> tasks = new ArrayList<>();
    for (int at = 0; at < count; at++) {
      tasks.add(new ArrayList<>());
    }
    List<List<Range>> cut = cutAll(ranges, counts);
    for (int at = 0; at < cut.size(); at++) {
      for (Range piece : cut.get(at)) {
        long start = piece.start();
        for (Position.Share share : shares.get(at)) {
          long end = Math.min(share.end(), piece.end());
          if (start < end) {
            tasks.get(share.task()).add(piece.within(start, end));
            start = end;
          }
        }
      }
    }
    tasks.forEach(task -> task.sort(Comparator.comparing(Range::stream).thenComparingLong(Range::start)));
    return tasks;
  }

  // ---- cutting ----

  /** Each range in parts that the options allow: several of them by one request for each broker that has some. */
  private List<List<Range>> cutAll(List<Range> ranges, List<Integer> minSplits) {
    Map<String, List<Range>> found = ranges.size() > 1 ? cutTogether(ranges, minSplits) : Map.of();
    List<List<Range>> cut = new ArrayList<>();
    for (int at = 0; at < ranges.size(); at++) {
      List<Range> known = found.get(ranges.get(at).stream());
      cut.add(known != null ? known : cut(ranges.get(at), minSplits.isEmpty() ? 1 : minSplits.get(at)));
    }
    return cut;
  }

  private Map<String, List<Range>> cutTogether(List<Range> ranges, List<Integer> minSplits) {
    Map<String, Range> wanted = new LinkedHashMap<>();
    Map<String, Object> asked = new LinkedHashMap<>();
    for (int at = 0; at < ranges.size(); at++) {
      Range one = ranges.get(at);
      wanted.put(one.stream(), one);
      asked.put(one.stream(), Map.of("stream", one.stream(), "id", one.id(), "start", one.start(), "end", one.end(),
          "min_splits", minSplits.isEmpty() ? 1 : minSplits.get(at)));
    }
    Map<String, List<Range>> found = new HashMap<>();
    List<String> urls = new ArrayList<>(List.of(""));
    List<String> done = new ArrayList<>();
    while (!wanted.isEmpty() && !urls.isEmpty()) {
      String url = urls.remove(urls.size() - 1);
      done.add(url);
      Map<String, Object> body = new LinkedHashMap<>(limits());
      body.put("ranges", wanted.keySet().stream().map(asked::get).toList());
      JsonNode answer;
      try {
        answer = broker.post("/v1/splits", body, url.isEmpty() ? List.of() : List.of(url), 0, unused -> null);
      } catch (NatslogException error) {
        if (error.is("not_found", "payload_too_large")) {
          break; // each is cut by a request of its own
        }
        throw error;
      }
      answer.path("splits").fields().forEachRemaining(one -> {
        Range whole = wanted.get(one.getKey());
        List<Range> pieces = whole == null ? List.of() : pieces(whole, one.getValue());
        if (!pieces.isEmpty()) {
          found.put(one.getKey(), pieces);
          wanted.remove(one.getKey());
        }
      });
      answer.path("elsewhere").fieldNames().forEachRemaining(other -> {
        if (!done.contains(other) && Broker.originOf(other) != null) {
          urls.add(0, other);
        }
      });
    }
    return found;
  }

  private Map<String, Object> limits() {
    Map<String, Object> found = new LinkedHashMap<>();
    found.put("max_bytes", settings.mostTaskBytes);
    if (settings.taskRows != null) {
      found.put("max_rows", settings.taskRows);
    }
    found.put("read_from", settings.readFrom);
    if (settings.rack != null) {
      found.put("rack", settings.rack);
    }
    return found;
  }

  /** The range in parts that the options allow, without lost rows. */
  private List<Range> cut(Range whole, int minSplits) {
    long start = whole.start();
    long end = whole.end();
    for (int tries = 0; start < end; ) {
      Map<String, Object> query = new LinkedHashMap<>(limits());
      query.put("start", start);
      query.put("end", end);
      query.put("min_splits", minSplits);
      try {
        JsonNode splits = broker.get("/v1/streams/" + Broker.inPath(whole.stream()) + "/splits", query);
        List<Range> found = pieces(whole.within(start, end), splits);
        if (found.isEmpty()) {
          throw NatslogException.corruptAnswer("stream '" + whole.stream() + "': the splits do not cover the range");
        }
        return found;
      } catch (NatslogException error) {
        if (!error.is("offset_out_of_range", "stream_not_found")) {
          throw error;
        }
        long first = whole.leftFrom(start, end, error);
        if (first > start) {
          start = first;
          continue;
        }
        long[] left = Loss.leftOf(broker, settings, whole.stream(), whole.id(), start, end, error);
        if (left[0] == start && left[1] == end) {
          if (++tries > OUTDATED_ANSWERS) {
            throw error;
          }
          Broker.pause(0.25);
        }
        start = left[0];
        end = left[1];
      }
    }
    return List.of();
  }

  /** Nothing if the splits do not cover the range. */
  private static List<Range> pieces(Range whole, JsonNode splits) {
    List<Range> found = new ArrayList<>();
    long epoch = Epochs.highest(whole.id());
    long at = whole.start();
    for (JsonNode split : splits) {
      long start = split.path("start").asLong(-1);
      long end = split.path("end").asLong(-1);
      if (start != at || end <= start) {
        return List.of();
      }
      List<String> urls = new ArrayList<>();
      split.path("urls").forEach(url -> urls.add(url.asText()));
      long bytes = split.path("bytes").isIntegralNumber()
          ? split.get("bytes").asLong() : (end - start) * USUAL_ROW_BYTES;
      found.add(new Range(whole.stream(), whole.id(), start, end, urls, bytes, epoch, whole.isOpen()));
      at = end;
    }
    return at == whole.end() ? found : List.of();
  }

  private static long bytes(List<Range> pieces) {
    return pieces.stream().mapToLong(Range::bytes).sum();
  }

  private static long ratio(long one, long other) {
    return (one + other - 1) / other;
  }

  /** How many tasks there should be, if there are rows for each. */
  private int taskCount(List<List<Range>> pieces, int cores) {
    if (settings.minTasks != null) {
      return (int) Math.min(settings.minTasks, Integer.MAX_VALUE);
    }
    long rows = pieces.stream().flatMap(List::stream).mapToLong(Range::rows).sum();
    long bytes = pieces.stream().mapToLong(Planner::bytes).sum();
    if (rows < WORTH_ROWS && bytes < WORTH_BYTES) {
      return 1;
    }
    long taskBytes =
        Math.min(settings.mostTaskBytes, Math.max(settings.usualTaskBytes, ratio(bytes, (long) ROUNDS * cores)));
    return (int) Math.max(1, ratio(ratio(bytes, taskBytes), cores)) * cores;
  }

  /** The ranges that have more than their share of all bytes, cut into more parts, so that all are about equal. */
  private List<List<Range>> cutFiner(List<List<Range>> pieces, int wanted) {
    long total = Math.max(1, pieces.stream().mapToLong(Planner::bytes).sum());
    List<Range> wholes = new ArrayList<>();
    List<Integer> counts = new ArrayList<>();
    List<Integer> places = new ArrayList<>();
    for (int at = 0; at < pieces.size(); at++) {
      List<Range> cut = pieces.get(at);
      int share = (int) ratio(wanted * bytes(cut), total);
      if (!cut.isEmpty() && share > cut.size()) {
        Range first = cut.get(0);
        wholes.add(new Range(first.stream(), first.id(), first.start(), cut.get(cut.size() - 1).end(), first.isOpen()));
        counts.add(share);
        places.add(at);
      }
    }
    List<List<Range>> found = new ArrayList<>(pieces);
    List<List<Range>> finer = cutAll(wholes, counts);
    for (int at = 0; at < finer.size(); at++) {
      found.set(places.get(at), finer.get(at));
    }
    return found;
  }

  /** At least `wanted` tasks if there are as many pieces, of about equal size. */
  private List<List<Range>> pack(List<Range> pieces, int wanted) {
    List<List<Range>> bins = new ArrayList<>();
    for (int at = 0; at < Math.min(wanted, pieces.size()); at++) {
      bins.add(new ArrayList<>());
    }
    List<Range> largestFirst = new ArrayList<>(pieces);
    largestFirst.sort(Comparator.comparingLong(one -> -one.bytes()));
    for (Range piece : largestFirst) {
      List<Range> smallest = bins.get(0);
      for (List<Range> bin : bins) {
        if (bytes(bin) < bytes(smallest) || (bytes(bin) == bytes(smallest) && bin.size() < smallest.size())) {
          smallest = bin;
        }
      }
      if (!hasRoom(smallest, piece)) {
        smallest = bins.stream().filter(bin -> hasRoom(bin, piece)).findFirst().orElse(null);
        if (smallest == null) {
          smallest = new ArrayList<>();
          bins.add(smallest);
        }
      }
      smallest.add(piece);
    }
    bins.forEach(bin -> bin.sort(Comparator.comparing(Range::stream).thenComparingLong(Range::start)));
    return bins;
  }

  private boolean hasRoom(List<Range> bin, Range piece) {
    long rows = bin.stream().mapToLong(Range::rows).sum() + piece.rows();
    boolean fits = settings.taskRows == null || rows <= settings.taskRows;
    return bin.isEmpty() || (fits && bytes(bin) + piece.bytes() <= settings.mostTaskBytes);
  }
}
