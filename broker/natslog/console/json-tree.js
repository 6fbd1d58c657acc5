// JSON as a tree: parts are rendered when they are opened, and texts are those of the message.

import { html, useMemo, useState } from "./vendor/preact.js";
import { count, visible } from "./format.js";

const TOKENS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const MOST_AT_ONCE = 100;
const OPEN_DEPTH = 2;

export const tokensOf = (text) => text.match(TOKENS) ?? [];

// The root of JSON that is known to be valid, from its tokens: { label, text } or { label, begin, children }.
function rootOf(tokens) {
  const top = { children: [] };
  const parents = [top];
  let key = null;
  tokens.forEach((token, at) => {
    const parent = parents.at(-1);
    if (token === "}" || token === "]") parents.pop();
    else if (tokens[at + 1] === ":") key = token;
    else if (token !== "," && token !== ":") {
      const label = parent.begin === "[" ? String(parent.children.length) : key;
      const node = token === "{" || token === "[" ? { label, begin: token, children: [] } : { label, text: token };
      parent.children.push(node);
      if (node.children) parents.push(node);
    }
  });
  return top.children[0];
}

const sizeOf = ({ begin, children }) =>
  begin === "[" ? `[ ${count(children.length)} ]` : `{ ${count(children.length)} }`;

function Node({ node, depth }) {
  const [isOpen, setOpen] = useState(depth < OPEN_DEPTH);
  const [most, setMost] = useState(MOST_AT_ONCE);
  const label = node.label === null ? "" : html`<span class="key">${visible(node.label)}</span> `;
  if (!node.children) return html`<li>${label}<code>${visible(node.text)}</code></li>`;
  const left = node.children.length - most;
  return html`<li>
    <details open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>${label}${sizeOf(node)}</summary>
      ${isOpen &&
      html`<ul>
        ${node.children.slice(0, most).map((one, at) => html`<${Node} key=${at} node=${one} depth=${depth + 1} />`)}
        ${left > 0 && html`<li><button type="button" onClick=${() => setMost(most + MOST_AT_ONCE)}>Show more: ${count(left)} are left</button></li>`}
      </ul>`}
    </details>
  </li>`;
}

export function JsonTree({ text }) {
  const root = useMemo(() => rootOf(tokensOf(text)), [text]);
  return html`<ul class="tree"><${Node} node=${root} depth=${0} /></ul>`;
}
