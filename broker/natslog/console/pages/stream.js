// One stream: what it is, and its parts, which the address names (?part=settings).

import { html, useState } from "../vendor/preact.js";
import { get, inPath } from "../api.js";
import { bytes, count, rate, time, visible } from "../format.js";
import { Fact, Failure, Plot, Table, Waiting, useCall } from "../parts.js";
import { Browse } from "./browse.js";
import { Files } from "./files.js";
import { Publish } from "./publish.js";
import { Settings } from "./settings.js";

const SUBJECTS = [
  { name: "subject", title: "Subject", value: (row) => row.subject, show: (row) => visible(row.subject), isText: true },
  { name: "count", title: "Messages", value: (row) => row.count, show: (row) => count(row.count), isNumber: true },
  { name: "first", title: "First offset", value: (row) => row.first, show: (row) => count(row.first), isNumber: true },
  { name: "last", title: "Last offset", value: (row) => row.last, show: (row) => count(row.last), isNumber: true },
];

function Subjects({ name }) {
  const [isAsked, ask] = useState(false);
  return html`<section>
    <h2>Subjects</h2>
    ${isAsked
      ? html`<${AskedSubjects} name=${name} />`
      : html`<p>The first request reads the subjects of the whole stream. <button type="button" onClick=${() => ask(true)}>Show subjects</button></p>`}
  </section>`;
}

function AskedSubjects({ name }) {
  const [page, error] = useCall(() => get(`/v1/streams/${inPath(name)}/subjects`), []);
  if (error) return html`<${Failure} error=${error} />`;
  if (page === null) return html`<${Waiting} />`;
  const rows = page.subjects.map((one) => ({ ...one, key: one.subject }));
  return html`<${Table} rows=${rows} columns=${SUBJECTS} caption=${`Subjects, ${count(rows.length)} of ${count(page.total)}`}
    searches=${(row) => row.subject} first="count" isDescending=${true} />`;
}

function Facts({ info }) {
  const packed = info.compressed;
  const retention = [
    info.max_age && `max age ${info.max_age}`,
    info.max_bytes && `max bytes ${bytes(info.max_bytes)}`,
    info.max_messages && `max messages ${count(info.max_messages)}`,
    info.max_messages_per_subject && `max messages per subject ${count(info.max_messages_per_subject)}`,
    info.compact && "compacted by key",
  ];
  return html`<dl class="facts">
    <${Fact} name="Subject">${info.subjects.join(", ")}<//>
    <${Fact} name="Messages">${count(info.messages)}<//>
    <${Fact} name="Start and end offset">${count(info.log_start_offset)}, ${count(info.high_watermark)}<//>
    <${Fact} name="Removed messages">${count(info.messages == null ? null : info.high_watermark - info.log_start_offset - info.messages)}<//>
    <${Fact} name="Bytes">${bytes(info.bytes)}${info.segments ? ` in ${count(info.segments)} ${info.segments === 1 ? "file" : "files"}` : ""}<//>
    <${Fact} name="Compression">${info.compression}${packed ? `, ${packed.ratio} : 1` : ""}<//>
    <${Fact} name="Leader">${info.leader === null ? "none" : `broker ${info.leader}`}<//>
    <${Fact} name="Replicas">${info.replica_ids.map((id) => `${id}${info.isr.includes(id) ? "" : " (not in sync)"}`).join(", ")}${info.target_replica_ids ? `; moving to ${info.target_replica_ids.join(", ")}` : ""}<//>
    <${Fact} name="Limits">${retention.filter(Boolean).join(", ") || "none"}<//>
    <${Fact} name="State">${info.sealed ? "sealed" : info.paused ? "paused" : "recording"}<//>
    <${Fact} name="Created">${time(info.created)}<//>
  </dl>`;
}

function Messages({ name, info, who }) {
  const [history] = useCall(() => (who.may_monitor ? get("/v1/history", { stream: name }) : Promise.resolve(null)), [], 30);
  return html`
    ${info === null ? html`<${Waiting} />` : html`<${Facts} info=${info} />`}
    ${history?.stream?.messages_per_s &&
    html`<div class="plots">
      <${Plot} title="Messages stored" everyS=${history.every_s} show=${rate} series=${{ messages: history.stream.messages_per_s }} />
      <${Plot} title="Bytes" everyS=${history.every_s} show=${bytes} series=${{ bytes: history.stream.bytes }} />
    </div>`}
    <${Browse} name=${name} />
    <${Subjects} name=${name} />
  `;
}

// Those with `needsInfo` cannot begin before the stream is known.
const PARTS = {
  messages: { title: "Messages", shown: Messages },
  publish: { title: "Publish", shown: Publish, needsInfo: true },
  files: { title: "Replicas and files", shown: Files },
  settings: { title: "Settings", shown: Settings, needsInfo: true },
};

export function Stream({ name, query, who }) {
  const [info, error, again] = useCall(() => get(`/v1/streams/${inPath(name)}`), [], 30);
  if (info === null && error) return html`<h1>${name}</h1><${Failure} error=${error} />`;
  const chosen = PARTS[query.get("part")] ? query.get("part") : "messages";
  const part = PARTS[chosen];
  return html`
    <h1>${name}</h1>
    <nav class="parts" aria-label="Parts of the stream">
      ${Object.entries(PARTS).map(
        ([key, { title }]) => html`<a key=${key} href=${`#/streams/${inPath(name)}?part=${key}`} aria-current=${key === chosen ? "page" : undefined}>${title}</a>`,
      )}
    </nav>
    <${Failure} error=${error} />
    ${info?.problem && html`<p class="failure" role="alert">${info.problem.message}</p>`}
    ${info === null && part.needsInfo
      ? html`<${Waiting} />`
      : html`<${part.shown} key=${chosen} name=${name} info=${info} who=${who} onChange=${again} />`}
  `;
}
