// What a stream is to be: settings that can be changed, and what cannot be undone.

import { html, useState } from "../vendor/preact.js";
import { get, inPath, patch, post, remove } from "../api.js";
import { quoted } from "../format.js";
import { Failure, Typed } from "../parts.js";

// Name of the setting, its label, and an example. Empty means no limit where `isOptional`.
const FIELDS = [
  { name: "subjects", label: "Subjects", example: "orders.>", isList: true },
  { name: "max_age", label: "Kept for", example: "7d", isOptional: true },
  { name: "max_bytes", label: "At most this size", example: "10GiB", isOptional: true },
  { name: "max_messages", label: "At most so many messages", example: "1000000", isNumber: true, isOptional: true },
  { name: "max_messages_per_subject", label: "Of each subject", example: "1", isNumber: true, isOptional: true },
  { name: "discard", label: "At a limit", choices: ["old", "new"] },
  { name: "replicas", label: "Replicas", example: "3", isNumber: true },
  { name: "min_isr", label: "In sync for writes", example: "2", isNumber: true },
  { name: "compression", label: "Compression", choices: ["zstd", "lz4", "none"] },
  { name: "dedupe_window", label: "Deduplication window", example: "2m", isOptional: true },
  { name: "max_message_bytes", label: "Largest message", example: "64KiB", isOptional: true },
  { name: "acks", label: "Acks go to", choices: ["reply", "any", "header", "never"] },
  { name: "managed_by", label: "Managed by (natslog apply)", example: "none", isOptional: true },
  { name: "prevent_delete", label: "Refuse to delete it", choices: ["no", "yes"], isFlag: true },
];

const shown = (field, value) => (field.isFlag ? (value ? "yes" : "no") : value == null ? "" : field.isList ? value.join(" ") : String(value));

const textsOf = (info) => Object.fromEntries(FIELDS.map((field) => [field.name, shown(field, info[field.name])]));

function valueOf(field, text) {
  if (field.isFlag) return text === "yes";
  if (field.isList) return text.split(/[\s,]+/).filter(Boolean);
  if (text === "") return null;
  return field.isNumber ? Number(text) : text;
}

// What differs from the stream as it is: [field, text].
const changes = (info, given) =>
  FIELDS.filter((field) => given[field.name] !== shown(field, info[field.name])).map((field) => [field, given[field.name].trim()]);

function commandOf(name, changed) {
  const options = changed.flatMap(([field, text]) =>
    field.isList
      ? valueOf(field, text).map((subject) => `--subject ${quoted(subject)}`)
      : field.isFlag
        ? [`--${text === "yes" ? "" : "no-"}${field.name.replaceAll("_", "-")}`]
        : [`--${field.name.replaceAll("_", "-")} ${quoted(text || "none")}`],
  );
  return ["natslog stream edit", quoted(name), ...options].join(" ");
}

export function Settings({ name, info, onChange }) {
  const [base, setBase] = useState(info); // as the form was filled: an edit is of its version
  const [given, setGiven] = useState(textsOf(info));
  const [error, setError] = useState(null);
  const [done, setDone] = useState("");
  const path = `/v1/streams/${inPath(name)}`;
  const changed = changes(base, given);
  // Fields that were not touched show the present settings; those that were stay as they are.
  const refill = (present) => {
    const touched = Object.fromEntries(changed.map(([field]) => [field.name, given[field.name]]));
    setBase(present);
    setGiven({ ...textsOf(present), ...touched });
  };
  const attempt = async (work, text) => {
    setError(null);
    setDone("");
    try {
      await work();
      setDone(text);
      onChange();
    } catch (failure) {
      setError(failure);
      if (failure.code === "settings_conflict") refill(await get(path));
    }
  };
  const save = (event) => {
    event.preventDefault();
    const body = Object.fromEntries(changed.map(([field, text]) => [field.name, valueOf(field, text)]));
    attempt(async () => {
      const after = await patch(path, { ...body, if_version: base.settings_version });
      setBase(after);
      setGiven(textsOf(after));
    }, "The settings were changed.");
  };
  const input = (field) => ({ value: given[field.name], onInput: (event) => setGiven({ ...given, [field.name]: event.target.value }) });
  return html`<section aria-label="Settings">
    <h2>Settings</h2>
    <form class="fields" onSubmit=${save}>
      ${FIELDS.map(
        (field) => html`<label key=${field.name}>${field.label}
          ${field.choices
            ? html`<select ...${input(field)}>${field.choices.map((one) => html`<option value=${one}>${one}</option>`)}</select>`
            : html`<input ...${input(field)} autocomplete="off" placeholder=${field.isOptional ? "no limit" : field.example} />`}
        </label>`,
      )}
      <button type="submit" disabled=${!changed.length}>Save</button>
    </form>
    ${changed.length > 0 && html`<p>The same on the command line: <code>${commandOf(name, changed)}</code></p>`}
    <${Failure} error=${error} />
    ${done && html`<p class="healthy" role="status">${done}</p>`}
    <h2>Recording</h2>
    <p class="tools">
      ${info.sealed
        ? "The stream is sealed: it can be read, and takes no more messages."
        : html`<button type="button" onClick=${() => attempt(() => patch(path, { paused: !info.paused }), info.paused ? "The stream is recording again." : "The stream is paused: messages are not recorded.")}>
            ${info.paused ? "Resume" : "Pause"}</button>`}
    </p>
    <h2>What cannot be undone</h2>
    <p>Type the name of the stream to confirm.</p>
    <${Typed} name=${name} action="Purge" what="Remove all messages that are stored now." onDone=${() => attempt(() => post(`${path}/purge`, {}), "All messages were removed.")} />
    ${!info.sealed &&
    html`<${Typed} name=${name} action="Seal" what="The stream takes no more messages." onDone=${() => attempt(() => post(`${path}/seal`), "The stream is sealed.")} />`}
    <${Typed} name=${name} action="Delete" what="Remove the stream with all of its messages." onDone=${() =>
      remove(path).then(() => (location.hash = "#/streams"), setError)} />
  </section>`;
}
