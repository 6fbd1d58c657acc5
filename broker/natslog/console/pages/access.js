import { html, useState } from "../vendor/preact.js";
import { get } from "../api.js";
import { time } from "../format.js";
import { Failure, Table, Waiting, useCall } from "../parts.js";

const TOKENS = [
  { name: "identity", title: "Identity", value: (row) => row.identity },
  { name: "id", title: "Token", value: (row) => row.id },
  { name: "created", title: "Created", value: (row) => row.created, show: (row) => time(row.created) },
  { name: "expires", title: "Expires", value: (row) => row.expires ?? "", show: (row) => (row.expires ? time(row.expires) : "never") },
];
const RULES = [
  { name: "id", title: "Rule", value: (row) => row.id },
  { name: "who", title: "Who", value: (row) => row.who },
  { name: "action", title: "Action", value: (row) => row.action },
  { name: "stream", title: "Stream", value: (row) => row.stream },
  { name: "subject", title: "Subject", value: (row) => row.subject ?? ">" },
];

const ACTIONS = ["read", "publish", "manage", "cursor", "monitor", "admin"];

// Whether an identity may do something, and the rule that decides.
function Check({ who }) {
  const [verdict, setVerdict] = useState(null);
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    setVerdict(null);
    setError(null);
    try {
      setVerdict(await get("/v1/acl/check", given));
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<section aria-label="Check">
    <h2>Check</h2>
    <form class="tools" onSubmit=${submit}>
      <label>Identity <input name="identity" autocomplete="off" placeholder=${who.identity} /></label>
      <label>Action <select name="action">${ACTIONS.map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
      <label>Stream <input name="stream" autocomplete="off" placeholder="the whole cluster" /></label>
      <label>Subject <input name="subject" autocomplete="off" placeholder="all of the stream" /></label>
      <button type="submit">Check</button>
    </form>
    <${Failure} error=${error} />
    ${verdict &&
    html`<p class=${verdict.allowed ? "healthy" : "failure"} role="status">
      ${verdict.allowed
        ? "Permitted."
        : verdict.allowed_subjects.length
          ? `Permitted only on the subjects ${verdict.allowed_subjects.join(", ")}.`
          : "Not permitted: no rule permits it."}
      ${verdict.rule && html` Rule <code>${verdict.rule.id}</code>: ${verdict.rule.who} may ${verdict.rule.action} ${verdict.rule.stream}.`}</p>`}
  </section>`;
}

export function Access({ who }) {
  const [tokens, error] = useCall(() => (who.identity && who.may_administer ? get("/v1/tokens") : Promise.resolve([])), []);
  const [rules, failure] = useCall(() => (who.identity && who.may_administer ? get("/v1/acl") : Promise.resolve([])), []);
  if (!who.identity) {
    return html`<h1>Access</h1><p>This cluster needs no credentials: every client that can connect to a broker may do everything.
      See SECURITY in the documentation for how to change that (<code>security = true</code>).</p>`;
  }
  if (!who.may_administer) {
    return html`<h1>Access</h1><p>You are <strong>${who.identity}</strong>. Tokens and rules are shown to administrators.
      What you may do: <code>natslog whoami</code>.</p>
      <${Check} who=${who} />`;
  }
  const keyed = (rows) => rows.map((one) => ({ ...one, key: one.id }));
  return html`
    <h1>Access</h1>
    <${Failure} error=${error ?? failure} />
    ${tokens === null || rules === null
      ? !(error ?? failure) && html`<${Waiting} />`
      : html`
          <h2>Tokens</h2>
          <${Table} rows=${keyed(tokens)} columns=${TOKENS} caption="Tokens" searches=${(row) => `${row.identity} ${row.id}`} />
          <h2>Rules</h2>
          <${Table} rows=${keyed(rules)} columns=${RULES} caption="Rules" searches=${(row) => `${row.who} ${row.stream} ${row.action}`} />
          <${Check} who=${who} />
        `}
  `;
}
