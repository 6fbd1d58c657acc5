// Numbers and times as text. Every function takes null for what is unknown.

const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export function count(value) {
  return value == null ? UNKNOWN : whole.format(value);
}

export function rate(value) {
  return value == null ? UNKNOWN : `${short.format(value)}/s`;
}

export function bytes(value) {
  if (value == null) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${short.format(value)} ${units[at]}`;
}

export function byteRate(value) {
  return value == null ? UNKNOWN : `${bytes(value)}/s`;
}

export function seconds(value) {
  if (value == null) return UNKNOWN;
  if (value < 120) return `${short.format(value)} s`;
  if (value < 7200) return `${short.format(value / 60)} min`;
  if (value < 172800) return `${short.format(value / 3600)} h`;
  return `${short.format(value / 86400)} d`;
}

export function milliseconds(value) {
  return value == null ? UNKNOWN : `${short.format(value)} ms`;
}

export function share(value) {
  return value == null ? UNKNOWN : `${short.format(100 * value)} %`;
}

export function time(iso) {
  return iso ? iso.replace("T", " ").replace(/(\.\d{3})\d*Z$/, "$1Z") : UNKNOWN;
}

// Control characters are shown, so that a message cannot look like another one.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, (char) =>
    `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`,
  );
}

// A word of a command line of a shell.
export function quoted(text) {
  return /^[A-Za-z0-9._:/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
