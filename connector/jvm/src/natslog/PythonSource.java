package natslog;

import org.apache.spark.sql.connector.catalog.TableProvider;

/** The source of the same name in Python, which Spark has since 4.0, and which natslog needs from 4.2 on. */
final class PythonSource {
  private static final String PROVIDER = "org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2";
  private PythonSource() {}

  /**
   * @param what needs it: names it in the error where this Spark has none that can be used
   */
  static TableProvider provider(String what) {
    try {
      if (!isUsable()) {
        throw new ClassNotFoundException(PROVIDER);
      }
      TableProvider found = (TableProvider) Class.forName(PROVIDER).getConstructor().newInstance();
      found.getClass().getMethod("setShortName", String.class).invoke(found, "natslog");
      return found;
    } catch (ReflectiveOperationException error) {
      throw NatslogException.config(
          what + " needs the Python source of natslog, which needs Spark 4.2 or newer; this is Spark "
              + org.apache.spark.package$.MODULE$.SPARK_VERSION() + ". To write, use foreachBatch or foreachPartition "
              + "with the client (natslog.client); to read, decode the column value");
    }
  }

  /** Whether Spark tells Python sources how much to read. */
  static boolean isUsable() {
    String[] version = org.apache.spark.package$.MODULE$.SPARK_VERSION().split("[.-]");
    int major = Integer.parseInt(version[0]);
    return major > 4 || (major == 4 && Integer.parseInt(version[1]) >= 2);
  }
}
