package natslog;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.regex.Pattern;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The class that Spark finds by `format("natslog")` when this jar is on the class path, before it looks for Python
 * sources. What it does not do (typed payloads, buckets, cursors, appends over HTTP) it leaves to the Python source.
 */
public final class DefaultSource implements TableProvider {
  private static final Logger LOG = LoggerFactory.getLogger("natslog.source");
  private static final Pattern OF_REGEX = Pattern.compile("\\.[*+]|[\\^$()|\\\\+{}]");
  private static final List<String> USUAL = List.of("stream", "offset", "timestamp", "subject", "key", "value");

  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    boolean isTable = TableOptions.are(options);
    if (isTable && PythonSource.isUsable()) { // it checks options for writes, too
      return PythonSource.provider("creating a table").inferSchema(options);
    }
    Map<String, String> given = TableOptions.ofRead(options, isTable ? Map.of() : options.asCaseSensitiveMap());
    String pythons = Settings.pythons(given);
    if (pythons != null) {
      return PythonSource.provider("option " + pythons).inferSchema(options);
    }
    Settings settings = new Settings(given, null);
    if (settings.pattern != null && OF_REGEX.matcher(settings.pattern).find()) {
      LOG.warn("option streamPattern '{}' looks like a regular expression; it is a glob, in which * stands for any text "
          + "and a dot for itself: \"orders-*\" matches the names that begin with \"orders-\"", settings.pattern);
    }
    return schema(settings);
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    return new NatslogTable(schema, properties);
  }

  /** Of the columns that the options choose. */
  static StructType schema(Settings settings) {
    List<String> names = settings.columns;
    if (names == null) {
      names = new ArrayList<>(USUAL);
      if (settings.includeHeaders) {
        names.add("headers");
      }
    }
    StructType found = new StructType();
    for (String name : names) {
      found = found.add(name, Columns.typeOf(name));
    }
    return found;
  }

  /** The columns of a schema that Spark was given: each must be one of the source, of its type. */
  static void check(StructType schema, Settings settings) {
    List<String> known = new ArrayList<>(USUAL);
    known.add("headers");
    for (StructField field : schema.fields()) {
      if (!known.contains(field.name())) {
        throw NatslogException.config(
            "schema: the source has no column '" + field.name() + "'" + Given.didYouMean(field.name(), known));
      }
      String expected = Columns.typeOf(field.name()).simpleString();
      if (!field.dataType().simpleString().equals(expected)) {
        throw NatslogException.config(
            "schema: column '" + field.name() + "' is " + expected + ", not " + field.dataType().simpleString()
                + "; cast it after reading");
      }
    }
    List<String> names = List.of(schema.fieldNames());
    if (settings.columns != null && !names.equals(settings.columns)) {
      throw NatslogException.config(
          "option columns and .schema(…) clash: " + String.join(", ", settings.columns) + " and "
              + String.join(", ", names) + "; give one of them");
    }
  }
}
