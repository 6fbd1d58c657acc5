package natslog;

import com.fasterxml.jackson.databind.JsonNode;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.apache.spark.unsafe.types.UTF8String;

/** Prints the digest and the ids that the jar gives the rows of a golden file, as JSON. */
final class RowHashVectors {
  private RowHashVectors() {}

  public static void main(String[] arguments) throws Exception {
    JsonNode golden = Json.parse(Files.readString(Path.of(arguments[0])));
    List<List<String>> ids = new ArrayList<>();
    for (JsonNode one : golden.get("ids")) {
      RowHashes hashes = new RowHashes(one.get("context").asText());
      List<String> found = new ArrayList<>();
      for (JsonNode row : golden.get("rows")) {
        hash(hashes, row, one.get("first").asLong() + found.size());
        byte[] id = new byte[RowHashes.ID_BYTES];
        hashes.putId(id, 0);
        found.add(new String(id));
      }
      ids.add(found);
    }
    long first = 0;
    long second = 0;
    RowHashes hashes = new RowHashes(null);
    for (JsonNode row : golden.get("rows")) {
      hash(hashes, row, 0);
      first += hashes.first();
      second += hashes.second();
    }
    System.out.println(Json.text(Map.of("digest", String.format("%016x%016x", first, second), "ids", ids)));
  }

  private static void hash(RowHashes hashes, JsonNode row, long number) {
    hashes.begin(number);
    hashes.mix(text(row.get(0)));
    hashes.mix(bytes(row.get(1)));
    hashes.mix(bytes(row.get(3)));
    JsonNode headers = row.get(2);
    for (JsonNode header : headers) {
      hashes.mixHeader(text(header.get(0)), text(header.get(1)));
    }
    hashes.finish(headers.isNull() ? -1 : headers.size());
  }

  private static UTF8String text(JsonNode node) {
    return node.isNull() ? null : UTF8String.fromString(node.asText());
  }

  private static UTF8String bytes(JsonNode node) {
    return node.isNull() ? null : UTF8String.fromBytes(HexFormat.of().parseHex(node.asText()));
  }
}
