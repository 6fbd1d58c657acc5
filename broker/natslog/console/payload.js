// The value of a message, as a person wants to see it: JSON, text, hex, Avro with a schema, or the rows of Arrow.

import { html, useEffect, useState } from "./vendor/preact.js";
import { storage } from "./api.js";
import { avroAsJson } from "./avro.js";
import { bytes, visible } from "./format.js";
import { JsonTree, tokensOf } from "./json-tree.js";

const HEX_BYTES = 1024;
const ARROW_WITHIN_MS = 1500;
const MOST_DEPTH = 64; // of JSON that is indented
const MOST_CHARS = 4 * 1024 * 1024;

// As bytes, also where the broker has sent it as text.
export function bytesOf(message) {
  if (message.value !== undefined) return new TextEncoder().encode(message.value);
  return Uint8Array.from(atob(message.value_base64), (char) => char.charCodeAt(0));
}

function hex(data) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, HEX_BYTES); at += 16) {
    const part = [...data.slice(at, at + 16)];
    const codes = part.map((one) => one.toString(16).padStart(2, "0")).join(" ");
    const text = part.map((one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes.padEnd(47)}  ${text}`);
  }
  return lines.join("\n");
}

// JSON with line breaks; null if it is none, or too deep or long to be indented. Its tokens stay as they are: numbers
// keep their digits, and equal keys are all there.
function json(message) {
  if (message.value === undefined || message.is_cut) return null;
  try {
    JSON.parse(message.value);
  } catch {
    return null;
  }
  let depth = 0;
  let text = "";
  const line = () => `\n${"  ".repeat(depth)}`;
  const tokens = tokensOf(message.value);
  tokens.forEach((token, at) => {
    const isEmpty = (token === "{" && tokens[at + 1] === "}") || (token === "[" && tokens[at + 1] === "]");
    const endsEmpty = (token === "}" && tokens[at - 1] === "{") || (token === "]" && tokens[at - 1] === "[");
    if (text === null) return;
    if (token === "{" || token === "[") {
      depth++;
      text += token + (isEmpty ? "" : line());
    } else if (token === "}" || token === "]") {
      depth--;
      text += (endsEmpty ? "" : line()) + token;
    } else {
      text += token === "," ? token + line() : token === ":" ? ": " : token;
    }
    if (depth > MOST_DEPTH || text.length > MOST_CHARS) text = null;
  });
  return text;
}

// An Arrow IPC stream begins with FF FF FF FF, an Arrow IPC file with ARROW1.
function looksLikeArrow(data) {
  return [[255, 255, 255, 255], [65, 82, 82, 79, 87, 49]].some((start) => start.every((one, at) => data[at] === one));
}

// Read by a worker, which is ended if it takes too long: the message is untrusted.
function Arrow({ message }) {
  const [text, setText] = useState("Loading…");
  useEffect(() => {
    const worker = new Worker(new URL("./arrow-worker.js", import.meta.url), { type: "module" });
    const end = (shown) => {
      clearTimeout(timer);
      worker.terminate();
      setText(shown);
    };
    const timer = setTimeout(() => end("The value takes too long to be read as Arrow IPC."), ARROW_WITHIN_MS);
    worker.onmessage = ({ data }) => end(data.text);
    worker.onerror = () => end("The value cannot be shown as Arrow IPC.");
    worker.postMessage(bytesOf(message));
    return () => (clearTimeout(timer), worker.terminate());
  }, [message]);
  return html`<pre tabindex="0">${visible(text)}</pre>`;
}

// The schema is kept for the stream until the tab of the browser is closed.
function Avro({ stream, message }) {
  const place = `avro/${stream}`;
  const [schema, setSchema] = useState(storage((kept) => kept.getItem(place)) ?? "");
  let shown = null;
  let problem = null;
  if (schema.trim()) {
    try {
      shown = avroAsJson(bytesOf(message), schema);
    } catch (error) {
      problem = error;
    }
  }
  return html`
    <label class="wide">Avro schema (JSON)
      <textarea rows="4" spellcheck="false" value=${schema} onInput=${(event) => {
        storage((kept) => kept.setItem(place, event.target.value));
        setSchema(event.target.value);
      }}></textarea></label>
    ${problem && html`<p class="failure" role="alert">${problem.message}</p>`}
    ${shown !== null && html`<pre tabindex="0">${visible(shown)}</pre>`}
  `;
}

export function Value({ stream, message }) {
  const formatted = json(message);
  const isArrow = message.value_base64 !== undefined && looksLikeArrow(bytesOf(message));
  const kinds = [
    formatted && "JSON",
    formatted && "Tree",
    message.value !== undefined && "Text",
    "Hex",
    isArrow && "Arrow",
    "Avro",
  ].filter(Boolean);
  const [chosen, choose] = useState(null);
  const how = kinds.includes(chosen) ? chosen : kinds[0];
  return html`
    <p class="tools" role="group" aria-label="How the value is shown">
      ${kinds.map((one) => html`<button type="button" aria-pressed=${one === how} onClick=${() => choose(one)}>${one}</button>`)}
    </p>
    ${how === "Tree"
      ? html`<${JsonTree} text=${message.value} />`
      : how === "Arrow"
        ? html`<${Arrow} message=${message} />`
        : how === "Avro"
          ? html`<${Avro} stream=${stream} message=${message} />`
          : html`<pre tabindex="0">${visible(how === "JSON" ? formatted : how === "Text" ? message.value : hex(bytesOf(message)))}</pre>`}
    ${message.is_cut && html`<p>The first bytes of ${bytes(message.value_bytes)} are shown.</p>`}
  `;
}
