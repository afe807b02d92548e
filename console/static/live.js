// Renews the cells of a page while it can be seen, and says since when it is stale.
import { addPoint, drawCharts } from "./chart.js";

const SILENCE_MS = 6000;
const REDRAWN_MS = 1500;

let source = null;
let cells = new Map();
let heardAt = Date.now();
let lastSample = "";
let redrawnAt = 0;
let isRedrawing = false;
let problem = "";

function collect() {
  cells = new Map();
  for (const element of document.querySelectorAll("#main [data-live], #main [data-chart]")) {
    cells.set(element.dataset.live || element.dataset.chart, element);
  }
}

function patch(changes) {
  for (const [name, value] of Object.entries(changes)) {
    const element = cells.get(name);
    if (!element) {
      continue;
    }
    if (typeof value === "number") {
      addPoint(element, value);
      continue;
    }
    const [text, tone] = value;
    if (element.textContent !== text) {
      element.textContent = text;
      element.toggleAttribute("data-long", text.length > 30);
      if (element.parentElement.title) {
        element.parentElement.title = text;
      }
    }
    if (element.className !== tone) {
      element.className = tone;
    }
  }
}

/** Draw the page again, and keep the scroll position, the focus, and forms that are filled in. */
async function redraw() {
  if (isRedrawing || Date.now() - redrawnAt < REDRAWN_MS) {
    return;
  }
  isRedrawing = true;
  try {
    const response = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (response.status === 401) {
      signedOut();
      return;
    }
    if (!response.ok) {
      return;
    }
    const drawn = new DOMParser().parseFromString(await response.text(), "text/html");
    const main = document.getElementById("main");
    const focused = document.activeElement;
    const focus = main.contains(focused) ? focused.id || focused.getAttribute("href") : null;
    const next = drawn.getElementById("main");
    for (const form of main.querySelectorAll("form[data-kept]")) {
      // What somebody is typing stays.
      next.querySelector(`#${form.id}`)?.replaceWith(form);
    }
    main.replaceChildren(...next.childNodes);
    main.dataset.structure = next.dataset.structure || "";
    if (focus) {
      const again = [...main.querySelectorAll("a, button, [id]")].find(
        (each) => each.id === focus || each.getAttribute("href") === focus,
      );
      again?.focus({ preventScroll: true });
    }
    drawCharts(main);
    collect();
    redrawnAt = Date.now();
  } finally {
    isRedrawing = false;
  }
}

function clock(text) {
  return text.slice(11, 19);
}

function show(state, text) {
  const element = document.getElementById("state");
  if (element.dataset.state !== state) {
    element.dataset.state = state;
  }
  const label = document.getElementById("state-text");
  if (label.textContent !== text) {
    // A screen reader hears a change of the state, not each second.
    label.setAttribute("aria-hidden", state === "live" ? "true" : "false");
    label.textContent = text;
  }
}

function warn(text) {
  const stale = document.getElementById("stale");
  if (stale.textContent !== text) {
    stale.textContent = text;
  }
  stale.hidden = !text;
  document.body.classList.toggle("is-stale", Boolean(text));
}

/** A link to sign in that leads back to this page. */
export function signInLink() {
  const link = document.createElement("a");
  link.href = location.href;
  link.textContent = "Sign in again";
  return link;
}

function signedOut() {
  stop();
  show("stale", "signed out");
  warn("");
  const stale = document.getElementById("stale");
  stale.replaceChildren(
    `Your sign-in has ended; this page is as of ${clock(lastSample)} UTC. `,
    signInLink(),
  );
  stale.hidden = false;
}

function hear(message) {
  heardAt = Date.now();
  const event = JSON.parse(message.data);
  if (event.signed_out) {
    signedOut();
    return;
  }
  if (event.problem) {
    problem = event.problem;
    const since = lastSample ? ` What you see is as of ${clock(lastSample)} UTC.` : "";
    show("stale", "stale");
    warn(`${problem}.${since}`);
    return;
  }
  problem = "";
  lastSample = event.at;
  warn("");
  show("live", `live · ${clock(event.at)} UTC`);
  patch(event.cells || {});
  document.documentElement.dataset.renewed = event.at;
  if (event.structure !== document.getElementById("main").dataset.structure) {
    redraw().catch(() => {}); // the next event tries again
  }
}

function lost() {
  show("stale", "no answer");
  const since = lastSample ? ` since ${clock(lastSample)} UTC` : "";
  warn(`The metaserver has not answered${since}; what you see is as of then. Trying again …`);
}

function start() {
  if (source) {
    return;
  }
  heardAt = Date.now();
  const page = location.pathname + location.search;
  source = new EventSource(`/console/live?page=${encodeURIComponent(page)}`);
  source.onmessage = hear;
  source.onerror = () => {
    lost();
    if (source && source.readyState === EventSource.CLOSED) {
      // A refusal, such as that of an ended sign-in: drawing the page again tells which.
      stop();
      setTimeout(() => {
        redraw().catch(() => {}).finally(() => document.hidden || isSignedOut() || start());
      }, 1000);
    }
  };
}

function isSignedOut() {
  return document.querySelector("#stale a") !== null;
}

function stop() {
  source?.close();
  source = null;
}

/** Begin to renew this page. A page that nobody sees is not renewed. */
export function startLive() {
  lastSample = new Date().toISOString();
  collect();
  if (!document.hidden) {
    start();
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", (event) => event.persisted && start());
  setInterval(() => {
    if (source && !problem && Date.now() - heardAt > SILENCE_MS) {
      lost();
    }
  }, 1000);
}
