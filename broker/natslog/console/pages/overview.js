import { html } from "../vendor/preact.js";
import { get } from "../api.js";
import { byteRate, bytes, count, milliseconds, rate, seconds } from "../format.js";
import { useLive } from "../live.js";
import { Fact, Failure, Plot, Waiting, ofBrokers, useCall } from "../parts.js";

export function Findings({ findings, cluster }) {
  if (!findings.length) {
    const [brokers, streams] = [cluster.brokers.length, count(cluster.streams)];
    return html`<p class="healthy" role="status">
      Healthy: ${brokers} of ${brokers} brokers, ${streams} of ${streams} streams with a leader, all replicas in sync.
    </p>`;
  }
  return html`<ul class="findings" role="status">
    ${findings.map(
      (one) => html`<li key=${one.code + one.where} class=${one.level}>
        <p><strong>${one.level === "error" ? "Error" : "Warning"}, ${one.where}:</strong> ${one.what}</p>
        ${one.streams.length > 1 &&
        html`<p>${one.streams.map((name) => html`<a href=${`#/streams/${encodeURIComponent(name)}`}>${name}</a> `)}
          ${one.count > one.streams.length && html`and ${count(one.count - one.streams.length)} more`}</p>`}
        <p>What to do: ${one.remedy} <code>${one.code}</code></p>
      </li>`,
    )}
  </ul>`;
}

export function added(brokers, name) {
  const all = Object.values(brokers).map((series) => series[name] ?? []);
  const length = Math.max(0, ...all.map((values) => values.length));
  return Array.from({ length }, (_, at) =>
    all.reduce((sum, values) => sum + (values[at - (length - values.length)] ?? 0), 0),
  );
}

export function Overview({ who }) {
  const { overview, streams } = useLive(who.may_monitor);
  const [history, error] = useCall(() => (who.may_monitor ? get("/v1/history") : Promise.resolve(null)), [], 30);
  if (!who.may_monitor) {
    return html`<h1>Overview</h1>
      <p>The overview needs the action <code>monitor</code>. An administrator permits it with${" "}
      <code>natslog acl add ${who.identity || "NAME"} monitor '*'</code>.</p>`;
  }
  if (overview === null) return html`<h1>Overview</h1><${Waiting} />`;
  const { cluster, broker_stats, findings } = overview;
  const sum = (name) => broker_stats.reduce((total, one) => total + one[name], 0);
  const commits = sum("commits_per_s");
  const mean = (name) => milliseconds(commits ? broker_stats.reduce((total, one) => total + one[name] * one.commits_per_s, 0) / commits : null);
  const full = broker_stats.map((one) => one.disk_full_s).filter((value) => value !== null);
  return html`
    <h1>Overview</h1>
    <${Findings} findings=${findings} cluster=${cluster} />
    <dl class="facts">
      <${Fact} name="Messages">${rate(sum("messages_per_s"))}<//>
      <${Fact} name="Stored">${byteRate(sum("stored_bytes_per_s"))}<//>
      <${Fact} name="Sent to readers">${byteRate(sum("sent_bytes_per_s"))}<//>
      <${Fact} name="Time to acks">${mean("ack_ms")}<//>
      <${Fact} name="Commit (fsync)">${mean("commit_ms")}<//>
      <${Fact} name="Streams">${count(streams.size)}<//>
      <${Fact} name="Brokers">${cluster.brokers.filter((one) => one.alive).length} of ${cluster.brokers.length}<//>
      <${Fact} name="Least free disk">${bytes(Math.min(...broker_stats.map((one) => one.disk_free_bytes)))}<//>
      <${Fact} name="Disk full in">${full.length ? seconds(Math.min(...full)) : "no trend"}<//>
    </dl>
    <${Failure} error=${error} />
    ${history &&
    html`<div class="plots">
      <${Plot} title="Messages stored" everyS=${history.every_s} show=${rate}
        series=${{ cluster: added(history.brokers, "messages_per_s") }} />
      <${Plot} title="Bytes sent to readers" everyS=${history.every_s} show=${byteRate}
        series=${{ cluster: added(history.brokers, "sent_bytes_per_s") }} />
      <${Plot} title="Time to acks" everyS=${history.every_s} show=${milliseconds} series=${ofBrokers(history, "ack_ms", true)} />
      <${Plot} title="Free disk" everyS=${history.every_s} show=${bytes} series=${ofBrokers(history, "disk_free_bytes")} />
    </div>`}
    <p class="small">natslog ${cluster.version}, cluster ${cluster.cluster_id}; as of ${overview.at.slice(11, 19)} UTC.</p>
  `;
}
