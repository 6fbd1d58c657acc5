// A value of Avro in its binary encoding, read with the schema that a person gives. Source: the specification of
// Avro 1.11, "Binary encoding" and "Single object encoding". A message is untrusted: each step and each level counts, and
// what no writer writes is an error. Logical types are shown as the types that they are stored as.

const MOST_STEPS = 200_000;
const MOST_DEPTH = 64;
const MOST_CHARS = 4 * 1024 * 1024;
const PRIMITIVES = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"];
const MOST_INT = 2 ** 31;

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
    this.steps = 0;
  }

  take(size) {
    if (size < 0) throw new Error("a length is negative");
    if (this.at + size > this.bytes.length) throw new Error("the value ends too early");
    this.at += size;
    return this.at - size;
  }

  // A zigzag number, as Number where it is exact, otherwise as BigInt.
  long() {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = this.bytes[this.take(1)];
      if (shift === 63n && byte > 1) throw new Error("a number has more than 64 bits");
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) break;
    }
    const signed = (value >> 1n) ^ -(value & 1n);
    return Number.isSafeInteger(Number(signed)) ? Number(signed) : signed;
  }

  int() {
    const value = this.long();
    if (value < -MOST_INT || value >= MOST_INT) throw new Error("an int has more than 32 bits");
    return value;
  }

  boolean() {
    const byte = this.bytes[this.take(1)];
    if (byte > 1) throw new Error(`a boolean has the byte ${byte}, which is neither 0 nor 1`);
    return byte === 1;
  }

  slice(size = Number(this.long())) {
    const start = this.take(size);
    return this.bytes.subarray(start, start + size);
  }

  text() {
    const bytes = this.slice();
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch {
      throw new Error("a string is not UTF-8");
    }
  }
}

const hex = (bytes) => [...bytes].map((one) => one.toString(16).padStart(2, "0")).join("");

// What a named type must have besides its name.
const COMPLETE = {
  record: (schema) => Array.isArray(schema.fields),
  error: (schema) => Array.isArray(schema.fields),
  enum: (schema) => Array.isArray(schema.symbols),
  fixed: (schema) => Number.isInteger(schema.size) && schema.size >= 0,
};

// Schemas of named types, by full name. Throws an Error: one of them is incomplete.
function collect(schema, names, namespace = "") {
  if (Array.isArray(schema)) return schema.forEach((one) => collect(one, names, namespace));
  if (schema === null || typeof schema !== "object") return undefined;
  if (Object.hasOwn(COMPLETE, schema.type)) {
    if (typeof schema.name !== "string") throw new Error(`The schema has the type ${schema.type} without a name.`);
    if (!COMPLETE[schema.type](schema)) throw new Error(`The schema is incomplete: see its ${schema.type} ${schema.name}.`);
    const space = schema.namespace ?? (schema.name.includes(".") ? schema.name.replace(/\.[^.]*$/, "") : namespace);
    names.set(schema.name.includes(".") || !space ? schema.name : `${space}.${schema.name}`, schema);
    names.set(schema.name.replace(/^.*\./, ""), schema);
    for (const field of schema.fields ?? []) collect(field.type, names, space);
    return undefined;
  }
  for (const part of [schema.type, schema.items, schema.values]) if (part !== undefined) collect(part, names, namespace);
  return undefined;
}

// A block whose count is negative states its size in bytes.
function blocks(reader, take) {
  for (let count = Number(reader.long()); count !== 0; count = Number(reader.long())) {
    const end = count < 0 ? Number(reader.long()) + reader.at : null;
    for (count = Math.abs(count); count > 0; count--) take();
    if (end !== null && end !== reader.at) throw new Error("a block does not have the size that it states");
  }
}

// The one that an index in the value chooses.
function chosen(reader, among, what) {
  const index = Number(reader.int());
  if (index < 0 || index >= among.length) throw new Error(`${what} has no number ${index}: its last one is ${among.length - 1}`);
  return among[index];
}

function read(reader, schema, names, depth) {
  if (++reader.steps > MOST_STEPS) throw new Error(`it has more than ${MOST_STEPS} values`);
  if (depth > MOST_DEPTH) throw new Error(`it is nested more than ${MOST_DEPTH} levels deep`);
  if (Array.isArray(schema)) return read(reader, chosen(reader, schema, "a union"), names, depth + 1);
  if (typeof schema === "string" && !PRIMITIVES.includes(schema)) {
    if (!names.has(schema)) throw new Error(`the schema does not define the type ${schema}`);
    return read(reader, names.get(schema), names, depth + 1);
  }
  const type = typeof schema === "string" ? schema : schema?.type;
  if (type === undefined) throw new Error("the schema lacks a type");
  if (typeof type !== "string") return read(reader, type, names, depth + 1);
  switch (type) {
    case "null": return null;
    case "boolean": return reader.boolean();
    case "int": return reader.int();
    case "long": return reader.long();
    case "float": return reader.view.getFloat32(reader.take(4), true);
    case "double": return reader.view.getFloat64(reader.take(8), true);
    case "bytes": return hex(reader.slice());
    case "string": return reader.text();
    case "fixed": return hex(reader.slice(schema.size));
    case "enum": return chosen(reader, schema.symbols, `the enum ${schema.name}`);
    case "array": {
      const items = [];
      blocks(reader, () => items.push(read(reader, schema.items, names, depth + 1)));
      return items;
    }
    case "map": {
      const entries = [];
      blocks(reader, () => {
        const key = reader.text();
        entries.push([key, read(reader, schema.values, names, depth + 1)]);
      });
      return Object.fromEntries(entries);
    }
    case "record": case "error":
      return Object.fromEntries(schema.fields.map((field) => [field.name, read(reader, field.type, names, depth + 1)]));
    default: return read(reader, type, names, depth + 1);
  }
}

// The text of the value as JSON with line breaks; throws an Error with the reason. `bytes`: of the message, with or
// without a header of a schema registry (0 and 4 bytes) or of single object encoding (C3 01 and 8 bytes).
export function avroAsJson(bytes, schemaText) {
  const schema = JSON.parse(PRIMITIVES.includes(schemaText.trim()) ? `"${schemaText.trim()}"` : schemaText);
  const names = new Map();
  collect(schema, names);
  const starts = [0];
  if (bytes[0] === 0 && bytes.length > 5) starts.unshift(5);
  if (bytes[0] === 0xc3 && bytes[1] === 1) starts.unshift(10);
  let failure;
  for (const start of starts) {
    const reader = new Reader(bytes.subarray(start));
    try {
      const value = read(reader, schema, names, 0);
      if (reader.at < reader.bytes.length) throw new Error(`${reader.bytes.length - reader.at} bytes are left over`);
      const text = asJson(value);
      if (text.length > MOST_CHARS) throw new Error("its text is too long to be shown");
      return text;
    } catch (error) {
      failure ??= error;
    }
  }
  throw new Error(`The value does not fit this schema: ${failure.message}.`);
}

// With numbers that JSON.stringify refuses (BigInt) or changes (NaN, Infinity, -0). They are marked by what no message can
// contain.
export function asJson(value) {
  const mark = hex(crypto.getRandomValues(new Uint8Array(16)));
  const isExact = (one) => typeof one !== "bigint" && (typeof one !== "number" || (Number.isFinite(one) && !Object.is(one, -0)));
  const shown = (one) => (Object.is(one, -0) ? "-0" : String(one));
  const marked = JSON.stringify(value, (_, one) => (isExact(one) ? one : mark + shown(one)), 2);
  return (marked ?? "null").replaceAll(new RegExp(`"${mark}([^"]*)"`, "g"), "$1");
}
