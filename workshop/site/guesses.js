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

  // Outputs and texts on the way from a guess to its truth may tell it, and so may the truth's own cell (its code compares
  // the guess with an expression) and the text that reads it: they are folded until there is a guess. Other code stays.
  const article = document.querySelector("article") ?? document.body;
  const follows = (one, other) => one.compareDocumentPosition(other) === Node.DOCUMENT_POSITION_FOLLOWING;
  const outputs = [...article.querySelectorAll(".cell_output > *")].filter((output) => !output.querySelector("form.guess, .truth, .score"));
  const notText = "section, .cell, h1, h2, h3, h4, h5, h6, script, span[id]";
  const texts = [...article.querySelectorAll("section > *")].filter((text) => !text.matches(notText) && !asksNext(text));
  const between = (form, truth) => [...outputs, ...texts].filter((part) => follows(form, part) && follows(part, truth));

  function nextCell(text) {
    let next = text.nextElementSibling;
    while (next && !next.matches("section, .cell")) next = next.nextElementSibling;
    return next?.matches(".cell") ? next : null;
  }

  function asksNext(text) {
    return !!nextCell(text)?.querySelector("form.guess");
  }

  function besideTruth(truth) {
    const cell = truth.closest(".cell");
    const shown = [...(cell?.querySelectorAll(".cell_input") ?? []), ...outputs.filter((output) => cell?.contains(output))];
    const reading = texts.filter((text) => cell && follows(cell, text) && text.parentElement === cell.parentElement);
    return [...shown, ...reading.filter((text) => cellBefore(text) === cell)];
  }

  function cellBefore(text) {
    let before = text.previousElementSibling;
    while (before && !before.matches("section, .cell, h2, h3, h4")) before = before.previousElementSibling;
    return before;
  }

  const folds = new Map(); // how many guesses a part waits for

  function fold(part) {
    folds.set(part, (folds.get(part) ?? 0) + 1);
    if (folds.get(part) > 1) return;
    const button = document.createElement("button");
    button.className = "folded";
    button.textContent = "Folded until you have guessed, above. Click to see it now.";
    button.onclick = () => unfoldRun(part);
    part.before(button);
    part.hidden = true;
  }

  function unfold(part, times = 1) {
    folds.set(part, folds.get(part) - times);
    if (folds.get(part) > 0 || !part.hidden) return;
    part.hidden = false;
    part.previousElementSibling.remove();
  }

  // Folded parts that follow each other have one button, that of the first (site.css).
  function unfoldRun(part) {
    for (let next = part; next?.hidden; ) {
      const [button, after] = [next.nextElementSibling, next.nextElementSibling?.nextElementSibling];
      unfold(next, Infinity);
      next = button?.matches("button.folded") ? after : null;
    }
  }

  for (const form of forms) {
    const truth = truthOf(form);
    if (!truth) continue;
    truth.classList.add("hidden");
    const covered = [...new Set([...between(form, truth), ...besideTruth(truth)])];
    covered.forEach(fold);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!form.matches(".grid")) {
        const guess = event.submitter?.value || form.querySelector("input")?.value || "";
        if (!guess || (!form.querySelector("button[value]") && isNaN(number(guess)))) return;
        const [close, text] = verdict(guess, truth.dataset.truth);
        [right, made] = [right + close, made + 1];
        form.classList.add(close ? "close" : "off");
        form.querySelector("output").textContent = text;
      }
      form.querySelectorAll("button, input").forEach((part) => (part.disabled = true));
      truth.classList.remove("hidden");
      covered.forEach((part) => unfold(part));
      document.querySelectorAll(".score").forEach((score) => (score.textContent = `${right} of ${made} right or close`));
    });
  }
});
