import { html, useState } from "../vendor/preact.js";
import { post } from "../api.js";
import { byteRate, bytes, count, quoted, rate, visible } from "../format.js";
import { useLive } from "../live.js";
import { Failure, Table, Waiting } from "../parts.js";

// Buckets of key-value and object stores are streams with such names.
const kindOf = (name) => (name.startsWith("KV_") ? "key-value bucket" : name.startsWith("OBJ_") ? "object store" : "");
const subjectsOf = ({ subjects = [] }) => subjects.slice(0, 3).join(", ") + (subjects.length > 3 ? ", …" : "");
const COLUMNS = [
  {
    name: "name",
    title: "Name",
    value: (row) => row.name,
    show: (row) => html`<a href=${`#/streams/${encodeURIComponent(row.name)}`}>${row.name}</a>
      ${[kindOf(row.name), row.state].filter(Boolean).map((one) => html` <span class="tag">${one}</span>`)}`,
    isText: true,
  },
  { name: "subjects", title: "Subject", value: subjectsOf, show: (row) => visible(subjectsOf(row)), isText: true },
  { name: "messages_per_s", title: "Messages/s", value: (row) => row.messages_per_s, show: (row) => rate(row.messages_per_s), isNumber: true },
  { name: "bytes_per_s", title: "Bytes/s", value: (row) => row.bytes_per_s, show: (row) => byteRate(row.bytes_per_s), isNumber: true },
  { name: "messages", title: "Messages", value: (row) => row.messages, show: (row) => count(row.messages), isNumber: true },
  { name: "bytes", title: "Bytes", value: (row) => row.bytes, show: (row) => bytes(row.bytes), isNumber: true },
  {
    name: "in_sync",
    title: "In sync",
    value: (row) => row.in_sync - row.replicas,
    show: (row) => html`<span class=${row.in_sync < row.replicas ? "bad" : ""}>${row.in_sync} of ${row.replicas}</span>`,
    isNumber: true,
  },
  { name: "leader", title: "Leader", value: (row) => row.leader, show: (row) => (row.leader === null ? html`<span class="bad">none</span>` : `broker ${row.leader}`) },
  { name: "max_age", title: "Max age", value: (row) => row.max_age, show: (row) => row.max_age ?? "none" },
];

// The same as a line of the command line, so that what was tried here can be put into a script.
function commandOf({ name, subject, replicas, max_age }) {
  const parts = ["natslog stream create", quoted(name || "NAME"), "--subject", quoted(subject || "SUBJECT")];
  if (replicas) parts.push("--replicas", replicas);
  if (max_age) parts.push("--max-age", quoted(max_age));
  return parts.join(" ");
}

function Create() {
  const [given, setGiven] = useState({ name: "", subject: "", replicas: "", max_age: "" });
  const [error, setError] = useState(null);
  const field = (name) => ({ name, value: given[name], onInput: (event) => setGiven({ ...given, [name]: event.target.value }) });
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    const body = { name: given.name, subject: given.subject };
    if (given.replicas) body.replicas = Number(given.replicas);
    if (given.max_age) body.max_age = given.max_age;
    try {
      await post("/v1/streams", body);
      location.hash = `#/streams/${encodeURIComponent(given.name)}`;
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<details class="create">
    <summary>Create a stream</summary>
    <form onSubmit=${submit}>
      <label>Name <input ...${field("name")} required autocomplete="off" /></label>
      <label>Subject <input ...${field("subject")} required autocomplete="off" placeholder="orders.>" /></label>
      <label>Replicas <input ...${field("replicas")} type="number" min="1" max="9" placeholder="default" /></label>
      <label>Max age <input ...${field("max_age")} autocomplete="off" placeholder="7d; empty: none" /></label>
      <button type="submit">Create</button>
    </form>
    <p>The same on the command line: <code>${commandOf(given)}</code></p>
    <${Failure} error=${error} />
  </details>`;
}

export function Streams({ who }) {
  const { overview, streams } = useLive(who.may_monitor);
  if (!who.may_monitor) return html`<h1>Streams</h1><p>The list needs the action <code>monitor</code>.</p>`;
  return html`
    <h1>Streams</h1>
    <${Create} />
    ${overview === null
      ? html`<${Waiting} />`
      : html`<${Table} rows=${[...streams.values()]} columns=${COLUMNS} caption="Streams" searches=${(row) => `${row.name} ${subjectsOf(row)}`} />`}
  `;
}
