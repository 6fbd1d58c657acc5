package natslog;

import java.io.Serializable;
import java.util.regex.Pattern;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.filter.And;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * What a batch query wants, as far as less can be read for it: Spark applies filters and limits again.
 *
 * @param from, to offsets `[from, to)` of each stream
 * @param fromUs, toUs times `[fromUs, toUs)`
 * @param subject the only one; null: any
 * @param limit rows of each task
 */
record Pushed(long from, long to, long fromUs, long toUs, String subject, long limit) implements Serializable {
  /** Subjects that any broker accepts; Spark compares the others. */
  private static final Pattern PLAIN = Pattern.compile("[!-)+-\\-/-=?-~]+(\\.[!-)+-\\-/-=?-~]+)*");

  static final Pushed NOTHING = new Pushed(0, Long.MAX_VALUE, 0, Long.MAX_VALUE, null, Long.MAX_VALUE);

  Pushed with(long newLimit) {
    return new Pushed(from, to, fromUs, toUs, subject, newLimit);
  }

  /** With a filter of the query, if it is one of offset, timestamp or subject, compared with a value. */
  Pushed with(Predicate filter) {
    if (filter instanceof And both) {
      return with(both.left()).with(both.right());
    }
    Expression[] sides = filter.children();
    if (sides.length != 2 || !(sides[0] instanceof NamedReference named) || !(sides[1] instanceof Literal<?> literal)) {
      return this;
    }
    String column = String.join(".", named.fieldNames());
    if (column.equals("subject")) {
      boolean isPlain = filter.name().equals("=") && literal.value() instanceof UTF8String text
          && text.numBytes() <= 1024 && PLAIN.matcher(text.toString()).matches();
      return isPlain && subject == null
          ? new Pushed(from, to, fromUs, toUs, literal.value().toString(), limit) : this;
    }
    boolean isTime = column.equals("timestamp");
    if (!(isTime || column.equals("offset")) || !(literal.value() instanceof Long value)) {
      return this;
    }
    long after = value == Long.MAX_VALUE ? value : value + 1;
    long low = switch (filter.name()) {
      case ">=", "=" -> value;
      case ">" -> after;
      default -> 0;
    };
    long high = switch (filter.name()) {
      case "<" -> value;
      case "<=", "=" -> after;
      default -> Long.MAX_VALUE;
    };
    return isTime
        ? new Pushed(from, to, Math.max(fromUs, low), Math.min(toUs, high), subject, limit)
        : new Pushed(Math.max(from, low), Math.min(to, high), fromUs, toUs, subject, limit);
  }
}
