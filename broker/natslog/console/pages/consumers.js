// Readers of streams: cursors of Spark queries and programs, and JetStream consumers, and how far each is behind.

import { html, useState } from "../vendor/preact.js";
import { get, inPath } from "../api.js";
import { bytes, count, seconds, time } from "../format.js";
import { Fact, Failure, Plot, Table, Waiting, useCall } from "../parts.js";

const EVERY_S = 10;

const lag = (name) => (row) => row.lag?.[name] ?? null;
const number = (name) => (row) => row.jetstream?.[name] ?? null;
const isConsumer = (row) => row.consumer.startsWith("jetstream:");
const ageS = (row) => (Date.now() - Date.parse(row.timestamp)) / 1000;

// As `natslog cursor ls` states it.
function stateOf({ lag, rewound, stopped, offset, timestamp }) {
  if (!lag) return "lag unknown";
  if (lag.lost_rows) return `${count(lag.lost_rows)} deleted by retention before they were read`;
  if (lag.beyond_rows) return `${count(lag.beyond_rows)} beyond the end`;
  if (rewound) return `moved back from ${count(rewound.from)}`;
  if (stopped) return `stopped for ${seconds(ageS({ timestamp }))}`;
  return (lag.rows ?? lag.high_watermark - offset) > 0 ? "behind" : "ok";
}

const COLUMNS = (onChoose) => [
  {
    name: "consumer",
    title: "Consumer",
    value: (row) => row.consumer,
    show: (row) => html`<button type="button" class="plain" onClick=${() => onChoose(row)}>${row.consumer}</button>`,
    isText: true,
  },
  {
    name: "stream",
    title: "Stream",
    value: (row) => row.stream,
    show: (row) => html`<a href=${`#/streams/${encodeURIComponent(row.stream)}`}>${row.stream}</a>`,
    isText: true,
  },
  { name: "offset", title: "Offset", value: (row) => row.offset, show: (row) => count(row.offset), isNumber: true },
  { name: "rows", title: "Behind", value: lag("rows"), show: (row) => count(lag("rows")(row)), isNumber: true },
  { name: "bytes", title: "Bytes", value: lag("bytes"), show: (row) => bytes(lag("bytes")(row)), isNumber: true },
  { name: "seconds", title: "Oldest", value: lag("seconds"), show: (row) => seconds(lag("seconds")(row)), isNumber: true },
  ...[["num_pending", "Pending"], ["num_ack_pending", "Ack pending"], ["num_redelivered", "Redelivered"]].map(([name, title]) => (
    { name, title, value: number(name), show: (row) => count(number(name)(row)), isNumber: true }
  )),
  { name: "timestamp", title: "Set", value: (row) => row.timestamp, show: (row) => time(row.timestamp), isText: true },
  { name: "state", title: "State", value: stateOf, show: (row) => html`<span class=${/^(ok|behind)$/.test(stateOf(row)) ? "" : "bad"}>${stateOf(row)}</span>`, isText: true },
];

// What the JetStream API states of a consumer, as CONSUMER.INFO does.
function Numbers({ row }) {
  const path = `/v1/cursors/${inPath(row.consumer)}/${inPath(row.stream)}`;
  const [found, error] = useCall(() => get(path), [path], EVERY_S);
  if (error) return html`<${Failure} error=${error} />`;
  if (found === null) return html`<${Waiting} />`;
  const numbers = found.jetstream;
  if (!numbers) return html`<p>Its numbers are not known. Either this consumer is not served now: the broker that leads ${row.stream} serves it if it has
    a <code>nats_leaf_url</code> and the JetStream API is on. Or you may not read all subjects of the stream.</p>`;
  const sequences = (pair) => `${count(pair.consumer_seq)}, in the stream ${count(pair.stream_seq)}`;
  return html`<dl class="facts">
    <${Fact} name="Pending: still to be delivered">${numbers.num_pending === null ? "being counted" : count(numbers.num_pending)}<//>
    <${Fact} name="Ack pending: delivered, not acked">${count(numbers.num_ack_pending)}<//>
    <${Fact} name="Redelivered">${count(numbers.num_redelivered)}<//>
    <${Fact} name="Waiting pull requests">${count(numbers.num_waiting)}<//>
    <${Fact} name="Last delivered">${sequences(numbers.delivered)}<//>
    <${Fact} name="Ack floor">${sequences(numbers.ack_floor)}<//>
  </dl>`;
}

function Lag({ row }) {
  const [history, error] = useCall(() => get("/v1/history", { stream: row.stream }), [row.stream], 30);
  if (error) return html`<${Failure} error=${error} />`;
  if (history === null) return html`<${Waiting} />`;
  const lags = history.lags?.[row.consumer];
  const of = `${row.consumer} is behind on ${row.stream}`;
  if (!lags) return html`<p>Nothing is known of the last hour of ${row.consumer}: it is new, or its broker has just started.</p>`;
  return html`<div class="plots">
    <${Plot} title=${`Messages that ${of}`} everyS=${history.lags_every_s} show=${count} series=${{ behind: lags.rows }} />
    <${Plot} title=${`Bytes that ${of}`} everyS=${history.lags_every_s} show=${bytes} series=${{ behind: lags.bytes }} />
    <${Plot} title="Age of the oldest unread message" everyS=${history.lags_every_s} show=${seconds} series=${{ behind: lags.seconds }} />
  </div>`;
}

export function Consumers({ who }) {
  const [cursors, error, again] = useCall(() => get("/v1/cursors"), [], EVERY_S);
  const [chosen, choose] = useState(null);
  const stopped = (cursors ?? []).filter((row) => row.stopped);
  return html`
    <h1>Consumers</h1>
    <p>Cursors of Spark queries and programs, and JetStream consumers (<code>jetstream:NAME</code>, by their ack floor).${" "}
      <button type="button" onClick=${again}>Refresh</button></p>
    <${Failure} error=${error} />
    ${stopped.length > 0 &&
    html`<p class="failure" role="status">${count(stopped.length)} of ${count(cursors.length)} have messages to read, and have not moved for a minute:${" "}
      ${stopped.slice(0, 5).map((row) => row.consumer).join(", ")}${stopped.length > 5 ? ", …" : ""}. Check that they are running.</p>`}
    ${cursors === null
      ? !error && html`<${Waiting} />`
      : html`<${Table} rows=${cursors.map((one) => ({ ...one, key: `${one.consumer}/${one.stream}` }))} columns=${COLUMNS(choose)}
          caption="Consumers" searches=${(row) => `${row.consumer} ${row.stream}`} first="rows" isDescending=${true} />`}
    ${chosen && html`<h2>${chosen.consumer} on ${chosen.stream}</h2>`}
    ${chosen && isConsumer(chosen) && html`<${Numbers} key=${chosen.key} row=${chosen} />`}
    ${chosen &&
    (who.may_monitor
      ? html`<${Lag} key=${chosen.key} row=${chosen} />`
      : html`<p>The last hour of a consumer needs the action <code>monitor</code>.</p>`)}
  `;
}
