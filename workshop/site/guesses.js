// Predictions in a page: a reader guesses, then sees what was measured. Nothing leaves the page.
addEventListener("DOMContentLoaded", () => {
  // The theme's search button has two names; the one that is written on it is enough.
  document.querySelectorAll(".search-button-field").forEach((button) => button.removeAttribute("aria-label"));
  const units = { k: 1e3, M: 1e6, G: 1e9, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, ms: 1e-3, us: 1e-6, "%": 0.01 };
  const forms = [...document.querySelectorAll("form.guess")];
  const truthOf = (form) => [...document.querySelectorAll(".truth")].find((truth) => truth.dataset.name === form.dataset.name);
  let right = 0;
  let made = 0;

  function number(text) {
    const [, digits, unit] = text.replaceAll(",", "").match(/^\s*([-+.\deE]*\d)\s*([A-Za-z%]*)/) ?? [];
    return digits * (units[unit] ?? units[unit?.[0]] ?? 1);
  }

  function verdict(guess, truth) {
    if (isNaN(truth)) return guess === truth ? [true, "right"] : [false, `not ${guess}`];
    const ratio = number(guess) / truth;
    const close = Math.max(ratio, 1 / ratio) <= 1.1;
    return [close, `you said ${guess}: ${ratio === 1 ? "exactly right" : `${+ratio.toPrecision(3)} times what was measured`}`];
  }

  for (const form of forms) {
    const truth = truthOf(form);
    if (!truth || !form.querySelector("button")) continue;
    truth.classList.add("hidden");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const guess = event.submitter?.value || form.querySelector("input")?.value || "";
      if (!guess || (!form.querySelector("button[value]") && isNaN(number(guess)))) return;
      const [close, text] = verdict(guess, truth.dataset.truth);
      [right, made] = [right + close, made + 1];
      form.classList.add(close ? "close" : "off");
      form.querySelector("output").textContent = text;
      form.querySelectorAll("button, input").forEach((part) => (part.disabled = true));
      truth.classList.remove("hidden");
      document.querySelectorAll(".score").forEach((score) => (score.textContent = `${right} of ${made} right or close`));
    });
  }
});
