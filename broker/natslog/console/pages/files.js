// Where a stream lies: how far each replica is, and the files of the log at the leader.

import { html } from "../vendor/preact.js";
import { get, inPath } from "../api.js";
import { bytes, count, time } from "../format.js";
import { Failure, Table, Waiting, useCall } from "../parts.js";

const REPLICAS = [
  { name: "broker", title: "Broker", value: (row) => row.broker, show: (row) => `${row.broker}${row.leads ? " (leader)" : ""}` },
  { name: "in_sync", title: "In sync", value: (row) => (row.in_sync ? 0 : 1), show: (row) => html`<span class=${row.in_sync ? "" : "bad"}>${row.in_sync ? "yes" : "no"}</span>` },
  { name: "end", title: "Has all below offset", value: (row) => row.end, show: (row) => count(row.end), isNumber: true },
  { name: "behind", title: "Messages behind", value: (row) => row.behind, show: (row) => count(row.behind), isNumber: true },
];
const SEGMENTS = [
  { name: "start", title: "First offset", value: (row) => row.start, show: (row) => count(row.start), isNumber: true },
  { name: "end", title: "End", value: (row) => row.end, show: (row) => count(row.end), isNumber: true },
  { name: "bytes", title: "Size", value: (row) => row.bytes, show: (row) => bytes(row.bytes), isNumber: true },
  { name: "sealed", title: "State", value: (row) => (row.sealed ? 1 : 0), show: (row) => (row.sealed ? "sealed" : "active") },
  { name: "newest", title: "Newest message", value: (row) => row.newest, show: (row) => time(row.newest) },
];

export function Files({ name }) {
  const path = `/v1/streams/${inPath(name)}`;
  const [replicas, failure] = useCall(() => get(`${path}/replicas`), [], 2);
  const [segments, error] = useCall(() => get(`${path}/segments`), [], 30);
  const [removed, refused] = useCall(() => get(`${path}/scrub`), [], 30);
  return html`
    <section aria-label="Replicas">
      <h2>Replicas</h2>
      <${Failure} error=${failure} />
      ${replicas === null
        ? !failure && html`<${Waiting} />`
        : html`<${Table} rows=${replicas.replicas.map((one) => ({ ...one, key: one.broker }))} columns=${REPLICAS}
            caption=${`The log ends at offset ${count(replicas.end)}; all replicas in sync have what is below ${count(replicas.high_watermark)}`} />`}
    </section>
    <section aria-label="Files">
      <h2>Files of the leader</h2>
      <${Failure} error=${error} />
      ${segments === null
        ? !error && html`<${Waiting} />`
        : html`<${Table} rows=${segments.segments.map((one) => ({ ...one, key: one.start }))} columns=${SEGMENTS} first="start" isDescending=${true}
            caption=${`Segments, the newest ${count(segments.segments.length)} of ${count(segments.total)}`} />`}
    </section>
    <section aria-label="Scrubbing">
      <h2>Checks of the files</h2>
      <${Failure} error=${refused} />
      ${removed?.replicas.map(
        (one) => html`<p key=${one.broker}>Broker ${one.broker}:${" "}
          ${one.problem
            ? one.problem.message
            : one.damaged.length
              ? html`<span class="bad">${count(one.damaged.length)} damaged ranges, the first from offset ${count(one.damaged[0].start)}</span>`
              : one.scrubbed_at
                ? `all sealed files were read back without damage, last at ${time(one.scrubbed_at)}`
                : "no pass was completed yet"}${one.lost?.length ? `; ${count(one.lost.length)} ranges were accepted as lost` : ""}</p>`,
      )}
    </section>
  `;
}
