package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;

/**
 * Which streams record the subjects of rows, and how they ack, as `natslog.client.destinations` has it. The list of all
 * streams is requested once a minute and kept for the whole process. That no stream acks a subject is concluded only
 * from a list that is requested for this conclusion, of a broker with all changes.
 */
final class Destinations {
  private static final long KEPT_NS = TimeUnit.MINUTES.toNanos(1);
  private static final Map<List<String>, Destinations> LISTS = new HashMap<>(); // by servers; also the lock

  /** `ways`: how it has to be asked for acks, bits of `Publisher.BY_REPLY` and `BY_HEADER`; 0: it does not ack. */
  private record Listed(String name, List<String> subjects, int ways) {}

  private final long atNs = System.nanoTime();
  private final List<Listed> streams = new ArrayList<>();

  private Destinations(JsonNode listed) {
    for (JsonNode body : listed) {
      List<String> subjects = new ArrayList<>();
      body.path("subjects").forEach(one -> subjects.add(one.asText()));
      streams.add(new Listed(body.path("name").asText(), subjects, waysOf(body)));
    }
  }

  private static int waysOf(JsonNode body) {
    if (body.path("sealed").asBoolean()) {
      return 0;
    }
    return switch (body.path("acks").asText()) {
      case "reply", "any" -> Publisher.BY_REPLY;
      case "header" -> Publisher.BY_HEADER;
      default -> 0;
    };
  }

  /**
   * How rows on this plain subject have to be asked for acks: bits, 0 where no stream acks it.
   *
   * @param required streams that must ack it
   * @throws NatslogException a required stream does not; or no broker answers
   */
  static int ways(Broker broker, List<String> servers, String subject, List<String> required) {
    synchronized (LISTS) {
      Destinations kept = LISTS.get(servers);
      if (kept != null && System.nanoTime() - kept.atNs < KEPT_NS) {
        int ways = kept.ways(subject);
        if (ways > 0 && required.stream().allMatch(name -> kept.isAckedBy(name, subject))) {
          return ways;
        }
      }
      Destinations found = new Destinations(broker.getCurrent("/v1/streams"));
      LISTS.put(servers, found);
      for (String name : required) {
        if (!found.isAckedBy(name, subject)) {
          throw NatslogException.config(found.whyUnacked(name, subject));
        }
      }
      return found.ways(subject);
    }
  }

  /** The streams may have changed: the next question is put to the brokers again. */
  static void forget(List<String> servers) {
    synchronized (LISTS) {
      LISTS.remove(servers);
    }
  }

  private int ways(String subject) {
    int found = 0;
    for (Listed stream : streams) {
      if (stream.ways > 0 && (found & stream.ways) == 0 && isRecordedBy(stream, subject)) {
        found |= stream.ways;
      }
    }
    return found;
  }

  private boolean isAckedBy(String name, String subject) {
    return streams.stream().anyMatch(one -> one.name.equals(name) && one.ways > 0 && isRecordedBy(one, subject));
  }

  private static boolean isRecordedBy(Listed stream, String subject) {
    return stream.subjects.stream().anyMatch(pattern -> covers(pattern, subject));
  }

  private String whyUnacked(String name, String subject) {
    TreeSet<String> recording = new TreeSet<>();
    for (Listed one : streams) {
      if (isRecordedBy(one, subject)) {
        recording.add(one.name);
      }
    }
    if (recording.contains(name)) {
      return "stream '" + name + "' does not ack the subject '" + subject
          + "': it is sealed, or its setting acks is never";
    }
    return "stream '" + name + "' does not record the subject '" + subject + "'; streams that do: "
        + (recording.isEmpty() ? "none" : String.join(", ", recording));
  }

  /** Whether a subject with or without wildcards covers a plain one. */
  static boolean covers(String pattern, String subject) {
    String[] ours = pattern.split("\\.", -1);
    String[] theirs = subject.split("\\.", -1);
    for (int at = 0; at < ours.length; at++) {
      if (at >= theirs.length) {
        return false;
      }
      if (ours[at].equals(">") && at == ours.length - 1) {
        return true;
      }
      if (!ours[at].equals("*") && !ours[at].equals(theirs[at])) {
        return false;
      }
    }
    return ours.length == theirs.length;
  }
}
