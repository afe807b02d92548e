// Adds the messages of a live tail to the top of a list.
import { signInLink } from "./live.js";

const SHOWN_MAX = 200;
const AGAIN_MS = 2000;

/** Begin the tail of a page, if it has one. */
export function startTail(root) {
  const list = root.querySelector("[data-tail]");
  if (!list) {
    return;
  }
  const state = root.querySelector("#tail-state");
  const button = root.querySelector("#tail-toggle");
  const template = root.querySelector("#tail-row");
  let source = null;
  let count = 0;

  function add(message) {
    const row = template.content.cloneNode(true);
    for (const element of row.querySelectorAll("[data-field]")) {
      element.textContent = message[element.dataset.field];
    }
    list.prepend(row);
    while (list.children.length > SHOWN_MAX) {
      list.lastElementChild.remove();
    }
  }

  function start() {
    source = new EventSource(list.dataset.tail);
    button.textContent = "Pause";
    state.textContent = "waiting for messages";
    source.addEventListener("messages", (event) => {
      const given = JSON.parse(event.data);
      given.messages.forEach(add);
      count += given.messages.length;
      const left = given.left_out ? `; ${given.left_out} more were left out, because they come too fast` : "";
      state.textContent = `${count} new${left}`;
    });
    source.onmessage = (event) => {
      const given = JSON.parse(event.data);
      if (given.signed_out) {
        signedOut();
        return;
      }
      state.textContent = given.problem;
      stop("Try again");
    };
    source.onerror = () => {
      state.textContent = "no answer; trying again";
      if (source.readyState === EventSource.CLOSED) {
        // A refusal, such as that of an ended sign-in: the page itself tells which.
        stop("Try again");
        setTimeout(tryAgain, AGAIN_MS);
      }
    };
  }

  async function tryAgain() {
    const response = await fetch(location.href).catch(() => null);
    if (response?.status === 401) {
      signedOut();
    } else if (!source && !document.hidden) {
      start();
    }
  }

  function signedOut() {
    stop("");
    button.hidden = true;
    state.replaceChildren("Your sign-in has ended. ", signInLink());
  }

  function stop(text) {
    source?.close();
    source = null;
    button.textContent = text;
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    if (source) {
      stop("Continue");
      state.textContent = "paused";
    } else {
      start();
    }
  });
  document.addEventListener("visibilitychange", () => document.hidden && source && stop("Continue"));
  if (document.hidden) {
    stop("Continue"); // it was opened in a tab that nobody sees yet
  } else {
    start();
  }
}
