package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.net.SocketTimeoutException;
import java.net.URI;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Function;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * HTTP requests to brokers: to any of them, with retries at all of them, as `natslog.client.asking` makes them.
 *
 * <p>The token is sent to the origins of the servers that were given, and to those that a given server names as members
 * of its cluster, over the same scheme; nowhere else.
 */
final class Broker {
  /** What is wrong with a response that cannot be used; null if it can be. */
  interface Judge extends Function<Answer, NatslogException> {}

  /** The body of a request. */
  record Content(String type, byte[] bytes) {
    static Content json(String text) {
      return new Content("application/json", text.getBytes(StandardCharsets.UTF_8));
    }
  }

  /** A response, of which the body is read once. */
  record Answer(int status, Function<String, String> header, Body body) {
    /** Why what it states about a stream's bounds must not be used: a newer leader is known; else null. */
    NatslogException outdated() {
      return Epochs.outdated(header.apply("Natslog-Stream-Id"), number("Natslog-Leader-Epoch"));
    }

    void close() {
      body.close();
    }

    Long number(String name) {
      String text = header.apply(name);
      if (text == null) {
        return null;
      }
      if (!text.matches("[0-9]{1,18}")) {
        throw NatslogException.corruptAnswer(
            "the header " + name + " of the response is not an offset: repeat the request, or send it to another "
                + "broker");
      }
      return Long.parseLong(text);
    }

    String text() {
      try (InputStream in = body) {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        byte[] piece = new byte[64 * 1024];
        long untilNs = System.nanoTime() + TEXT_WITHIN_S * SECOND_NS;
        for (int count = in.read(piece); count >= 0; count = in.read(piece)) {
          bytes.write(piece, 0, count);
          if (bytes.size() > MOST_JSON_BYTES || System.nanoTime() > untilNs) {
            throw NatslogException.corruptAnswer(
                "the response is larger or slower than any of a broker: check that the URL is that of a natslog "
                    + "broker");
          }
        }
        return bytes.toString(StandardCharsets.UTF_8);
      } catch (IOException error) {
        throw NatslogException.corruptAnswer("the response of the broker ended early: " + error.getMessage());
      }
    }
  }

  /** The target of a redirect does not respond, or requires the token. */
  private static final class RedirectFailed extends Exception {
    RedirectFailed(String message) {
      super(message);
    }
  }

  private record Members(long atNs, Set<String> origins) {}

  /** `madeOf`: when the TLS files were written. */
  private record Shared(Http client, List<Object> madeOf) {}

  private static final int MOST_JSON_BYTES = 256 * 1024 * 1024;
  private static final int MOST_DROPPED_BYTES = 4096;
  private static final long TEXT_WITHIN_S = 60;
  private static final double LEAST_TIMEOUT_S = 1;
  private static final double EACH_S = 2;
  private static final double LEADER_S = 15;
  private static final double MOST_WAIT_S = 30;
  private static final long SECOND_NS = 1_000_000_000L;
  private static final Pattern ORIGIN = Pattern.compile(
      "(https?)://(?:[^/?#@]*@)?(\\[[^]/?#]+]|[^:/?#\\[\\]]+)(?::(\\d{1,5}))?(?:[/?#].*)?");
  private static final Map<String, Long> SILENT_UNTIL_NS = new ConcurrentHashMap<>();
  private static final Map<List<String>, Members> MEMBERS = new ConcurrentHashMap<>();
  private static final Map<List<String>, Shared> CLIENTS = new ConcurrentHashMap<>();
  private static final SecureRandom RANDOM = new SecureRandom();

  private final Settings settings;
  private final double timeoutS;
  private final int retries;
  private final double patienceS;
  private final double leaderS;
  private final double firstAnswerWithinS;
  private volatile boolean hasAnswered;
  private volatile long firstUntilNs;

  Broker(Settings settings) {
    this(settings, Double.POSITIVE_INFINITY);
  }

  /**
   * @param firstAnswerWithinS where no broker has answered by then, counted from the first request, requests are not
   *     repeated any more; the error has the fact `answered`, false
   */
  Broker(Settings settings, double firstAnswerWithinS) {
    this(settings, firstAnswerWithinS, settings.timeoutS, settings.retries, settings.timeoutS);
  }

  /** One whose requests are made once at each server, within this time, whether or not a leader is being chosen. */
  static Broker brief(Settings settings, double timeoutS) {
    return new Broker(settings, Double.POSITIVE_INFINITY, Math.min(timeoutS, settings.timeoutS), 0, 0);
  }

  /**
   * @param timeoutS for one answer
   * @param retries rounds over all servers after the first
   * @param patienceS for how long requests are repeated at least while no broker can be reached
   */
  private Broker(
      Settings settings, double firstAnswerWithinS, double timeoutS, int retries, double patienceS) {
    this.settings = settings;
    this.firstAnswerWithinS = firstAnswerWithinS;
    this.timeoutS = timeoutS;
    this.retries = retries;
    this.patienceS = patienceS;
    this.leaderS = patienceS > 0 ? LEADER_S : 0;
    client(); // files that cannot be read are an error before anything is requested
  }

  /** One for each set of TLS files, shared by all tasks of the process: it keeps connections. Files may be replaced. */
  private Http client() {
    List<String> files = Arrays.asList(settings.tlsCaFile, settings.tlsCertFile, settings.tlsKeyFile);
    List<Object> written = new ArrayList<>();
    for (String file : files) {
      try {
        written.add(file == null ? "" : Files.getLastModifiedTime(Path.of(file)));
      } catch (IOException error) {
        throw NatslogException.config("cannot read the TLS file " + file);
      }
    }
    return CLIENTS.compute(files, (unused, known) ->
        known != null && known.madeOf.equals(written) ? known : new Shared(
            new Http(Tls.context(settings.tlsCaFile, settings.tlsCertFile, settings.tlsKeyFile)), written)).client;
  }

  // ---- requests ----

  /** What a leader states about a stream. */
  JsonNode get(String path, Map<String, ?> query) {
    return json(ask("GET", path, query, null, List.of(), 0, Answer::outdated), "GET " + path);
  }

  /** The list of a broker that has received all changes, so that what is not listed does not exist. */
  JsonNode getCurrent(String path) {
    Judge judge = answer -> !"false".equals(answer.header.apply("Natslog-Current")) ? null
        : new NatslogException("metadata_unavailable",
            "the broker has no session with the metadata leader: its list may be outdated", true, Map.of());
    return json(ask("GET", path, Map.of(), null, List.of(), 0, judge), "GET " + path);
  }

  /** The tail of a stream, once it has an answer: a response without an end. */
  Answer tail(String stream, Map<String, ?> query) {
    return ask("GET", "/v1/streams/" + inPath(stream) + "/tail", query, null, List.of(), 0, Answer::outdated);
  }

  JsonNode post(String path, Object body, List<String> prefer, double waitS, Judge judge) {
    return json(ask("POST", path, Map.of(), Content.json(Json.text(body)), prefer, waitS, judge), "POST " + path);
  }

  private static JsonNode json(Answer answer, String what) {
    JsonNode body = Json.parse(answer.text());
    if (body == null) {
      throw new NatslogException("internal",
          what + ": the response is not JSON: check that the URL is that of a natslog broker", false, Map.of());
    }
    return body;
  }

  /**
   * The response of the first broker that gives one.
   *
   * @param prefer brokers to ask first
   * @param waitS how long the broker may wait before it responds
   */
  Answer ask(String method, String path, Map<String, ?> query, Content body, List<String> prefer, double waitS,
      Judge judge) {
    LinkedHashSet<String> servers = new LinkedHashSet<>(prefer);
    servers.addAll(settings.servers);
    List<String> ordered = mostPromisingFirst(servers);
    long started = System.nanoTime();
    long patientUntil = started + (long) (patienceS * SECOND_NS);
    String problem = "";
    String answered = "";
    String sent = token();
    double askedToWaitS = 0;
    int more = 0;
    String requestId = HexFormat.of().formatHex(randomBytes());
    for (int attempt = 0; attempt <= retries + more || System.nanoTime() < patientUntil; attempt++) {
      if (attempt > 0) {
        if (leftForFirstS() <= 0) {
          break;
        }
        pause(Math.max(askedToWaitS, settings.retryIntervalS * Math.min(1 << Math.min(attempt - 1, 3), 8)));
      }
      askedToWaitS = 0;
      answered = "";
      for (int place = 0; place < ordered.size(); place++) {
        String server = ordered.get(place);
        NatslogException error;
        boolean isLeaderless;
        long asked = System.nanoTime();
        Answer answer = null;
        try {
          double shareS = leftForFirstS() / (ordered.size() - place); // one that hangs leaves time for others
          double withinS = Math.min(waitS + timeoutS, Math.max(LEAST_TIMEOUT_S, shareS));
          answer = send(method, server + path, query, body, withinS, requestId);
          hasAnswered = true;
          SILENT_UNTIL_NS.remove(server);
          error = answer.status >= 300 ? errorOf(answer, server) : judge.apply(answer);
          if (error == null) {
            return answer;
          }
          isLeaderless = answer.status < 400
              || error.is("no_leader", "not_leader", "not_metadata_leader", "metadata_unavailable");
          answer.close();
        } catch (NatslogException failure) { // of the judge
          error = failure;
          isLeaderless = true;
          if (answer != null) {
            answer.close();
          }
        } catch (RedirectFailed failure) { // the leader failed: another one is being chosen
          problem = failure.getMessage();
          patientUntil = Math.max(patientUntil, started + (long) (leaderS * SECOND_NS));
          continue;
        } catch (IOException failure) {
          problem = shown(server) + ": " + reason(failure) + advice(server, failure);
          long waited = System.nanoTime() - asked;
          SILENT_UNTIL_NS.put(server, System.nanoTime() + Math.max(15 * SECOND_NS, 10 * waited));
          continue;
        }
        String newest = error.is("unauthorized") && settings.tokenFile != null ? token() : sent;
        if (!Objects.equals(newest, sent)) {
          problem = error.getMessage();
          sent = newest;
          more = 1;
          continue; // the file was replaced: the next request uses the new token
        }
        if (!error.retriable) {
          throw error;
        }
        answered = shown(server) + ": " + error.getMessage();
        if (error.facts.get("retry_after_s") instanceof Number stated) {
          askedToWaitS = Math.max(askedToWaitS, Math.min(stated.doubleValue(), MOST_WAIT_S));
        }
        if (isLeaderless) {
          patientUntil = Math.max(patientUntil, started + (long) (leaderS * SECOND_NS));
        }
      }
      problem = answered.isEmpty() ? problem : answered;
    }
    String advice = answered.isEmpty() ? ". Check that `natslog dev` or `natslog server` is running there" : "";
    if (leftForFirstS() > 0) {
      throw NatslogException.unavailable(
          "no broker answered " + method + " " + path + "; last error: " + problem + advice);
    }
    String shown = String.join(" and ", ordered.stream().map(Broker::shown).toList());
    throw new NatslogException("broker_unavailable",
        shown + " did not answer within " + (long) firstAnswerWithinS + " s: " + problem + advice, true,
        Map.of("answered", false));
  }

  /** What is left of the time for the first answer; infinite after it. */
  private double leftForFirstS() {
    if (hasAnswered || Double.isInfinite(firstAnswerWithinS)) {
      return Double.POSITIVE_INFINITY;
    }
    if (firstUntilNs == 0) {
      firstUntilNs = System.nanoTime() + (long) (firstAnswerWithinS * SECOND_NS);
    }
    return (firstUntilNs - System.nanoTime()) / (double) SECOND_NS;
  }

  /** The response of each broker that gives one to a GET with a short timeout. */
  List<JsonNode> ofEach(String path) {
    List<JsonNode> found = new ArrayList<>();
    for (String server : mostPromisingFirst(new LinkedHashSet<>(settings.servers))) {
      try {
        Answer answer = send("GET", server + path, Map.of(), null, Math.min(EACH_S, settings.timeoutS), "");
        JsonNode body = Json.parse(answer.text());
        if (answer.status < 300 && body != null) {
          found.add(body);
        }
      } catch (RedirectFailed | IOException | NatslogException failure) {
        continue; // brokers that do not respond are omitted
      }
    }
    return found;
  }

  private Answer send(String method, String url, Map<String, ?> query, Content body, double timeoutS,
      String requestId) throws IOException, RedirectFailed {
    String token = token();
    String target = query.isEmpty() ? url : url + "?" + encoded(query);
    boolean isRedirected = false;
    for (int hop = 0; hop < 3; hop++) {
      Map<String, String> headers = new LinkedHashMap<>();
      headers.put("Natslog-Batches", "whole");
      headers.put("Natslog-Columns", "whole");
      if (body != null) {
        headers.put("Content-Type", body.type);
        headers.put("Natslog-Request-Id", requestId);
      }
      if (isRedirected) {
        headers.put("Natslog-Redirected", "true");
      }
      boolean isTrusted = token != null && mayHaveToken(target);
      if (isTrusted) {
        headers.put("Authorization", "Bearer " + token);
      }
      Http.Response response;
      try {
        response = client().send(method, target, headers, body == null ? null : body.bytes, timeoutS);
      } catch (NatslogException error) {
        throw error;
      } catch (IllegalArgumentException error) {
        if (!isRedirected) {
          throw NatslogException.config(shown(url) + " is not the URL of a broker: check its host and port");
        }
        throw new RedirectFailed(shown(url) + ": it redirects to a location that is not an http(s) URL");
      } catch (IOException error) {
        if (isRedirected) {
          throw new RedirectFailed(shown(target) + ": " + reason(error));
        }
        throw error;
      }
      String location = response.header("Location");
      if (response.status() != 307 || location == null) {
        boolean needsToken = response.status() == 401 || response.status() == 403;
        if (needsToken && token != null && !isTrusted) {
          response.body().close();
          throw new RedirectFailed(
              shown(target) + " requires credentials, but the token was not sent to it: it is not one of the "
                  + "configured servers, and none of them lists it as a member with the same URL scheme; add it to "
                  + "the servers");
        }
        return new Answer(response.status(), response::header, response.body());
      }
      dropShort(response.body());
      try {
        target = URI.create(target).resolve(location).toString();
      } catch (IllegalArgumentException error) {
        target = "";
      }
      if (originOf(target) == null) {
        throw new RedirectFailed(shown(url) + ": it redirects to a location that is not an http(s) URL");
      }
      isRedirected = true;
    }
    throw new RedirectFailed(shown(url) + ": redirected more than 3 times");
  }

  /** A short body is read, so that its connection can be used again. */
  private static void dropShort(Body body) {
    try (body) {
      body.readNBytes(MOST_DROPPED_BYTES);
    } catch (IOException error) {
      return; // nothing of it is needed, and its connection is closed
    }
  }

  /** An error by whose cause Spark recognizes that the query or task was stopped. */
  static RuntimeException interrupted() {
    Thread.currentThread().interrupt();
    return new UncheckedIOException(new InterruptedIOException("interrupted while it waited for a broker"));
  }

  /** As text: whole seconds, or fractions of one. */
  static String seconds(double seconds) {
    return seconds >= 1 ? (long) seconds + " s" : (long) (1000 * seconds) + " ms";
  }

  static void pause(double seconds) {
    try {
      Thread.sleep((long) (1000 * seconds));
    } catch (InterruptedException error) {
      throw interrupted();
    }
  }

  private static byte[] randomBytes() {
    byte[] bytes = new byte[16];
    RANDOM.nextBytes(bytes);
    return bytes;
  }

  private static String encoded(Map<String, ?> query) {
    StringBuilder found = new StringBuilder();
    query.forEach((name, value) -> {
      if (value != null) {
        found.append(found.length() == 0 ? "" : "&").append(name).append('=')
            .append(URLEncoder.encode(String.valueOf(value), StandardCharsets.UTF_8));
      }
    });
    return found.toString();
  }

  static String inPath(String name) {
    return URLEncoder.encode(name, StandardCharsets.UTF_8).replace("+", "%20");
  }

  /** Servers that did not respond a moment ago come last. */
  private static List<String> mostPromisingFirst(Set<String> servers) {
    List<String> found = new ArrayList<>(servers);
    long now = System.nanoTime();
    found.sort(Comparator.comparing(server -> SILENT_UNTIL_NS.getOrDefault(server, now) > now));
    return found;
  }

  // ---- errors ----

  private static NatslogException errorOf(Answer answer, String server) {
    JsonNode body = Json.parse(answer.text());
    JsonNode error = body == null ? null : body.get("error");
    if (error == null || !error.isObject()) {
      String said = shown(server) + " answered HTTP " + answer.status + ", which is not the response of a natslog "
          + "broker";
      boolean isProxy = answer.status >= 502 && answer.status <= 504;
      return isProxy ? NatslogException.unavailable(said) : new NatslogException("internal", said, false, Map.of());
    }
    return errorIn(error);
  }

  /** The error that a broker states. */
  static NatslogException errorIn(JsonNode error) {
    Map<String, Object> facts = new HashMap<>(Json.facts(error));
    NatslogException found = new NatslogException(
        error.path("code").asText("internal"), error.path("message").asText("a broker stated no reason"),
        error.path("retriable").asBoolean(false), facts);
    NatslogException outdated = found.is("offset_out_of_range")
        ? Epochs.outdated(facts.get("id"), facts.get("leader_epoch")) : null;
    return outdated == null ? found : outdated;
  }

  private String advice(String server, IOException failure) {
    if (failure instanceof javax.net.ssl.SSLHandshakeException) {
      return ": give the CA that signed the broker's certificate (tlsCaFile), and a host that it is for"
          + (settings.tlsCertFile == null ? "; it may also require a client certificate (tlsCertFile, tlsKeyFile)" : "");
    }
    boolean isConnected = !(failure instanceof java.net.ConnectException || failure instanceof SocketTimeoutException);
    if (server.startsWith("https:")) { // a broker that requires a certificate closes the connection after the handshake
      return isConnected && settings.tlsCertFile == null
          ? ": it may require a client certificate (tlsCertFile, tlsKeyFile)" : "";
    }
    return failure instanceof java.net.ConnectException ? "" : " (if it serves TLS, its URL begins with https://)";
  }

  private static String reason(IOException failure) {
    String text = failure.getMessage();
    if (text == null && failure.getCause() != null) {
      text = failure.getCause().getMessage();
    }
    return text == null || text.isEmpty() ? failure instanceof java.net.ConnectException
        ? "Connection refused" : failure.getClass().getSimpleName() : text;
  }

  // ---- the token ----

  private String token() {
    String token = settings.token;
    if (settings.tokenFile != null) {
      try {
        token = Files.readString(Path.of(settings.tokenFile), StandardCharsets.US_ASCII).strip();
      } catch (IOException error) {
        throw NatslogException.config(
            "cannot read the token file " + settings.tokenFile + ", or it contains characters that are not ASCII");
      }
    }
    if (token != null && !token.chars().allMatch(letter -> letter >= 32 && letter < 127)) {
      throw NatslogException.config(
          "the token has characters that cannot be sent: it must be one line of printable ASCII");
    }
    return token == null || token.isEmpty() ? null : token;
  }

  private boolean mayHaveToken(String url) {
    String origin = originOf(url);
    if (origin == null) {
      return false;
    }
    for (String server : settings.servers) {
      if (origin.equals(originOf(server))) {
        return true;
      }
    }
    List<String> key = new ArrayList<>(settings.servers);
    key.add(String.valueOf(settings.tlsCaFile));
    Members known = MEMBERS.getOrDefault(key, new Members(System.nanoTime() - 61 * SECOND_NS, Set.of()));
    long age = System.nanoTime() - known.atNs;
    if (age < (known.origins.contains(origin) ? 60 : 5) * SECOND_NS) {
      return known.origins.contains(origin);
    }
    Set<String> origins = known.origins;
    for (String server : mostPromisingFirst(new LinkedHashSet<>(settings.servers))) {
      Set<String> named = membersNamedBy(server);
      if (named != null) {
        origins = named;
        break;
      }
    }
    MEMBERS.put(key, new Members(System.nanoTime(), origins));
    return origins.contains(origin);
  }

  /** The origins of the same scheme that a given server lists; null without a list. No redirect is followed. */
  private Set<String> membersNamedBy(String server) {
    try {
      Http.Response response = client().send("GET", server + "/v1/cluster", Map.of("Authorization", "Bearer " + token()),
          null, Math.min(EACH_S, settings.timeoutS));
      String text = new Answer(response.status(), response::header, response.body()).text();
      JsonNode body = response.status() == 200 ? Json.parse(text) : null;
      if (body == null || !body.path("brokers").isArray()) {
        return null;
      }
      Set<String> found = new LinkedHashSet<>();
      String scheme = server.substring(0, server.indexOf(':'));
      for (JsonNode broker : body.path("brokers")) {
        String origin = originOf(broker.path("url").asText(""));
        if (origin != null && origin.startsWith(scheme + ":")) {
          found.add(origin);
        }
      }
      return found;
    } catch (IOException | NatslogException error) {
      return null;
    }
  }

  /** Scheme, host and port; null where it is no http(s) URL. */
  static String originOf(String url) {
    Matcher found = ORIGIN.matcher(url);
    if (!found.matches()) {
      return null;
    }
    String port = found.group(3) != null ? found.group(3) : found.group(1).equals("https") ? "443" : "80";
    return found.group(1) + "://" + found.group(2).toLowerCase(java.util.Locale.ROOT) + ":" + port;
  }

  /** Without user and password. */
  static String shown(String url) {
    String origin = originOf(url);
    return origin == null ? url.replaceFirst("//[^/?#@]*@", "//") : origin;
  }
}
