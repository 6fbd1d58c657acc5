// A test message: the broker publishes it to NATS, and the stream's ack is shown.

import { html, useRef, useState } from "../vendor/preact.js";
import { inPath, post } from "../api.js";
import { count, quoted } from "../format.js";
import { Failure } from "../parts.js";

// Lines "name: value"; throws an Error that names the first line that is none.
function headersOf(text) {
  return text.split("\n").filter((line) => line.trim()).map((line) => {
    const at = line.indexOf(":");
    if (at < 1) throw new Error(`The header "${line}" has no name: write one header a line, as name: value.`);
    return { key: line.slice(0, at).trim(), value: line.slice(at + 1).trim() };
  });
}

const newId = () => `console-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;

export function Publish({ name, info }) {
  const plain = info.subjects.find((subject) => !/(^|\.)[*>](\.|$)/.test(subject)) ?? "";
  const [given, setGiven] = useState({ subject: plain, key: "", headers: "", value: "" });
  const [stored, setStored] = useState(null);
  const [error, setError] = useState(null);
  const [isSending, setSending] = useState(false);
  const id = useRef(newId()); // the same for a repetition: it is stored once
  const field = (one) => ({ value: given[one], onInput: (event) => ((id.current = newId()), setGiven({ ...given, [one]: event.target.value })) });
  const submit = async (event) => {
    event.preventDefault();
    setStored(null);
    setError(null);
    try {
      setSending(true);
      const body = { subject: given.subject, value: given.value, headers: headersOf(given.headers), message_id: id.current };
      if (given.key) body.key = given.key;
      setStored(await post(`/v1/streams/${inPath(name)}/publish`, body));
      id.current = newId();
    } catch (failure) {
      setError(failure);
    }
    setSending(false);
  };
  return html`<section aria-label="Publish">
    <h2>Publish a message</h2>
    <p>It is published to NATS: everything that subscribes to the subject receives it. The stream records ${info.subjects.join(", ")}.</p>
    <form class="fields" onSubmit=${submit}>
      <label>Subject <input ...${field("subject")} required autocomplete="off" /></label>
      <label>Key <input ...${field("key")} autocomplete="off" placeholder="none" /></label>
      <label class="wide">Headers <textarea ...${field("headers")} rows="2" spellcheck="false" placeholder="name: value"></textarea></label>
      <label class="wide">Value <textarea ...${field("value")} rows="6" spellcheck="false"></textarea></label>
      <button type="submit" disabled=${isSending}>Publish</button>
    </form>
    <p>The same on the command line: <code>natslog pub ${quoted(given.subject || "SUBJECT")} ${quoted(given.value || "VALUE")} --ack</code></p>
    <${Failure} error=${error} />
    ${stored && html`<p class="healthy" role="status">Stored at offset ${count(stored.offset)}${stored.duplicate ? ", where it was already" : ""}.${" "}
      <a href=${`#/streams/${inPath(name)}`}>Show the newest messages</a></p>`}
  </section>`;
}
