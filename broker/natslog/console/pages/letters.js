// Dead letters: messages with the header Natslog-Subject, by the reason in Natslog-Error, and sending them again.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { get, inPath, post } from "../api.js";
import { count, visible } from "../format.js";
import { useLive } from "../live.js";
import { Failure, useCall } from "../parts.js";
import { Message } from "./browse.js";

const A_PAGE = 1000;
const MOST_PAGES = 10; // that are looked through at once
const AT_ONCE = 100;
const SHOWN = 50;

const MOST_STREAMS = 100; // of which the newest message is looked at

const headerOf = (message, name) => message.headers.find((one) => one.key.toLowerCase() === name)?.value;

const search = (stream, query) =>
  get(`/v1/streams/${inPath(stream)}/search`, { grep: "natslog-subject", ignore_case: true, in: "headers", value_bytes: 256, ...query });

const isLetter = (message) => headerOf(message, "natslog-subject") !== undefined;

// Of these streams, those whose newest message is a dead letter: one after another, the likely ones first.
async function withLetters(names, isWanted) {
  const hints = /dead|letter|dlq|fail|error/i;
  const found = [];
  for (const name of names.toSorted((a, b) => hints.test(b) - hints.test(a)).slice(0, MOST_STREAMS)) {
    if (!isWanted()) break;
    try {
      if ((await search(name, { newest: 1, limit: 1 })).messages.some(isLetter)) found.push(name);
    } catch (failure) {
      if (failure.status === 401 || failure.status === 403) break; // each refusal is in the audit log
    } // others, as of a stream without a leader, are stated to who asks for it by its name
  }
  return found;
}

// Dead letters from an offset on: { letters, next, end }.
async function lettersFrom(stream, start) {
  let [letters, next, end] = [[], start, 0];
  for (let page = 0; page < MOST_PAGES; page++) {
    const found = await search(stream, { start: next, limit: A_PAGE });
    letters = letters.concat(found.messages.filter(isLetter));
    [next, end] = [found.next_offset, found.high_watermark];
    if (found.is_complete) break;
  }
  return { letters, next, end };
}

function byReason(letters) {
  const groups = new Map();
  for (const one of letters) {
    const reason = headerOf(one, "natslog-error") ?? "(no reason stated)";
    if (!groups.has(reason)) groups.set(reason, { reason, key: reason, letters: [] });
    groups.get(reason).letters.push(one);
  }
  return [...groups.values()];
}

// Ends early with the signal.
function pause(ms, signal) {
  if (signal.aborted) return undefined;
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
}

// Sends them, some at a time, at most `rate` a second, and calls `onProgress` with the sums and with the offsets that are
// left. After the signal there is no further request; the one in progress is awaited, since its letters are sent.
async function redrive(stream, given, rate, dryRun, signal, onProgress) {
  const sums = { of: given.length, asked: 0, sent: 0, duplicates: 0, failed: 0, problem: "" };
  const offsets = [...given];
  const atOnce = Math.max(1, Math.min(AT_ONCE, rate || AT_ONCE));
  const begun = performance.now();
  while (offsets.length && !signal.aborted) {
    const asked = offsets.splice(0, atOnce);
    const answer = await post(`/v1/streams/${inPath(stream)}/redrive`, { offsets: asked, dry_run: dryRun });
    offsets.unshift(...answer.left);
    sums.asked += answer.missing.length;
    sums.failed += answer.missing.length;
    if (answer.missing.length) sums.problem ||= "the letter does not exist any more";
    for (const one of answer.messages) {
      sums.asked++;
      if (one.problem) [sums.failed, sums.problem] = [sums.failed + 1, sums.problem || one.problem];
      else sums.sent++;
      if (one.duplicate) sums.duplicates++;
    }
    onProgress({ ...sums, left: [...offsets] });
    if (rate && !dryRun && offsets.length) await pause(Math.max(0, (1000 * sums.asked) / rate - (performance.now() - begun)), signal);
  }
}

function Group({ stream, group, onSending }) {
  const [selected, select] = useState(new Set());
  const [rate, setRate] = useState("100");
  const [sums, setSums] = useState(null);
  const [isSending, setSending] = useState(false);
  const [isStopping, setStopping] = useState(false);
  const [error, setError] = useState(null);
  const stopping = useRef(null);
  useEffect(() => () => stopping.current?.abort(), []); // another page is shown, where it could not be stopped
  const chosen = group.letters.map((one) => one.offset).filter((one) => !selected.size || selected.has(one));
  const run = async (offsets, dryRun) => {
    stopping.current = new AbortController();
    setError(null);
    setSums(null);
    setStopping(false);
    setSending(true);
    onSending(1);
    try {
      await redrive(stream, offsets, Math.max(0, Number(rate) || 0), dryRun, stopping.current.signal, (found) => setSums({ ...found, dryRun }));
    } catch (failure) {
      setError(failure);
    }
    setSending(false);
    onSending(-1);
  };
  const stop = () => {
    stopping.current.abort();
    setStopping(true);
  };
  const toggle = (offset) => select((before) => {
    const after = new Set(before);
    if (!after.delete(offset)) after.add(offset);
    return after;
  });
  return html`<details class="card">
    <summary><strong>${count(group.letters.length)}</strong> ${visible(group.reason)}</summary>
    <p class="tools">
      <label>At most <input type="number" min="1" value=${rate} onInput=${(event) => setRate(event.target.value)} size="6" /> a second</label>
      <button type="button" disabled=${isSending} onClick=${() => run(chosen, true)}>Check ${selected.size ? "those selected" : "all"}</button>
      <button type="button" disabled=${isSending} onClick=${() => run(chosen, false)}>Send ${selected.size ? `${count(selected.size)} selected` : `all ${count(group.letters.length)}`} again</button>
      ${isSending && html`<button type="button" disabled=${isStopping} onClick=${stop}>Stop</button>
        <progress aria-label="Progress" max=${sums?.of ?? 1} value=${sums?.asked ?? 0}></progress>`}
    </p>
    <${Failure} error=${error} />
    ${sums &&
    html`<p class=${sums.failed ? "failure" : "healthy"} role="status">${!isSending && sums.left.length > 0 && "Stopped. "}${count(sums.asked)} of ${count(sums.of)}: ${sums.dryRun ? `${count(sums.sent)} can be sent` : `${count(sums.sent)} sent, of which ${count(sums.duplicates)} were stored before`}, ${count(sums.failed)} not.
      ${sums.problem && ` First reason: ${sums.problem}`}
      ${!isSending && !sums.dryRun && sums.left.length > 0 &&
      html` <button type="button" onClick=${() => run(sums.left, false)}>Send the ${count(sums.left.length)} that are left</button>`}</p>`}
    ${group.letters.slice(0, SHOWN).map(
      (one) => html`<div class="letter" key=${one.offset}>
        <input type="checkbox" aria-label=${`Select offset ${one.offset}`} checked=${selected.has(one.offset)} onChange=${() => toggle(one.offset)} />
        <div><span class="subject">to ${visible(headerOf(one, "natslog-subject"))}</span>
          <${Message} stream=${stream} message=${one} /></div>
      </div>`,
    )}
    ${group.letters.length > SHOWN && html`<p>The first ${SHOWN} of ${count(group.letters.length)} are shown.</p>`}
  </details>`;
}

export function Letters({ who, query }) {
  const { overview, streams } = useLive(who.may_monitor);
  const isShown = useRef(true);
  useEffect(() => () => (isShown.current = false), []);
  const [candidates] = useCall(() => withLetters([...streams.keys()], () => isShown.current), [overview === null]);
  const [stream, setStream] = useState(query.get("stream") ?? "");
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [sending, setSending] = useState(0); // groups; other letters would replace them
  const asked = useRef(0);
  const look = async (start, name = stream) => {
    const number = ++asked.current;
    setStream(name);
    setError(null);
    try {
      const letters = await lettersFrom(name, start);
      if (number === asked.current) setFound({ ...letters, stream: name, start });
    } catch (failure) {
      if (number !== asked.current) return;
      setFound(null);
      setError(failure);
    }
  };
  return html`
    <h1>Dead letters</h1>
    <p>Messages that could not be sent or used, with the reason in the header <code>Natslog-Error</code> and their subject in${" "}
      <code>Natslog-Subject</code>: Spark's sink writes them (<code>onError=deadletter</code>). Those that are sent again stay in this stream; a
      second sending is stored once by a stream that deduplicates.</p>
    ${candidates?.length === 0 && html`<p>No stream was found whose newest message is a dead letter; others are shown by their names.</p>`}
    ${candidates?.length > 0 &&
    html`<p class="tools">Streams whose newest message is a dead letter:
      ${candidates.map((name) => html`<button type="button" key=${name} disabled=${sending > 0} onClick=${() => look("earliest", name)}>${name}</button>`)}</p>`}
    <form class="tools" onSubmit=${(event) => (event.preventDefault(), look("earliest"))}>
      <label>Stream <input list="streams" required autocomplete="off" value=${stream} onInput=${(event) => setStream(event.target.value)} /></label>
      <datalist id="streams">${[...streams.keys()].map((name) => html`<option value=${name} />`)}</datalist>
      <button type="submit" disabled=${sending > 0}>Show</button>
    </form>
    <${Failure} error=${error} />
    ${found && html`
      <p role="status">${count(found.letters.length)} dead letters up to offset ${count(found.next)} of ${count(found.end)}.
        ${found.next < found.end && html` <button type="button" disabled=${sending > 0} onClick=${() => look(found.next)}>Go on from offset ${count(found.next)}</button>`}</p>
      ${byReason(found.letters).map((group) => html`<${Group} key=${`${found.stream} ${found.start} ${group.reason}`} stream=${found.stream} group=${group}
        onSending=${(change) => setSending((before) => before + change)} />`)}`}
  `;
}
