// The messages of a stream: by offset, time, subject or text; the newest as they come; or the newest of each key.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { get, inPath, lines } from "../api.js";
import { bytes, count, time, visible } from "../format.js";
import { Fact, Failure, Table, useCall } from "../parts.js";
import { Value } from "../payload.js";

const LIVE_EVERY_MS = 1000;
const MOST_LIVE = 200; // messages that stay on the page
const WHOLE_VALUE_BYTES = 1024 * 1024;
const LATEST_BYTES = 1024 * 1024;

function copies(stream, message) {
  const end = message.offset + 1;
  return {
    curl: `curl '${location.origin}/v1/streams/${inPath(stream)}/messages?start=${message.offset}&end=${end}' -H 'Accept: application/x-ndjson'`,
    "command line": `natslog cat ${stream} --from ${message.offset} --count 1 --json`,
    PySpark: `spark.read.format("natslog").option("servers", "${location.origin}").option("stream", "${stream}")` +
      `.option("startingOffsets", '{"${stream}": ${message.offset}}').option("endingOffsets", '{"${stream}": ${end}}').load()`,
  };
}

export function Message({ stream, message }) {
  const [whole, setWhole] = useState(null);
  const [error, setError] = useState(null);
  const [isOpen, setOpen] = useState(false);
  const shown = whole ?? message;
  const preview = message.value === undefined ? `${bytes(message.value_bytes)} of binary data` : message.value.slice(0, 120);
  const load = () =>
    get(`/v1/streams/${inPath(stream)}/search`, { start: message.offset, end: message.offset + 1, value_bytes: WHOLE_VALUE_BYTES })
      .then((found) => setWhole(found.messages[0] ?? null), setError);
  return html`<details class="message" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>
      <span class="number">${count(message.offset)}</span> <time>${time(message.timestamp)}</time>
      <span class="subject">${visible(message.subject)}</span> <code>${visible(preview)}</code>
    </summary>
    ${isOpen && html`
      <dl class="facts">
        <${Fact} name="Size">${bytes(message.value_bytes)}<//>
        ${message.key !== null &&
        html`<${Fact} name="Key"><code>${visible(message.key ?? `base64 ${message.key_base64}`)}</code><//>`}
        ${message.headers.map((one) => html`<${Fact} name=${visible(one.key)}><code>${visible(one.value)}</code><//>`)}
      </dl>
      <${Value} stream=${stream} message=${shown} />
      <${Failure} error=${error} />
      <p class="tools">
        ${shown.is_cut && !whole && html`<button type="button" onClick=${load}>Load up to ${bytes(WHOLE_VALUE_BYTES)} of the value</button>`}
        ${Object.entries(copies(stream, message)).map(
          ([what, text]) => html`<button type="button" onClick=${() => navigator.clipboard.writeText(text)}>Copy as ${what}</button>`,
        )}
      </p>`}
  </details>`;
}

const messagesOf = (number) => (number === 1 ? "1 message" : `${count(number)} messages`);
const isOffset = (text) => /^\d+$/.test(text);

// Where a person wants to begin: an offset; a time, which a broker looks up; "" for the beginning.
async function startOf(name, text) {
  if (text === "" || text === "earliest") return "earliest";
  if (isOffset(text) || text === "latest") return text;
  return (await get(`/v1/streams/${inPath(name)}/offsets`, { timestamp: text })).offset;
}

export function Browse({ name }) {
  const [asked, setAsked] = useState({ newest: 50 });
  const [isLive, setLive] = useState(false);
  const [isLatest, setLatest] = useState(false);
  const [refused, setRefused] = useState(null);
  const [found, error] = useCall(async () => ({ ...(await get(`/v1/streams/${inPath(name)}/search`, { limit: 50, ...asked })), isNewestFirst: Boolean(asked.newest) }), [asked]);
  const submit = async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    const searches = given.grep ? { grep: given.grep, ignore_case: true } : {};
    setRefused(null);
    setLive(false);
    setLatest(false);
    try {
      const start = given.start === "" && !given.grep ? { newest: 50 } : { start: await startOf(name, given.start.trim()) };
      setAsked({ ...start, subject: given.subject, ...searches });
    } catch (failure) {
      setRefused(failure);
    }
  };
  return html`<section aria-label="Messages">
    <h2>Messages</h2>
    <form class="tools" onSubmit=${submit}>
      <label>From offset or time <input name="start" placeholder="newest" size="22" /></label>
      <label>Subject <input name="subject" placeholder="all" /></label>
      <label>Contains <input name="grep" type="search" placeholder="text in value, key or headers" /></label>
      <button type="submit">Show</button>
      <button type="button" aria-pressed=${isLive} onClick=${() => (setLatest(false), setLive(!isLive))}>Live</button>
      <button type="button" aria-pressed=${isLatest} onClick=${() => (setLive(false), setLatest(!isLatest))}>Latest of each key</button>
    </form>
    <${Failure} error=${refused ?? error} />
    ${isLatest
      ? html`<${Latest} name=${name} />`
      : isLive
        ? html`<${Live} name=${name} asked=${asked} />`
        : found && html`<${Page} name=${name} found=${found} onMore=${() => {
            const { newest, ...others } = asked;
            setAsked({ ...others, start: found.next_offset });
          }} />`}
  </section>`;
}

function Page({ name, found, onMore }) {
  const messages = found.isNewestFirst ? found.messages.toReversed() : found.messages;
  return html`
    <p role="status">${messagesOf(messages.length)}${found.isNewestFirst ? ", the newest first" : ""}; searched to offset ${count(found.next_offset)} of ${count(found.high_watermark)}.</p>
    ${messages.map((one) => html`<${Message} key=${one.offset} stream=${name} message=${one} />`)}
    ${!found.is_complete &&
    html`<button type="button" onClick=${onMore}>Go on from offset ${count(found.next_offset)}</button>`}
  `;
}

// Messages as they come, the newest first; with the subject and text that were searched for. It rests while the page
// is hidden, and passes over what is too much to be shown.
function Live({ name, asked }) {
  const [messages, setMessages] = useState([]);
  const [skipped, setSkipped] = useState(0);
  const [error, setError] = useState(null);
  const next = useRef("latest");
  useEffect(() => {
    let isWanted = true;
    const { subject, grep, ignore_case } = asked;
    const ask = async () => {
      if (!document.hidden) {
        try {
          const found = await get(`/v1/streams/${inPath(name)}/search`, { start: next.current, subject, grep, ignore_case, limit: MOST_LIVE });
          if (!isWanted) return;
          const isFarBehind = found.messages.length === MOST_LIVE && !found.is_complete;
          if (isFarBehind) setSkipped((before) => before + found.high_watermark - found.next_offset);
          next.current = isFarBehind ? found.high_watermark : found.next_offset;
          if (found.messages.length) setMessages((before) => [...found.messages.reverse(), ...before].slice(0, MOST_LIVE));
          setError(null);
        } catch (failure) {
          if (isWanted) setError(failure);
        }
      }
      if (isWanted) timer = setTimeout(ask, LIVE_EVERY_MS);
    };
    let timer = setTimeout(ask, 0);
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, []);
  return html`
    <p role="status">${messages.length ? `The newest ${count(messages.length)} messages since this was opened${skipped ? `; ${count(skipped)} were too many to be shown` : ""}.` : "Waiting for new messages…"}</p>
    <${Failure} error=${error} />
    ${messages.map((one) => html`<${Message} key=${one.offset} stream=${name} message=${one} />`)}
  `;
}

const text = (row, column) => visible(row[column] ?? (row[`${column}_base64`] === undefined ? "" : `base64 ${row[`${column}_base64`]}`));
const LATEST = [
  { name: "of", title: "Key, or subject", value: (row) => row.key ?? row.subject, show: (row) => (row.key === null ? visible(row.subject) : text(row, "key")) },
  { name: "offset", title: "Offset", value: (row) => row.offset, show: (row) => count(row.offset), isNumber: true },
  { name: "timestamp", title: "Time", value: (row) => row.timestamp, show: (row) => time(row.timestamp) },
  { name: "value", title: "Value", value: (row) => row.value ?? "", show: (row) => html`<code>${text(row, "value").slice(0, 200)}</code>` },
];

// The newest message of each key of a compacted stream, otherwise of each subject: as a table that can be sorted.
function Latest({ name }) {
  const [found, error] = useCall(
    () => lines(`/v1/streams/${inPath(name)}/messages`, { view: "latest", max_bytes: LATEST_BYTES }),
    [],
  );
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<p role="status">Loading…</p>`;
  const rows = found.rows.map((row) => ({ ...row, key: row.key ?? null, name: row.offset }));
  return html`<${Table} rows=${rows} columns=${LATEST} first="of" searches=${(row) => `${row.key ?? ""} ${row.subject} ${row.value ?? ""}`}
    caption=${`Newest messages${found.isWhole ? "" : `: those of the first ${bytes(LATEST_BYTES)}; natslog cat --latest shows all`}`} />`;
}
