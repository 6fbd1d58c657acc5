// The frame around the pages: who is signed in, where one can go, and the page that the address names.

import { html, render, useEffect, useLayoutEffect, useState } from "./vendor/preact.js";
import { forget, session, sessionBefore, signIn, signOut } from "./api.js";
import { close, useLive } from "./live.js";
import { Failure, Waiting } from "./parts.js";
import { Overview } from "./pages/overview.js";
import { Streams } from "./pages/streams.js";
import { Stream } from "./pages/stream.js";
import { Consumers } from "./pages/consumers.js";
import { Letters } from "./pages/letters.js";
import { Brokers } from "./pages/brokers.js";
import { Activity } from "./pages/activity.js";
import { Access } from "./pages/access.js";

const PAGES = {
  overview: ["Overview", Overview],
  streams: ["Streams", Streams],
  consumers: ["Consumers", Consumers],
  letters: ["Dead letters", Letters],
  brokers: ["Brokers", Brokers],
  activity: ["Activity", Activity],
  access: ["Access", Access],
};

// #/streams/orders?tab=browse: ["streams", "orders", URLSearchParams]
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, name] = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return [page || "overview", name, new URLSearchParams(query)];
}

function SignIn({ onDone }) {
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await signIn(new FormData(event.target).get("token").trim());
      onDone();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<main class="narrow">
    <h1>Sign in</h1>
    <p>This cluster requires a token. An administrator creates one with <code>natslog token create</code>.</p>
    <form onSubmit=${submit}>
      <label>Token <input name="token" type="password" autocomplete="off" required autofocus /></label>
      <button type="submit">Sign in</button>
    </form>
    <${Failure} error=${error} />
  </main>`;
}

// While there is no connection to this broker: the others, as it has stated them.
function Connection() {
  const { overview, isConnected } = useLive(true);
  if (isConnected || overview === null) return null;
  const others = overview.cluster.brokers.filter((one) => one.alive && one.url && one.url !== location.origin);
  return html`<p class="failure" role="alert">
    The connection to the broker was lost; reconnecting.${others.length > 0 && " Other brokers: "}
    ${others.map((one) => html`<a key=${one.id} href=${`${one.url}/${location.hash}`}>broker ${one.id}</a> `)}
  </p>`;
}

function App() {
  const [who, setWho] = useState(sessionBefore);
  const [failure, setFailure] = useState(null);
  const [[page, name, query], setPlace] = useState(place());
  const ask = () =>
    session().then(
      (found) => {
        if (found === null) return; // another answer is to come
        setWho((before) => {
          if (JSON.stringify(before) === JSON.stringify(found)) return before;
          close(); // what is open was permitted to another one
          return found;
        });
        setFailure(null);
      },
      (error) => setWho((before) => before ?? (setFailure(error), null)), // what is shown stays
    );
  useLayoutEffect(() => {
    ask();
    const moved = () => setPlace(place());
    addEventListener("hashchange", moved);
    addEventListener("natslog-refused", ask);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("natslog-refused", ask);
    };
  }, []);
  useEffect(() => {
    document.title = `${name ?? PAGES[page]?.[0] ?? "Not found"} – natslog`;
    document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  }, [page, name]);
  if (failure) return html`<main class="narrow"><${Failure} error=${failure} /></main>`;
  if (who === null) return html`<main><${Waiting} /></main>`;
  if (who.needs_token) return html`<${SignIn} onDone=${ask} />`;
  const leave = async () => {
    close();
    forget();
    setWho(null);
    try {
      await signOut();
      await ask();
    } catch (error) {
      setFailure(error); // it is not known whether the session has ended
    }
  };
  const Shown = page === "streams" && name ? Stream : PAGES[page]?.[1];
  return html`
    <a class="skip" href="#content" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("content").focus();
    }}>Skip to the content</a>
    <header>
      <a class="brand" href="#/overview">natslog</a>
      <nav aria-label="Pages">
        ${Object.entries(PAGES).map(
          ([key, [title]]) =>
            html`<a key=${key} href=${`#/${key}`} aria-current=${key === page ? "page" : undefined}>${title}</a>`,
        )}
      </nav>
      ${who.identity && html`<span class="who">${who.identity}</span>`}
      ${who.has_signed_in && html`<button type="button" onClick=${leave}>Sign out</button>`}
    </header>
    <main id="content" tabindex="-1">
      ${who.may_monitor && html`<${Connection} key=${JSON.stringify(who)} />`}
      ${Shown
        ? html`<${Shown} key=${JSON.stringify([who, page, name])} name=${name} query=${query} who=${who} />`
        : html`<h1>Not found</h1><p>There is no page with this address.</p>`}
    </main>
  `;
}

render(html`<${App} />`, document.getElementById("app"));
