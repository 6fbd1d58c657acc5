package natslog;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Publishes the rows of one task to NATS, and waits for their acks, as `natslog.client.publisher` does.
 *
 * <p>Theory of operation. The task writes frames into `InFlight`. One thread connects, sends what was written, and sends
 * messages again that stay unacked, with the same ids; another one reads acks. What is written while nothing is being
 * sent leaves at once, and more rows that come within half a millisecond leave together: so a single row is not delayed,
 * and a fast task makes large writes. Acks come to `<inbox>.~<number>`, one for consecutive messages (ADR 21).
 *
 * <p>Invariant: `awaitAcks` returns only when the requested confirmation has come for every row. A row without an id is
 * never sent twice.
 */
final class Publisher implements AutoCloseable, NatsConnection.Receiver {
  /** Where an ack is requested: bits, as `natslog.wire.outgoing` has them. */
  static final int BY_REPLY = 1;

  static final int BY_HEADER = 2;

  private static final Logger LOG = LoggerFactory.getLogger("natslog.sink");
  private static final long MS_NS = 1_000_000;
  private static final long CONNECT_NS = 5_000 * MS_NS;
  private static final long TOGETHER_NS = MS_NS / 2;
  private static final int LARGE_BYTES = 64 * 1024;
  private static final double RETRY_S = 0.25;
  private static final long PING_NS = 1_000 * MS_NS;
  private static final double SILENT_S = 60; // so that data on a slow network is sent before
  private static final SecureRandom RANDOM = new SecureRandom();

  private final SinkSettings settings;
  private final Set<NatsUrl> servers;
  private final byte[] replyPrefix;
  private final String inbox;

  private final ReentrantLock lock = new ReentrantLock();
  private final Condition hasWork = lock.newCondition();
  private final Condition hasCome = lock.newCondition();
  private final InFlight inFlight; // all of the following under the lock, too
  private final Acking acking;
  private NatsConnection connection;
  private NatsConnection lost; // which the reader has seen the end of
  private IOException problem;
  private NatslogException failure;
  private String lastError = ""; // of the server
  private boolean isIdle; // the sender waits for anything to be sent
  private boolean isClosed;
  private boolean mustPong;
  private boolean mustFlush;
  private long pings; // on this connection, as the next one
  private long pongs;
  private long flushPing; // the one whose answer confirms the flush; 0: it was not sent
  private long pingedNs;
  private long sentNs;
  private long checkedNs; // whether something is late
  private long receivedNs;
  private long upNs; // since when it is connected, or not connected
  private int connections;

  Publisher(SinkSettings settings) {
    this.settings = settings;
    servers = new LinkedHashSet<>(NatsUrl.all(settings.natsUrl));
    byte[] random = new byte[11];
    RANDOM.nextBytes(random);
    inbox = "_INBOX." + HexFormat.of().formatHex(random);
    replyPrefix = (inbox + ".~").getBytes(StandardCharsets.US_ASCII);
    inFlight = new InFlight(settings.ackStreams.size(), settings.maxInFlight);
    acking = new Acking(inFlight, settings.ackStreams, settings.ackTimeoutS);
  }

  /**
   * Connects.
   *
   * @throws NatslogException no server answers, or the login is refused
   */
  void open() {
    settings.login.check(); // what cannot be read is an error at once
    upNs = System.nanoTime();
    start("natslog-sender", this::run);
    lock.lock();
    try {
      long untilNs = upNs + CONNECT_NS;
      while (connection == null && failure == null) {
        long leftNs = untilNs - System.nanoTime();
        if (leftNs <= 0) {
          throw whyDown();
        }
        await(leftNs);
      }
      raiseIfFailed();
    } catch (RuntimeException error) {
      close();
      throw error;
    } finally {
      lock.unlock();
    }
  }

  private static void start(String name, Runnable work) {
    Thread thread = new Thread(work, name);
    thread.setDaemon(true);
    thread.start();
  }

  int maxPayloadBytes() {
    lock.lock();
    try {
      return connection == null ? 1024 * 1024 : connection.maxPayloadBytes;
    } finally {
      lock.unlock();
    }
  }

  /** The most that the header takes that `BY_HEADER` adds to each message. */
  int ackHeaderBytes() {
    return "Natslog-Ack-To: .~9223372036854775807\r\n".length() + inbox.length();
  }

  // ---- the task ----

  /**
   * Writes a message, which is then sent by itself. Waits where too many wait for their acks.
   *
   * @param ways how its ack is requested, bits of `BY_REPLY` and `BY_HEADER`; 0: it is not
   * @throws NatslogException messages before were not acked, or were refused
   */
  void send(OutgoingRow row, int ways) {
    lock.lock();
    try {
      while (!inFlight.hasRoom() && failure == null) {
        await(Long.MAX_VALUE);
      }
      raiseIfFailed();
      long nowNs = System.nanoTime();
      boolean isFirst = inFlight.isEmpty();
      InFlight.Chunk chunk = inFlight.room(row.mostBytes(replyPrefix.length));
      int end = row.put(chunk.bytes, chunk.filled, replyPrefix, ways == 0 ? -1 : inFlight.next(), ways);
      inFlight.add(chunk, end, ways != 0, row.hasId(), nowNs);
      if (isFirst && ways != 0) {
        acking.begin(nowNs);
      }
      if (isIdle || inFlight.unsentBytes() >= LARGE_BYTES) {
        isIdle = false;
        hasWork.signal();
      }
    } finally {
      lock.unlock();
    }
  }

  /**
   * Returns when everything was confirmed as far as it is meant to be.
   *
   * @param isFlushed whether some messages are to be confirmed by the server alone
   * @throws NatslogException it was not, or the server refused messages
   */
  void awaitAcks(boolean isFlushed) {
    lock.lock();
    try {
      while (!(inFlight.isEmpty() && inFlight.isSent()) && failure == null) {
        await(Long.MAX_VALUE);
      }
      if (isFlushed && failure == null) {
        mustFlush = true;
        flushPing = 0;
        hasWork.signal();
        while (mustFlush && failure == null) {
          await(Long.MAX_VALUE);
        }
        if (connections > 1 && failure == null) {
          throw unavailable("the connection to NATS was lost while publishing: some rows may not have arrived, so "
              + "publish them again");
        }
      }
      raiseIfFailed();
    } finally {
      lock.unlock();
    }
  }

  private void await(long mostNs) {
    try {
      hasCome.awaitNanos(Math.max(1, mostNs));
    } catch (InterruptedException error) {
      throw Broker.interrupted();
    }
  }

  private void raiseIfFailed() {
    if (failure != null) {
      throw new NatslogException(failure.code, failure.getMessage(), failure.retriable, failure.facts);
    }
  }

  private static NatslogException unavailable(String message) {
    return new NatslogException("nats_unavailable", message, true, Map.of());
  }

  /** The connection is closed; what was not sent is dropped. */
  @Override
  public void close() {
    lock.lock();
    try {
      isClosed = true;
      if (connection != null) {
        connection.close();
      }
      hasWork.signal();
    } finally {
      lock.unlock();
    }
  }

  // ---- the thread that sends ----

  private void run() {
    try {
      while (true) {
        NatsConnection current = connected();
        if (current == null) {
          return; // it was closed
        }
        byte[] more = null;
        InFlight.Part part = null;
        lock.lock();
        try {
          awaitWork(current);
          if (isClosed || lost == current) {
            continue;
          }
          more = due();
          if (more == null) {
            part = inFlight.take();
          }
        } finally {
          lock.unlock();
        }
        write(current, part, more);
      }
    } catch (RuntimeException error) { // a defect: the task must not wait for ever
      fail(new NatslogException("internal", "the sender of messages failed: " + error, false, Map.of()));
      throw error;
    }
  }

  private void write(NatsConnection current, InFlight.Part part, byte[] more) {
    try {
      if (more != null) {
        current.write(more, 0, more.length, SILENT_S);
      } else if (part != null) {
        current.write(part.chunk().bytes, part.start(), part.length(), SILENT_S);
      }
    } catch (IOException error) { // the reader sees the end of the connection, too
      current.close();
      noteLost(current, error);
    } finally {
      if (part != null) {
        lock.lock();
        try {
          inFlight.sent();
          hasCome.signalAll();
        } finally {
          lock.unlock();
        }
      }
    }
  }

  /** Returns when there is something to do, at the latest after a tick. Gathers rows that come at short intervals. */
  private void awaitWork(NatsConnection current) {
    try {
      long untilNs = System.nanoTime() + acking.tickNs();
      isIdle = true;
      while (isIdle && !hasDuties() && inFlight.unsentBytes() == 0 && !isClosed && lost != current) {
        if (hasWork.awaitNanos(untilNs - System.nanoTime()) <= 0) {
          break;
        }
      }
      isIdle = false;
      long sinceNs = System.nanoTime() - sentNs;
      boolean isSmall = inFlight.unsentBytes() > 0 && inFlight.unsentBytes() < LARGE_BYTES;
      if (isSmall && sinceNs < TOGETHER_NS && !hasDuties()) {
        hasWork.awaitNanos(TOGETHER_NS - sinceNs);
      }
      sentNs = System.nanoTime();
    } catch (InterruptedException error) {
      throw new IllegalStateException("this thread is never interrupted", error);
    }
  }

  private boolean hasDuties() {
    return mustPong || mustFlush && flushPing == 0;
  }

  /** Answers, requests and late messages; null where there is none, and new ones are to be sent. */
  private byte[] due() {
    long nowNs = System.nanoTime();
    if (mustPong) {
      mustPong = false;
      return "PONG\r\n".getBytes(StandardCharsets.US_ASCII);
    }
    if (mustFlush && flushPing == 0 && inFlight.isSent()) {
      return pingNow();
    }
    if (nowNs - pingedNs > PING_NS) {
      if (nowNs - receivedNs > 1e9 * SILENT_S) {
        connection.close(); // its reader then sees the end
      }
      return pingNow();
    }
    if (nowNs - checkedNs < acking.tickNs()) {
      return null;
    }
    checkedNs = nowNs;
    tick(nowNs);
    byte[] late = acking.late(nowNs);
    return late.length == 0 ? null : late;
  }

  private byte[] pingNow() {
    pingedNs = System.nanoTime();
    pings++;
    if (mustFlush && flushPing == 0 && inFlight.isSent()) {
      flushPing = pings;
    }
    return "PING\r\n".getBytes(StandardCharsets.US_ASCII);
  }

  /** Fails what has waited for too long. */
  private void tick(long nowNs) {
    boolean isAwaited = !inFlight.isEmpty() || !inFlight.isSent() || mustFlush;
    if (!isAwaited || failure != null) {
      return;
    }
    NatslogException overdue = acking.overdue(nowNs);
    if (connection == null && nowNs - upNs > 1e9 * settings.ackTimeoutS) {
      fail(whyDown());
    } else if (overdue != null) {
      fail(overdue);
    }
  }

  private void fail(NatslogException reason) {
    lock.lock();
    try {
      failure = failure == null ? reason : failure;
      hasCome.signalAll();
    } finally {
      lock.unlock();
    }
  }

  // ---- the connection ----

  /** The connection that is up, or a new one; null where the publisher was closed. */
  private NatsConnection connected() {
    while (true) {
      List<NatsUrl> tried;
      lock.lock();
      try {
        if (connection != null && connection != lost) {
          if (!isClosed) {
            return connection;
          }
          connection.close();
        }
        connection = null;
        if (isClosed) {
          return null;
        }
        tick(System.nanoTime());
        tried = new ArrayList<>(servers);
      } finally {
        lock.unlock();
      }
      if (!isConnectedToOneOf(tried)) {
        Broker.pause(RETRY_S);
      }
    }
  }

  private boolean isConnectedToOneOf(List<NatsUrl> tried) {
    for (NatsUrl url : tried) {
      try {
        NatsConnection found = NatsConnection.open(url, settings.login, "natslog-spark-sink");
        byte[] subscribe = ("SUB " + inbox + ".* 1\r\n").getBytes(StandardCharsets.US_ASCII);
        found.write(subscribe, 0, subscribe.length, SILENT_S);
        noteUp(found);
        start("natslog-acks", () -> read(found));
        return true;
      } catch (IOException error) {
        note(error);
      } catch (NatslogException error) { // a file of the login
        note(new NatsConnection.Refused(error.getMessage(), false));
      }
    }
    return false;
  }

  private void noteUp(NatsConnection found) {
    lock.lock();
    try {
      connection = found;
      connections++;
      upNs = System.nanoTime();
      receivedNs = upNs;
      pings = 0;
      pongs = 0;
      flushPing = 0;
      problem = null;
      NatsUrl first = servers.iterator().next();
      for (String other : found.others) {
        NatsUrl url = NatsUrl.of(other);
        servers.add(new NatsUrl(first.isSecure(), url.host(), url.port(), first.user(), first.password()));
      }
      hasCome.signalAll();
    } finally {
      lock.unlock();
    }
  }

  private void note(IOException error) {
    lock.lock();
    try {
      problem = error;
    } finally {
      lock.unlock();
    }
  }

  private void noteLost(NatsConnection ended, IOException end) {
    lock.lock();
    try {
      if (lost != ended && connection == ended) {
        lost = ended;
        problem = lastError.isEmpty() ? end : new IOException(lastError, end);
        upNs = System.nanoTime();
        if (!isClosed) {
          LOG.warn("the connection to NATS at {} was lost ({}); connecting again",
              NatsUrl.shown(settings.natsUrl), problem.getMessage());
        }
        hasWork.signal();
      }
    } finally {
      lock.unlock();
    }
  }

  private NatslogException whyDown() {
    String at = NatsUrl.shown(settings.natsUrl);
    if (problem instanceof NatsConnection.Refused refused) {
      return refused.isLogin
          ? new NatslogException("nats_login_refused",
              "the NATS server at " + at + " refused the login (" + refused.getMessage(), false, Map.of())
          : unavailable("cannot connect to NATS at " + at + ": " + refused.getMessage());
    }
    String why = problem == null ? "no answer" : problem.getMessage();
    return unavailable("no NATS server responds at " + at + " (" + why + "): start one, or correct the URL");
  }

  // ---- the thread that reads ----

  private void read(NatsConnection current) {
    try {
      current.readAll(this);
    } catch (IOException error) {
      current.close();
      noteLost(current, error);
    } catch (RuntimeException error) { // a defect: the task must not wait for ever
      fail(new NatslogException("internal", "the reader of acks failed: " + error, false, Map.of()));
      throw error;
    }
  }

  @Override
  public void message(byte[] buffer, int subject, int subjectEnd, int payload, int payloadEnd) {
    long number = NatsConnection.number(buffer, subject + replyPrefix.length, subjectEnd);
    lock.lock();
    try {
      acking.answered(number, buffer, payload, payloadEnd, System.nanoTime());
    } finally {
      lock.unlock();
    }
  }

  @Override
  public void ping() {
    lock.lock();
    try {
      mustPong = true;
      hasWork.signal();
    } finally {
      lock.unlock();
    }
  }

  @Override
  public void pong() {
    lock.lock();
    try {
      pongs++;
      if (mustFlush && flushPing > 0 && pongs >= flushPing) {
        mustFlush = false;
      }
    } finally {
      lock.unlock();
    }
  }

  @Override
  public void error(String text) {
    if (text.toLowerCase(Locale.ROOT).contains("permissions violation")) {
      fail(Acking.failed("the NATS server refused messages: " + text));
    }
    lock.lock();
    try {
      lastError = text;
    } finally {
      lock.unlock();
    }
  }

  @Override
  public void caughtUp() {
    lock.lock();
    try {
      receivedNs = System.nanoTime();
      hasCome.signalAll();
    } finally {
      lock.unlock();
    }
  }
}
