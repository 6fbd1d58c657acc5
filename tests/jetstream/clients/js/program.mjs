// Scenarios of a JetStream client, in JavaScript: what @nats-io/jetstream receives from a server, one line of JSON per
// step.
//
//     node program.mjs nats://127.0.0.1:4222 [SCENARIO ...]
//
// The lines state nothing that differs from run to run (times, generated names), so that two servers can be compared. A
// scenario that fails prints the error and the next one runs; the exit code is then 1. Scenarios use streams of their
// own.

import { acks, redelivery, inProgress, workQueue, purge } from "./acks.mjs";
import { consumers, ordered, pull, consume, push, queueGroup } from "./consumers.mjs";
import { keyValue, keyValueWatch, objects } from "./stores.mjs";
import { Seen, errorOf, inTime } from "./seen.mjs";

const SCENARIO_WITHIN_MS = 45_000;

const SCENARIOS = {
  key_value: keyValue,
  key_value_watch: keyValueWatch,
  objects,
  consumers,
  ordered,
  pull,
  consume,
  push,
  queue_group: queueGroup,
  acks,
  redelivery,
  in_progress: inProgress,
  work_queue: workQueue,
  purge,
};

const [url, ...chosen] = process.argv.slice(2);
let hasFailed = false;
for (const [name, scenario] of Object.entries(SCENARIOS)) {
  if (chosen.length > 0 && !chosen.includes(name)) continue;
  const seen = await Seen.of(url, name);
  try {
    await inTime(scenario(seen), name, SCENARIO_WITHIN_MS);
  } catch (error) {
    seen.saw("failed", errorOf(error));
    hasFailed = true;
  }
  await seen.nc.close();
}
process.exit(hasFailed ? 1 : 0);
