// What a stream is to be: settings that can be changed, and what cannot be undone.

import { html, useState } from "../vendor/preact.js";
import { get, inPath, patch, post, remove } from "../api.js";
import { quoted } from "../format.js";
import { Failure, Typed, Waiting, useCall } from "../parts.js";

// Of the body of an edit: what has a button of its own, or cannot be undone.
const NOT_IN_FORM = ["subject", "paused", "if_version", "id", "deny_delete", "deny_purge"];

// The fields of the form, as the API describes the settings. Empty means none where `isOptional`.
function fieldsOf(schema) {
  const settings = Object.entries(schema.properties).filter(([name]) => !NOT_IN_FORM.includes(name));
  return settings.map(([name, property]) => {
    const types = property.anyOf ?? [property];
    const has = (type) => types.some((one) => one.type === type);
    return {
      name,
      isFlag: has("boolean"),
      isList: has("array"),
      isNumber: has("integer") && !has("string"),
      isOptional: has("null"),
      choices: has("boolean") ? ["no", "yes"] : types.find((one) => one.enum)?.enum,
    };
  });
}

// max_age: Max age
const labelOf = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

const shown = (field, value) => (field.isFlag ? (value ? "yes" : "no") : value == null ? "" : field.isList ? value.join(" ") : String(value));

const textsOf = (fields, info) => Object.fromEntries(fields.map((field) => [field.name, shown(field, info[field.name])]));

function valueOf(field, text) {
  if (field.isFlag) return text === "yes";
  if (field.isList) return text.split(/[\s,]+/).filter(Boolean);
  if (text === "") return null;
  return field.isNumber ? Number(text) : text;
}

// What differs from the stream as it is: [field, text].
const changes = (fields, info, given) =>
  fields.filter((field) => given[field.name] !== shown(field, info[field.name])).map((field) => [field, given[field.name].trim()]);

const optionOf = (field) => `--${field.name.replaceAll("_", "-")}`;

function commandOf(name, changed) {
  const options = changed.flatMap(([field, text]) =>
    field.isList
      ? (text ? valueOf(field, text) : ["none"]).map((one) => `${optionOf(field).replace(/s$/, "")} ${quoted(one)}`)
      : field.isFlag
        ? [`--${text === "yes" ? "" : "no-"}${field.name.replaceAll("_", "-")}`]
        : [`${optionOf(field)} ${quoted(text || "none")}`],
  );
  return ["natslog stream edit", quoted(name), ...options].join(" ");
}

export function Settings(stream) {
  const [described, error] = useCall(() => get("/openapi.json"), []);
  if (described === null) return error ? html`<${Failure} error=${error} />` : html`<${Waiting} />`;
  return html`<${Form} fields=${fieldsOf(described.components.schemas.ChangedStream)} ...${stream} />`;
}

function Form({ fields, name, info, onChange }) {
  const [base, setBase] = useState(info); // as the form was filled: an edit is of its version
  const [given, setGiven] = useState(textsOf(fields, info));
  const [error, setError] = useState(null);
  const [done, setDone] = useState("");
  const path = `/v1/streams/${inPath(name)}`;
  const changed = changes(fields, base, given);
  // Fields that were not touched show the present settings; those that were stay as they are.
  const refill = (present) => {
    const touched = Object.fromEntries(changed.map(([field]) => [field.name, given[field.name]]));
    setBase(present);
    setGiven({ ...textsOf(fields, present), ...touched });
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
      setGiven(textsOf(fields, after));
    }, "The settings were changed.");
  };
  const input = (field) => ({ value: given[field.name], onInput: (event) => setGiven({ ...given, [field.name]: event.target.value }) });
  return html`<section aria-label="Settings">
    <h2>Settings</h2>
    <form class="fields" onSubmit=${save}>
      ${fields.map(
        (field) => html`<label key=${field.name}>${labelOf(field.name)}
          ${field.choices
            ? html`<select ...${input(field)}>${field.choices.map((one) => html`<option value=${one}>${one}</option>`)}</select>`
            : html`<input ...${input(field)} autocomplete="off" placeholder=${field.isOptional ? "none" : ""} />`}
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
