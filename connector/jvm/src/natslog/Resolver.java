package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.time.temporal.ChronoUnit;
import java.util.Map;
import java.util.Set;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Resolves options to offsets: where a read starts and ends, checked against the log. */
final class Resolver {
  private static final Logger LOG = LoggerFactory.getLogger("natslog.source");
  private static final DateTimeFormatter ISO =
      DateTimeFormatter.ofPattern("uuuu-MM-dd'T'HH:mm:ss.SSSSSS'Z'").withZone(ZoneOffset.UTC);

  private final Broker broker;
  private final Settings settings;

  Resolver(Broker broker, Settings settings) {
    this.broker = broker;
    this.settings = settings;
  }

  /** The exclusive end that the options mean for a stream; it may lie below the log start. */
  long end(StreamState state) {
    return named(settings.end, state);
  }

  /**
   * The offset that the options mean as the start of a read up to `end`, or without an end if that is null.
   *
   * @param selected the streams that the options select now
   */
  long start(StreamState state, Long end, Set<String> selected) {
    String at = settings.start.timeUsOf(state.name()) == null ? settings.start.of(state.name()) : "";
    long position = at.startsWith(Settings.CURSOR)
        ? cursor(at.substring(Settings.CURSOR.length()), state, selected) : named(settings.start, state);
    if (position < state.start()) {
      StreamState now = confirmed(state, position, false);
      if (position >= now.start()) {
        return position;
      }
      long reachable = end == null ? now.start() : Math.min(now.start(), end);
      if (position < reachable) {
        Loss.report(settings, state.name(), position, reachable, "the log starts at " + now.start());
      }
      return reachable;
    }
    return position;
  }

  /** The state by the newest leader, if data seem to be missing; unchanged if the stream was deleted since. */
  private StreamState confirmed(StreamState state, long position, boolean isEnd) {
    StreamState now = StreamState.confirmed(
        () -> StreamState.newest(broker, state.name()),
        found -> found != null && (isEnd ? position > found.end() : position < found.start()));
    return now == null ? state : now;
  }

  /** The first offset at or after a time of a filter; `otherwise` where the time excludes nothing. */
  long at(StreamState state, long timeUs, long otherwise) {
    return timeUs <= 0 || timeUs >= Given.YEAR_10000_US ? otherwise : first(state, timeUs);
  }

  private long first(StreamState state, long timeUs) {
    JsonNode found = broker.get("/v1/streams/" + Broker.inPath(state.name()) + "/offsets",
        Map.of("timestamp", ISO.format(Instant.EPOCH.plus(timeUs, ChronoUnit.MICROS))));
    return found.path("offset").asLong();
  }

  private long named(Settings.Bound bound, StreamState state) {
    Long timeUs = bound.timeUsOf(state.name());
    if (timeUs != null) {
      return first(state, timeUs);
    }
    String position = bound.of(state.name());
    if (position.equals("earliest")) {
      return state.start();
    }
    if (position.equals("latest")) {
      return state.end();
    }
    return checked(state, Long.parseLong(position), "");
  }

  /**
   * The next offset that the cursor's consumer has not read. A stream that a pattern or group selects may be newer than
   * the cursor: then its start.
   */
  private long cursor(String consumer, StreamState state, Set<String> selected) {
    JsonNode shown;
    try {
      shown = broker.get("/v1/cursors/" + Broker.inPath(consumer) + "/" + Broker.inPath(state.name()), Map.of());
    } catch (NatslogException error) {
      if (!error.is("cursor_not_found")) {
        throw error;
      }
      boolean hasOthers = false;
      if (settings.names.isEmpty()) {
        for (JsonNode one : broker.get("/v1/cursors", Map.of("consumer", consumer))) {
          hasOthers |= selected.contains(one.path("stream").asText());
        }
      }
      if (!hasOthers) {
        throw new NatslogException("cursor_not_found",
            "option startingOffsets: there is no cursor '" + consumer + "' on stream '" + state.name()
                + "': `natslog cursor ls` shows which exist; `natslog cursor set` creates one", false, Map.of());
      }
      LOG.warn("stream '{}' has no cursor '{}' yet: it is read from its start", state.name(), consumer);
      return state.start();
    }
    if (!shown.path("id").asText().equals(state.id())) { // a cursor ends with its stream
      throw new NatslogException("stream_recreated",
          "stream '" + state.name() + "' was created again just now: start the query again", false, Map.of());
    }
    return checked(state, shown.path("offset").asLong(), "cursor '" + consumer + "': ");
  }

  private long checked(StreamState state, long offset, String what) {
    StreamState now = offset > state.end() ? confirmed(state, offset, true) : state;
    if (offset > now.end()) {
      throw NatslogException.config(
          what + "stream '" + now.name() + "': offset " + offset + " is above the high watermark " + now.end() + "; it has "
              + (now.start() < now.end() ? "offsets " + now.start() + " to " + (now.end() - 1) : "no offsets"));
    }
    return offset;
  }
}
