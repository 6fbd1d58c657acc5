package natslog;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;

/** Reads and writes JSON with Spark's Jackson. */
final class Json {
  static final ObjectMapper MAPPER = new ObjectMapper();

  private Json() {}

  /** Null where the text is not JSON. */
  static JsonNode parse(String text) {
    try {
      JsonNode found = MAPPER.readTree(text);
      return found == null || found.isMissingNode() ? null : found;
    } catch (JsonProcessingException error) {
      return null;
    }
  }

  static String text(Object value) {
    try {
      return MAPPER.writeValueAsString(value);
    } catch (JsonProcessingException error) {
      throw new IllegalArgumentException(error);
    }
  }

  /** The text and number members of an object. */
  static Map<String, Object> facts(JsonNode object) {
    Map<String, Object> found = new HashMap<>();
    for (Iterator<Map.Entry<String, JsonNode>> fields = object.fields(); fields.hasNext(); ) {
      Map.Entry<String, JsonNode> one = fields.next();
      if (one.getValue().isTextual()) {
        found.put(one.getKey(), one.getValue().asText());
      } else if (one.getValue().isIntegralNumber()) {
        found.put(one.getKey(), one.getValue().asLong());
      } else if (one.getValue().isNumber()) {
        found.put(one.getKey(), one.getValue().asDouble());
      }
    }
    return found;
  }
}
