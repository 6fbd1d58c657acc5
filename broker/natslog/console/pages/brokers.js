// The brokers: what each does, and what changes where replicas and leaders are, with its effect stated before.

import { html, useRef, useState } from "../vendor/preact.js";
import { get, patch, post, remove } from "../api.js";
import { byteRate, bytes, count, milliseconds, rate, seconds, share } from "../format.js";
import { useLive } from "../live.js";
import { Fact, Failure, Plot, Table, Typed, Waiting, ofBrokers, useCall } from "../parts.js";

// When a replica has what it lacks, if it goes on as since the page was opened.
function useCatchUp(behind) {
  const first = useRef(null);
  if (!behind || (first.current && behind > first.current.behind)) first.current = null;
  if (!behind) return null;
  const now = Date.now() / 1000;
  first.current ??= { now, behind };
  const perS = (first.current.behind - behind) / (now - first.current.now);
  return perS > 0 ? behind / perS : null;
}

function Broker({ broker, stats, isMetadataLeader, mayAdminister }) {
  const role = isMetadataLeader ? "metadata leader" : broker.role;
  const left = useCatchUp(stats?.behind);
  const nats = stats?.nats_connections;
  return html`<section class="card" aria-label=${`Broker ${broker.id}`}>
    <h2>Broker ${broker.id} <span class=${broker.alive ? "tag" : "tag bad"}>${broker.alive ? role : "down"}</span>
      ${broker.draining && html`<span class="tag">draining</span>`}</h2>
    ${stats?.problem && html`<p class="failure">${stats.problem}</p>`}
    <dl class="facts">
      <${Fact} name="URL">${broker.url ?? "not registered"}<//>
      <${Fact} name="Rack">${broker.rack || "none"}<//>
      <${Fact} name="Leads">${count(broker.leads)} streams, internal ones included<//>
      <${Fact} name="Replicas">${count(broker.in_sync)} of ${count(broker.replicas)} in sync<//>
      ${stats?.behind > 0 &&
      html`<${Fact} name="Catching up">${count(stats.behind)} messages${left === null ? "" : `, about ${seconds(left)} more`}<//>`}
      <${Fact} name="Connections to NATS"><span class=${nats && nats[0] < nats[1] ? "bad" : ""}>${nats ? `${nats[0]} of ${nats[1]}` : "–"}</span><//>
      <${Fact} name="Messages">${rate(stats?.messages_per_s)}<//>
      <${Fact} name="Sent">${byteRate(stats?.sent_bytes_per_s)}<//>
      <${Fact} name="Time to acks">${milliseconds(stats?.ack_ms || null)}<//>
      <${Fact} name="Commit (fsync)">${milliseconds(stats?.commit_ms || null)}<//>
      <${Fact} name="Stored">${bytes(stats?.store_bytes)}<//>
      <${Fact} name="Free disk">${bytes(stats?.disk_free_bytes)}<//>
      <${Fact} name="Memory">${bytes(stats?.memory_bytes)}<//>
      <${Fact} name="Processor">${share(stats?.cpu_share)} of a core<//>
    </dl>
    ${mayAdminister && html`<${Actions} broker=${broker} isMetadataLeader=${isMetadataLeader} />`}
  </section>`;
}

// What a drain moves, stated before it begins; then drain, stop draining, remove, and give the metadata leadership.
function Actions({ broker, isMetadataLeader }) {
  const [plan, setPlan] = useState(null);
  const [error, setError] = useState(null);
  const [done, setDone] = useState("");
  const path = `/v1/cluster/brokers/${broker.id}`;
  const attempt = async (work, text) => {
    setError(null);
    setDone("");
    try {
      await work();
      setPlan(null);
      setDone(text);
    } catch (failure) {
      setError(failure);
    }
  };
  const preview = async () => {
    setError(null);
    try {
      setPlan(await get("/v1/cluster/plan", { drain: broker.id }));
    } catch (failure) {
      setError(failure);
    }
  };
  const name = `broker ${broker.id}`;
  return html`<details>
    <summary>Drain, remove, transfer</summary>
    <p class="tools">
      ${broker.alive && !isMetadataLeader && broker.role === "voter" &&
      html`<button type="button" onClick=${() => attempt(() => post("/v1/cluster/transfer", { to: broker.id }), "The metadata leadership is being transferred.")}>Make it the metadata leader</button>`}
      ${broker.draining
        ? html`<button type="button" onClick=${() => attempt(() => patch(path, { draining: false }), "It may hold replicas again.")}>Stop draining</button>`
        : html`<button type="button" onClick=${preview}>Show what draining would move</button>`}
    </p>
    ${plan && html`
      ${plan.problem
        ? html`<p class="failure" role="status">It cannot be drained: ${plan.problem}</p>`
        : html`<p role="status">${plan.moves.length
            ? `${count(plan.moves.length)} replicas move to other brokers, about ${bytes(plan.moves.reduce((sum, one) => sum + one.copied_bytes, 0))}. The streams stay available.`
            : "It has no replicas: nothing moves."}</p>
          <${Moves} plan=${plan} />
          <button type="button" onClick=${() => attempt(() => patch(path, { draining: true }), "It is being drained.")}>Drain broker ${broker.id}</button>`}`}
    ${broker.replicas === 0 || !broker.alive
      ? html`<${Typed} name=${name} action="Remove" what=${broker.replicas ? `Remove it for good, although ${count(broker.replicas)} replicas are on it: only if its disk is lost.` : "Take it out of the cluster."}
          onDone=${() => attempt(() => remove(`${path}${broker.replicas ? "?force=true" : ""}`), "It was removed.")} />`
      : html`<p class="small">It can be removed when it has been drained.</p>`}
    <${Failure} error=${error} />
    ${done && html`<p class="healthy" role="status">${done}</p>`}
  </details>`;
}

const MOVES = [
  { name: "stream", title: "Stream", value: (row) => row.stream },
  { name: "before", title: "On brokers", value: (row) => row.before.join(" ") },
  { name: "after", title: "Then on", value: (row) => row.after.join(" ") },
  { name: "copied_bytes", title: "To copy", value: (row) => row.copied_bytes, show: (row) => bytes(row.copied_bytes), isNumber: true },
];

function Moves({ plan }) {
  return plan.moves.length > 0 &&
    html`<${Table} rows=${plan.moves.map((one) => ({ ...one, key: one.stream }))} columns=${MOVES} caption="Moves" searches=${(row) => row.stream} />`;
}

const LOADS = [
  { name: "id", title: "Broker", value: (row) => row.id, isNumber: true },
  { name: "replicas", title: "Replicas", value: (row) => row.replicas, show: (row) => `${count(row.replicas)} → ${count(row.replicas_after)}`, isNumber: true },
  { name: "leaders", title: "Preferred leaders", value: (row) => row.leaders, show: (row) => `${count(row.leaders)} → ${count(row.leaders_after)}`, isNumber: true },
  { name: "bytes", title: "Bytes", value: (row) => row.bytes, show: (row) => `${bytes(row.bytes)} → ${bytes(row.bytes_after)}`, isNumber: true },
];

function Rebalance() {
  const [plan, setPlan] = useState(null);
  const [error, setError] = useState(null);
  const ask = () => get("/v1/cluster/plan").then((found) => (setPlan(found), setError(null)), setError);
  return html`<section aria-label="Balance">
    <h2>Balance</h2>
    <p>Shows the fewest moves that even out replicas, leaders and bytes, for example after a broker was added.${" "}
      <button type="button" onClick=${ask}>Show the moves</button></p>
    <${Failure} error=${error} />
    ${plan && html`
      <${Table} rows=${plan.brokers.map((one) => ({ ...one, key: one.id }))} columns=${LOADS} caption="Loads, now and after the moves" />
      ${plan.moves.length
        ? html`<p role="status">${count(plan.moves.length)} streams would be moved. To move them, four at a time: <code>natslog cluster rebalance</code></p>`
        : html`<p role="status">The brokers have even loads: nothing is to be moved.</p>`}
      <${Moves} plan=${plan} />`}
  </section>`;
}

export function Brokers({ who }) {
  const { overview } = useLive(who.may_monitor);
  const [history, error] = useCall(() => (who.may_monitor ? get("/v1/history") : Promise.resolve(null)), [], 30);
  if (!who.may_monitor) return html`<h1>Brokers</h1><p>The page needs the action <code>monitor</code>.</p>`;
  if (overview === null) return html`<h1>Brokers</h1><${Waiting} />`;
  const statsOf = new Map(overview.broker_stats.map((one) => [one.id, one]));
  const mayAdminister = !who.identity || who.may_administer;
  return html`
    <h1>Brokers</h1>
    ${overview.cluster.brokers.map(
      (one) => html`<${Broker} key=${one.id} broker=${one} stats=${statsOf.get(one.id)} mayAdminister=${mayAdminister}
        isMetadataLeader=${one.id === overview.cluster.metadata_leader} />`,
    )}
    <${Rebalance} />
    <${Failure} error=${error} />
    ${history &&
    html`<div class="plots">
      <${Plot} title="Processor, share of a core" everyS=${history.every_s} show=${share} series=${ofBrokers(history, "cpu_share")} />
      <${Plot} title="Memory" everyS=${history.every_s} show=${bytes} series=${ofBrokers(history, "memory_bytes")} />
      <${Plot} title="Time to acks" everyS=${history.every_s} show=${milliseconds} series=${ofBrokers(history, "ack_ms", true)} />
      <${Plot} title="Commit (fsync)" everyS=${history.every_s} show=${milliseconds} series=${ofBrokers(history, "commit_ms", true)} />
    </div>`}
  `;
}
