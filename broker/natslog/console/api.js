// The public HTTP API of the broker that served this page. Requests that another broker must answer are passed on by
// this one (Natslog-Forward). Errors have the message of the broker, which states what to do.

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The broker answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? "unknown";
  }
}

const SESSION = "/v1/session";
const WITHIN_MS = 60_000;
let csrf = Promise.resolve(""); // known as soon as the session is

async function send(method, path, body, accept = "application/json") {
  const headers = { "Natslog-Forward": "true", Accept: accept };
  if (method !== "GET") headers["Natslog-Csrf"] = await csrf;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: AbortSignal.timeout(WITHIN_MS) });
  } catch (failure) {
    const what = failure.name === "TimeoutError" ? `has not answered for ${WITHIN_MS / 1000} s` : "cannot be reached";
    throw new ApiError(0, { message: `The broker ${what}. Check that it is running.`, code: "unreachable" });
  }
  const text = await response.text();
  if (response.status === 401 && path !== SESSION) dispatchEvent(new Event("natslog-refused")); // the session has ended
  if (!response.ok) throw new ApiError(response.status, parsed(text, path, response.status)?.error);
  return { text, response };
}

function parsed(text, path, status) {
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(status, { message: `The response of ${path} is not JSON.` });
  }
}

async function asJson(method, path, body) {
  const { text, response } = await send(method, path, body);
  return parsed(text, path, response.status);
}

function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const get = (path, query = {}) => asJson("GET", withQuery(path, query));
export const post = (path, body) => asJson("POST", path, body);
export const patch = (path, body) => asJson("PATCH", path, body);
export const put = (path, body) => asJson("PUT", path, body);
export const remove = (path) => asJson("DELETE", path);

// Messages as a list; `isWhole`: whether all that were asked for are in it.
export async function lines(path, query) {
  const { text, response } = await send("GET", withQuery(path, query), undefined, "application/x-ndjson");
  const rows = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const [next, end] = ["Natslog-Next-Offset", "Natslog-High-Watermark"].map((name) => Number(response.headers.get(name)));
  return { rows, isWhole: next >= end };
}

// Who is signed in, and what that permits; null if it was asked again meanwhile, or forgotten. It is kept for this tab,
// so that a page that is opened next can begin at once.
const KEPT = "natslog-session";
let asked = 0;
export async function session() {
  const number = ++asked;
  const answer = get(SESSION);
  csrf = answer.then((found) => found.csrf, () => "");
  const { csrf: value, ...who } = await answer;
  if (number !== asked) return null;
  who.has_signed_in = Boolean(value);
  if (who.needs_token) forget();
  else storage((kept) => kept.setItem(KEPT, JSON.stringify(who)));
  return who;
}

// As it was when this tab asked last, or null. The broker checks each request all the same.
export const sessionBefore = () => storage((kept) => JSON.parse(kept.getItem(KEPT)));

// Everything that this tab has kept for the one who was signed in.
export function forget() {
  asked++;
  storage((kept) => kept.clear());
}

// The result of `work`; null if the browser refuses to keep anything.
export function storage(work) {
  try {
    return work(sessionStorage);
  } catch {
    return null;
  }
}

// Other tabs have the same cookie.
const tabs = new BroadcastChannel("natslog-session");
tabs.onmessage = () => dispatchEvent(new Event("natslog-refused"));

export async function signIn(token) {
  await post(SESSION, { token });
  tabs.postMessage("changed");
}

export async function signOut() {
  await remove(SESSION);
  tabs.postMessage("changed");
}

export const inPath = encodeURIComponent;
