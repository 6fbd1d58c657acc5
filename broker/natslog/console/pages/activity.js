import { html, useState } from "../vendor/preact.js";
import { get } from "../api.js";
import { time, visible } from "../format.js";
import { Failure, Table, Waiting, useCall } from "../parts.js";

const NEWEST = 20000; // events that are searched
const SHOWN = 100; // events, if nothing is searched for

function line(message) {
  try {
    return JSON.parse(message.value);
  } catch {
    return { event: message.subject, message: message.value };
  }
}

// With spaces, at which it can be wrapped; `isNew`: without what is not set.
const spaced = (value, isNew) => JSON.stringify(value, isNew ? (_, one) => one ?? undefined : null, 1).replace(/\n\s*/g, " ");

// What was changed: the request, or the values before and after.
function change({ before, after, message }) {
  if (after?.path) return [after.method, after.path, after.query, asJson(after.body), after.status && `→ ${after.status}`].filter(Boolean).join(" ");
  const values = [before, after].filter((one) => one !== undefined && one !== null);
  return [message, values.map((one) => spaced(one, values.length === 1)).join(" → ")].filter(Boolean).join(" ");
}

function asJson(text) {
  try {
    return text && spaced(JSON.parse(text));
  } catch {
    return text; // it was cut
  }
}

const about = ({ stream, broker }) => stream ?? (broker === undefined ? "" : `broker ${broker}`);
const by = ({ identity, address }) => [identity, address && `from ${address}`].filter(Boolean).join(" ");
const words = (name, title, value) => ({ name, title, value, show: (row) => visible(value(row)), isText: true });
const COLUMNS = [
  { name: "time", title: "Time (UTC)", value: (row) => row.key, show: (row) => html`<time>${time(row.time)}</time>` },
  { ...words("event", "Event", (row) => (row.event ?? "").replace(/^activity\./, "")), isText: false },
  words("about", "About", about),
  words("change", "Change", change),
  words("by", "By", by),
];

export function Activity() {
  const [text, setText] = useState("");
  const query = text ? { newest: NEWEST, grep: text, ignore_case: true, in: "value,subject", limit: 1000 } : { newest: SHOWN, limit: SHOWN };
  const [found, error, again] = useCall(() => get("/v1/streams/__activity/search", { value_bytes: 65536, ...query }), [text]);
  return html`
    <h1>Activity</h1>
    <form class="tools" onSubmit=${(event) => {
      event.preventDefault();
      setText(new FormData(event.target).get("grep"));
    }}>
      <label>Contains <input name="grep" type="search" placeholder="stream, identity, event" /></label>
      <button type="submit">Show</button>
      <button type="button" onClick=${again}>Refresh</button>
    </form>
    <${Failure} error=${error} />
    ${found === null
      ? !error && html`<${Waiting} />`
      : html`<${Table} rows=${found.messages.map((one) => ({ ...line(one), key: one.offset }))} columns=${COLUMNS} first="time" isDescending=${true}
          caption=${text ? `Of the newest ${NEWEST} events, those with “${visible(text)}”` : "What has happened"} />`}
  `;
}
