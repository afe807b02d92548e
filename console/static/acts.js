// Shows the command of an act while its form is filled in, and guards what is typed to confirm.

/** Begin to watch the form of an act, if there is one. */
export function startActs(root) {
  const form = root.querySelector("form[data-act]");
  if (!form) {
    return;
  }
  const command = form.querySelector("#command");
  const typed = form.querySelector("#typed");
  let timer = 0;
  let asked = 0;

  async function renew() {
    asked += 1;
    const number = asked;
    const body = new URLSearchParams(new FormData(form));
    body.set("step", "command");
    const response = await fetch(form.action, { method: "POST", body }).catch(() => null);
    if (response?.ok && number === asked) {
      const given = await response.json();
      command.textContent = given.command;
      if (typed) {
        typed.dataset.name = given.typed;
        guard();
      }
    }
  }

  function guard() {
    const button = form.querySelector("button[value=do]");
    button.classList.toggle("waiting", typed.value !== typed.dataset.name);
  }

  form.addEventListener("input", (event) => {
    if (event.target === typed) {
      guard();
      return;
    }
    clearTimeout(timer);
    timer = setTimeout(renew, 150);
  });
  const copy = form.querySelector("#copy");
  if (navigator.clipboard) {
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.textContent);
      copy.textContent = "Copied";
    });
  }
  if (typed) {
    guard();
  }
  const inputs = [...form.querySelectorAll("input, textarea")];
  if (inputs.some((each) => each.value !== each.defaultValue || each.checked !== each.defaultChecked)) {
    renew(); // it was filled in before this script ran, or by the browser
  }
}
