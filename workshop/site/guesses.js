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

  // Outputs on the way from a guess to its truth may tell it: they are folded until there is a guess.
  const follows = (one, other) => one.compareDocumentPosition(other) === Node.DOCUMENT_POSITION_FOLLOWING;
  const outputs = [...document.querySelectorAll(".cell_output > *")].filter((output) => !output.querySelector("form.guess, .truth"));
  const between = (form, truth) => outputs.filter((output) => follows(form, output) && follows(output, truth));
  const folds = new Map();

  function fold(output) {
    folds.set(output, (folds.get(output) ?? 0) + 1);
    if (folds.get(output) > 1) return;
    const button = document.createElement("button");
    button.className = "folded";
    button.textContent = "Folded until you have guessed, above. Click to see it now.";
    button.onclick = () => unfold(output, Infinity);
    output.before(button);
    output.hidden = true;
  }

  function unfold(output, times = 1) {
    folds.set(output, folds.get(output) - times);
    if (folds.get(output) > 0 || !output.hidden) return;
    output.hidden = false;
    output.previousElementSibling.remove();
  }

  for (const form of forms) {
    const truth = truthOf(form);
    if (!truth || !form.querySelector("button")) continue;
    truth.classList.add("hidden");
    const covered = between(form, truth);
    covered.forEach(fold);
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
      covered.forEach((output) => unfold(output));
      document.querySelectorAll(".score").forEach((score) => (score.textContent = `${right} of ${made} right or close`));
    });
  }
});
