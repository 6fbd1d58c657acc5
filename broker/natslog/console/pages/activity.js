import { html, useState } from "../vendor/preact.js";
import { get } from "../api.js";
import { time, visible } from "../format.js";
import { Failure, Waiting, useCall } from "../parts.js";

const NEWEST = 20000; // events that are searched
const SHOWN = 100; // events, if nothing is searched for

function line(message) {
  try {
    return JSON.parse(message.value);
  } catch {
    return { event: message.subject, message: message.value };
  }
}

// What was changed: the request, or the values before and after.
function change({ before, after, message }) {
  if (after?.path) return [after.method, after.path, after.query, after.body].filter(Boolean).join(" ");
  const values = [before, after].filter((one) => one !== undefined && one !== null).map((one) => JSON.stringify(one));
  return [message, values.join(" → ")].filter(Boolean).join(" ");
}

function Event({ event }) {
  const about = event.stream ?? (event.broker === undefined ? "" : `broker ${event.broker}`);
  const who = [event.identity, event.address && `from ${event.address}`].filter(Boolean).join(" ");
  return html`<tr>
    <td><time>${time(event.time)}</time></td>
    <td>${visible((event.event ?? "").replace(/^activity\./, ""))}</td>
    <td>${visible(about)}</td>
    <td class="change">${visible(change(event))}</td>
    <td>${visible(who)}</td>
  </tr>`;
}

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
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Events"><table>
          <caption>${text ? `Of the newest ${NEWEST} events, those with “${visible(text)}”` : "What has happened"}; the newest first</caption>
          <thead><tr><th scope="col">Time (UTC)</th><th scope="col">Event</th><th scope="col">About</th><th scope="col">Change</th><th scope="col">By</th></tr></thead>
          <tbody>${found.messages.map(line).reverse().map((event) => html`<${Event} event=${event} />`)}</tbody>
        </table></div>`}
  `;
}
