// Parts that several pages use.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import uPlot from "./vendor/uplot.js";
import { byteRate, bytes, count } from "./format.js";

// What an asynchronous call returned: [result, error, again]. It is called when `inputs` change, and every `everyS`;
// the first time before anything is painted.
export function useCall(call, inputs, everyS = 0) {
  const [state, setState] = useState([null, null]);
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (!everyS) return undefined;
    const timer = setInterval(() => document.hidden || setRound((before) => before + 1), 1000 * everyS);
    return () => clearInterval(timer);
  }, [everyS]);
  useLayoutEffect(() => {
    let isCurrent = true;
    call().then(
      (result) => isCurrent && setState([result, null]),
      (error) => isCurrent && setState(([before]) => [round ? before : null, error]),
    );
    return () => {
      isCurrent = false;
    };
  }, [...inputs, round]);
  return [...state, () => setRound(round + 1)];
}

export function Failure({ error }) {
  return error && html`<p class="failure" role="alert">${error.message}</p>`;
}

export function Waiting() {
  return html`<p class="waiting" role="status">Loading…</p>`;
}

// An action that cannot be undone: its button works when the name was typed.
export function Typed({ name, action, what, onDone }) {
  const [text, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setText("");
    onDone();
  };
  return html`<form class="tools" onSubmit=${submit}>
    <label>${what} <input aria-label=${`${action}: type ${name}`} value=${text} autocomplete="off" placeholder=${name} onInput=${(event) => setText(event.target.value)} /></label>
    <button type="submit" class="danger" disabled=${text !== name}>${action}</button>
  </form>`;
}

export function Fact({ name, children }) {
  return html`<div class="fact"><dt>${name}</dt><dd>${children}</dd></div>`;
}

// A table that can be sorted and searched, a page at a time. `columns`: { name, title, value(row), show(row), and isNumber,
// or isText: it may be wrapped }. On a narrow page each row is a list of named values.
const ROWS = 100;
const kindOf = (column) => (column.isNumber ? "number" : column.isText ? "text" : "");
export function Table({ rows, columns, caption, searches, first = columns[0].name, isDescending = false }) {
  const [text, setText] = useState("");
  const [order, setOrder] = useState({ name: first, isDescending });
  const [page, setPage] = useState(0);
  const column = columns.find((one) => one.name === order.name);
  const found = text ? rows.filter((row) => searches(row).toLowerCase().includes(text.toLowerCase())) : rows;
  const sign = order.isDescending ? -1 : 1;
  const sorted = [...found].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    return x === y ? 0 : x == null ? 1 : y == null ? -1 : x < y ? -sign : sign;
  });
  const pages = Math.max(1, Math.ceil(sorted.length / ROWS));
  const at = Math.min(page, pages - 1);
  const sortBy = (name) => setOrder({ name, isDescending: order.name === name && !order.isDescending });
  return html`
    ${searches &&
    html`<p class="tools">
      <label>Search <input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <span role="status">${count(sorted.length)} of ${count(rows.length)}</span>
    </p>`}
    <div class="scroll" tabindex="0" role="region" aria-label=${caption}>
      <table role="table">
        <caption>${caption}</caption>
        <thead role="rowgroup">
          <tr role="row">
            ${columns.map(
              (one) => html`<th
                role="columnheader"
                scope="col"
                class=${kindOf(one)}
                aria-sort=${one.name === order.name ? (order.isDescending ? "descending" : "ascending") : "none"}
              >
                <button type="button" onClick=${() => sortBy(one.name)}>${one.title}</button>
              </th>`,
            )}
          </tr>
        </thead>
        <tbody role="rowgroup">
          ${sorted.slice(at * ROWS, (at + 1) * ROWS).map(
            (row) => html`<tr role="row" key=${row.key ?? row.name}>
              ${columns.map(
                (one) => html`<td role="cell" class=${kindOf(one)} data-title=${one.title}><div>${(one.show ?? one.value)(row)}</div></td>`,
              )}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${pages > 1 &&
    html`<p class="tools">
      <button type="button" disabled=${at === 0} onClick=${() => setPage(at - 1)}>Previous</button>
      <span>Page ${at + 1} of ${pages}</span>
      <button type="button" disabled=${at === pages - 1} onClick=${() => setPage(at + 1)}>Next</button>
    </p>`}
  `;
}

// Of a history: a series of each broker. `isPositive`: 0 stands for nothing that was measured.
export const ofBrokers = (history, name, isPositive = false) =>
  Object.fromEntries(
    Object.entries(history.brokers).map(([id, one]) => [`broker ${id}`, (one[name] ?? []).map((value) => (isPositive && value === 0 ? null : value))]),
  );

// A plot of the last hour. `series`: { label: values }, oldest first, the last value is of now; null: not known.
const MINUTES = [1, 2, 5, 10, 15, 30, 60].map((minutes) => 60 * minutes);
const POWERS = Array.from({ length: 60 }, (_, at) => 2 ** at);
export function Plot({ title, series, everyS, show }) {
  const place = useRef(null);
  const labels = Object.keys(series);
  const length = Math.max(0, ...labels.map((label) => series[label].length));
  useLayoutEffect(() => {
    if (!length) return undefined;
    const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const now = Date.now() / 1000;
    const times = Array.from({ length }, (_, at) => now - (length - 1 - at) * everyS);
    const isAlone = (values, at) => values[at] !== null && values[at - 1] == null && values[at + 1] == null;
    const padded = labels.map((label) => [...Array(length - series[label].length).fill(null), ...series[label]]);
    const line = { stroke: color("--line"), width: 1 };
    const axis = { stroke: color("--text"), grid: line, ticks: line };
    const hours = uPlot.fmtDate("{HH}:{mm}Z");
    const clock = (plot, splits) => splits.map((seconds) => hours(uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC")));
    const plot = new uPlot(
      {
        width: place.current.clientWidth,
        height: 180,
        legend: { live: false, show: labels.length > 1 },
        cursor: { show: false },
        series: [
          {},
          ...labels.map((label, at) => ({
            label,
            stroke: color(`--series-${(at % 5) + 1}`),
            width: 1.5,
            points: { show: true, size: 4, filter: () => padded[at].map((_, index) => index).filter((index) => isAlone(padded[at], index)) },
          })),
        ],
        axes: [
          { ...axis, values: clock, incrs: MINUTES },
          { ...axis, size: 80, values: (_, values) => values.map(show), ...(show === bytes || show === byteRate ? { incrs: POWERS } : {}) },
        ],
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        scales: { x: { range: (_, low, high) => [Math.min(low, high - 300), high] }, y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.1 : 1] } },
      },
      [times, ...padded],
      place.current,
    );
    const resize = new ResizeObserver(() => {
      const width = place.current.clientWidth;
      if (width !== plot.width) plot.setSize({ width, height: 180 }); // it draws everything again
    });
    resize.observe(place.current);
    return () => {
      resize.disconnect();
      plot.destroy();
    };
  }, [series]);
  const newest = labels.map((label) => `${labels.length > 1 ? `${label}: ` : ""}${show(series[label].at(-1) ?? null)}`);
  return html`<figure>
    <figcaption>${title}${length > 0 && html` <strong>${newest.join(", ")}</strong>`}</figcaption>
    ${length ? html`<div ref=${place} aria-hidden="true"></div>` : html`<p class="waiting">No changes were recorded yet.</p>`}
  </figure>`;
}
