// The first rows of an Arrow payload as text, in a worker: the page ends it if it takes too long.

import { asJson } from "./avro.js";
import { tableFromIPC } from "./vendor/arrow.js";

const ROWS = 100;
const MOST_CHARS = 256 * 1024;
const NULL_TYPE = 1; // in the metadata of Arrow: values without bytes, so that a short message can have billions

// Throws an Error: a column could be much larger than the message.
function check(type, isInList = false) {
  if (isInList && type.typeId === NULL_TYPE) throw new Error("it has a list of values without bytes");
  if (type.stride > 10_000) throw new Error("it has lists of a fixed size that are too long");
  for (const child of type.children ?? []) check(child.type, isInList || type.stride !== undefined || "offsets" in type);
}

self.onmessage = ({ data }) => {
  try {
    const table = tableFromIPC(data, { useBigInt: true, useDate: false });
    for (const field of table.schema.fields) check(field.type);
    const fields = table.schema.fields.map((field) => field.name).join(", ");
    let text = `${table.numRows.toLocaleString("en")} rows: ${fields}`;
    for (let at = 0; at < Math.min(table.numRows, ROWS) && text.length < MOST_CHARS; at++) text += `\n${asJson(table.at(at))}`;
    self.postMessage({ text: text.slice(0, MOST_CHARS) });
  } catch (error) {
    self.postMessage({ text: `The value cannot be shown as Arrow IPC: ${error.message}` });
  }
};
