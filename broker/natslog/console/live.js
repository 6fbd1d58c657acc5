// The overview of the cluster as it changes: one connection for the page, shared by everything that shows it.

import { useEffect, useState } from "./vendor/preact.js";
import { sessionBefore } from "./api.js";

const state = { overview: null, streams: new Map(), isConnected: false, version: 0 };
const listeners = new Set();
let source = null;

function rows(table) {
  const names = Object.keys(table);
  return table.name.map((_, at) => Object.fromEntries(names.map((name) => [name, table[name][at]])));
}

function take(overview) {
  if (overview.is_whole) state.streams.clear();
  for (const row of rows(overview.streams)) state.streams.set(row.name, row);
  for (const name of overview.removed) state.streams.delete(name);
  state.overview = overview;
  changed(true);
}

function changed(isConnected) {
  state.isConnected = isConnected;
  state.version++;
  for (const listener of listeners) listener(state.version);
}

const AGAIN_MS = 3000;
const SILENT_MS = 10_000; // an event comes every two seconds
let isWanted = false;
let timer = 0;
let silence = 0;

function noteEvent() {
  clearTimeout(silence);
  silence = setTimeout(() => isWanted && (changed(false), open()), SILENT_MS);
}

// A browser connects again by itself after a connection was lost, but not after an error was answered.
function open() {
  source?.close();
  clearTimeout(timer);
  isWanted = true;
  noteEvent();
  const opened = (source = new EventSource("/v1/live"));
  opened.addEventListener("overview", (event) => opened === source && (noteEvent(), take(JSON.parse(event.data))));
  opened.addEventListener("error", () => {
    if (opened !== source) return;
    changed(false);
    if (opened.readyState !== EventSource.CLOSED) return;
    timer = setTimeout(open, AGAIN_MS);
    dispatchEvent(new Event("natslog-refused")); // perhaps the session has ended
  });
}

// Components that use it are rendered again with each event.
export function useLive(isPermitted) {
  const [, show] = useState(0);
  useEffect(() => {
    listeners.add(show);
    if (isPermitted && !isWanted) open();
    return () => listeners.delete(show);
  }, []);
  return state;
}

// What was received is forgotten: the next one who signs in may see less.
export function close() {
  isWanted = false;
  clearTimeout(timer);
  clearTimeout(silence);
  source?.close();
  source = null;
  state.overview = null;
  state.streams.clear();
}

// Opened at once where it was permitted before: its first event is needed by most pages.
if (sessionBefore()?.may_monitor) open();
