package natslog;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** The address of a NATS server, with the login that the URL contains: user and password, or a token as user. */
record NatsUrl(boolean isSecure, String host, int port, String user, String password) {
  private static final Pattern URL = Pattern.compile(
      "(?:(nats|tls)://)?(?:([^@/]*?)(?::([^@/]*))?@)?(\\[[^]/]+]|[^:/@\\[\\]]+)(?::(\\d{1,5}))?/?");
  private static final String NEXT_URL = ",(?=\\s*[A-Za-z][A-Za-z0-9+.-]*://)";
  private static final int DEFAULT_PORT = 4222;

  static List<NatsUrl> all(String urls) {
    List<NatsUrl> found = new ArrayList<>();
    for (String one : urls.split(",")) {
      if (!one.isBlank()) {
        found.add(of(one.strip()));
      }
    }
    if (found.isEmpty()) {
      throw NatslogException.config("option natsServers names no server: write nats://host:4222");
    }
    return found;
  }

  static NatsUrl of(String url) {
    Matcher parts = URL.matcher(url);
    if (!parts.matches()) {
      throw NatslogException.config(
          "option natsServers: '" + shown(url) + "' is not the URL of a NATS server: write nats://host:4222");
    }
    int port = parts.group(5) == null ? DEFAULT_PORT : Integer.parseInt(parts.group(5));
    return new NatsUrl(
        "tls".equals(parts.group(1)), parts.group(4).replaceAll("[\\[\\]]", ""), port, parts.group(2), parts.group(3));
  }

  /** Of WebSockets, which only the Python sink has. */
  static boolean areWebSockets(String urls) {
    return Arrays.stream(urls.split(",")).anyMatch(url -> url.strip().startsWith("ws"));
  }

  /** Without user and password. */
  static String shown(String urls) {
    List<String> found = new ArrayList<>();
    for (String url : urls.split(NEXT_URL)) {
      int scheme = url.indexOf("://");
      String start = scheme < 0 ? "" : url.substring(0, scheme + 3);
      String rest = url.substring(start.length());
      int at = rest.lastIndexOf('@');
      found.add(at < 0 ? url : start + "…@" + rest.substring(at + 1));
    }
    return String.join(",", found);
  }
}
