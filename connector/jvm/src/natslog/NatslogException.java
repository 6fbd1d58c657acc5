package natslog;

import java.util.Map;

/**
 * An error in operation, as brokers and the Python client state it: the message says what to do. Of exceptions of this
 * kind, PySpark shows the message without Java's stack.
 */
public final class NatslogException extends IllegalArgumentException {
  /** `stream_not_found`, `offset_out_of_range`, …; see docs/OPERATIONS.md. */
  final String code;

  /** Whether the same request may succeed later. */
  final boolean retriable;

  /** What a program can use: `stream`, `high_watermark`, …. */
  final Map<String, Object> facts;

  NatslogException(String code, String message, boolean retriable, Map<String, Object> facts) {
    super(message);
    this.code = code;
    this.retriable = retriable;
    this.facts = facts;
  }

  boolean is(String... codes) {
    for (String one : codes) {
      if (one.equals(code)) {
        return true;
      }
    }
    return false;
  }

  /** A wrong option, found before anything is read. */
  static NatslogException config(String message) {
    return new NatslogException("config", message, false, Map.of());
  }

  static NatslogException notFound(String message) {
    return new NatslogException("stream_not_found", message, false, Map.of());
  }

  static NatslogException outdated(String message, Map<String, Object> facts) {
    return new NatslogException("not_leader", message, true, facts);
  }

  static NatslogException unavailable(String message) {
    return new NatslogException("broker_unavailable", message, true, Map.of());
  }

  /** The response of a broker is damaged, or does not match the request: it is requested again. */
  static NatslogException corruptAnswer(String message) {
    return new NatslogException("corrupt_answer", message, true, Map.of());
  }

  /** The bytes of a stored batch differ from what was written. */
  static NatslogException corruptLog(String message) {
    return new NatslogException("corrupt_log", message, false, Map.of());
  }
}
