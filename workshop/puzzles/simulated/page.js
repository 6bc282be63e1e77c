// The puzzles' page: texts, an editor that keeps what is written, and pictures of what Python found in worker.js.
const LIMIT_S = 15; // a right program takes less than one
const { introductions, puzzles } = JSON.parse(document.getElementById("texts").textContent);
const $ = (id) => document.getElementById(id);
const editor = $("program");
let puzzle, worker, timer, leaving;

// What is written stays in this browser, if it lets pages keep anything.
const kept = (what) => {
  try {
    return localStorage.getItem(`aiscale puzzle ${puzzle.name} ${what}`);
  } catch {
    return null;
  }
};
const keep = (what, text) => {
  try {
    localStorage.setItem(`aiscale puzzle ${puzzle.name} ${what}`, text);
  } catch {
    // it lasts as long as the page
  }
};

function show(name) {
  puzzle = puzzles.find((each) => each.name === name) ?? puzzles[0];
  document.title = `${puzzle.title} · puzzles`;
  $("title").textContent = puzzle.title;
  $("text").innerHTML = puzzle.text;
  $("after").innerHTML = puzzle.after;
  $("after").hidden = !kept("solved");
  editor.value = kept("text") ?? puzzle.stub;
  $("introductions").firstChild.open = puzzle === puzzles[0];
  draw(null);
  if (worker.isReady) say("Ready.");
  list();
}

function list() {
  $("puzzles").replaceChildren(
    ...puzzles.map((each) => {
      const [now, button] = [puzzle, document.createElement("button")];
      puzzle = each;
      button.textContent = (kept("solved") ? "✓ " : "") + each.title;
      puzzle = now;
      if (each === puzzle) button.setAttribute("aria-current", "true");
      button.onclick = () => (location.hash = each.name);
      return button;
    }),
  );
}

function say(text, kind = "") {
  $("said").textContent = text;
  $("said").className = kind;
}

// Python -------------------------------------------------------------------------------------------------------------

function start() {
  worker = new Worker("puzzle_worker.js", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.ready) {
      worker.isReady = true;
      $("run").disabled = false;
      if ($("said").textContent.startsWith("Python is loading")) say("Ready.");
      document.body.dataset.ready = "yes";
    } else if (data.did) {
      ended(data.did);
    } else if (data.broken) {
      anew(`Python stopped: ${data.broken}`);
    } else {
      say(`The page cannot start: ${data.failed}`, "wrong");
      document.body.dataset.ready = "no";
    }
  };
  worker.onerror = (event) => anew(`Python stopped: ${event.message ?? "it may have run out of memory"}`);
}

function anew(why) {
  clearTimeout(timer);
  worker.terminate();
  $("run").disabled = true;
  start();
  tried(why, "wrong");
}

function run() {
  if ($("run").disabled) return;
  $("run").disabled = true;
  say("The ranks run ...");
  const { name, function: program, given } = puzzle;
  worker.asked = puzzle;
  worker.postMessage({ name, function: program, given, source: editor.value });
  timer = setTimeout(() => anew(`Stopped after ${LIMIT_S} s: does a loop never end?`), 1000 * LIMIT_S);
}

function ended(did) {
  clearTimeout(timer);
  $("run").disabled = false;
  if (worker.asked !== puzzle) return;
  if (did.solved) {
    keep("solved", "yes");
    $("after").hidden = false;
    list();
  }
  draw(did.picture);
  tried(did.text, did.solved ? "right" : "wrong");
}

function tried(text, kind) {
  say(text, kind);
  document.body.dataset.tries = Number(document.body.dataset.tries ?? 0) + 1;
}

// The editor ---------------------------------------------------------------------------------------------------------

function insert(text) {
  document.execCommand("insertText", false, text); // keeps the browser's undo
}

function lineStart() {
  return editor.value.lastIndexOf("\n", editor.selectionStart - 1) + 1;
}

function indent(back) {
  const { selectionStart: from, selectionEnd: to } = editor;
  if (from === to && !back) return insert("    ");
  const start = lineStart();
  const lines = editor.value.slice(start, to).split("\n");
  const moved = lines.map((line) => (back ? line.replace(/^ {1,4}/, "") : `    ${line}`)).join("\n");
  editor.setSelectionRange(start, to);
  insert(moved);
  if (from === to) editor.setSelectionRange(Math.max(start, from + moved.length - (to - start)), start + moved.length);
  else editor.setSelectionRange(start, start + moved.length);
}

editor.onkeydown = (event) => {
  const letsGo = leaving;
  leaving = event.key === "Escape" || (leaving && event.key === "Shift");
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Tab" && !letsGo) {
    event.preventDefault();
    indent(event.shiftKey);
  } else if (event.key === "Enter") {
    event.preventDefault();
    const line = editor.value.slice(lineStart(), editor.selectionStart);
    insert(`\n${line.match(/^ */)[0]}${/:\s*$/.test(line) ? "    " : ""}`);
  }
};
editor.oninput = () => keep("text", editor.value);
$("run").onclick = run;
$("again").onclick = () => {
  editor.focus();
  editor.select();
  insert(puzzle.stub);
};

// The picture --------------------------------------------------------------------------------------------------------

const KINDS = { forward: "forward", backward: "backward", weights: "gradients of the parameters", optimizer: "update", communication: "sent" };
const LEFT = 64;
const WIDE = 620;

function make(name, about, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(about).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text;
  return made;
}

function draw(picture) {
  $("drawing").replaceChildren();
  $("legend").replaceChildren();
  if (!picture) return;
  const { ranks, end, targets, bars, arrows, stuck, memory } = picture;
  const last = Math.max(1, end, targets.time ?? 0);
  const x = (seconds) => LEFT + (seconds * WIDE) / last;
  const works = bars.some((bar) => bar[4] !== "communication");
  const shares = bars.some((bar) => bar[4] === "communication");
  const tall = works && shares ? 62 : 40;
  const bottom = ranks * tall + 26;
  const whole = bottom + 20 + (memory.length ? 150 : 0);
  const svg = make("svg", { role: "img", "aria-label": "what each rank does, over time", viewBox: `0 0 ${LEFT + WIDE + 26} ${whole}` });
  const tip = make("marker", { id: "tip", viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto" });
  tip.append(make("path", { d: "M0 0 L6 3 L0 6 z", fill: "context-stroke" }));
  svg.append(tip);

  const every = Math.ceil(last / 10);
  for (let s = 0; s <= last; s += every) {
    svg.append(make("line", { class: "grid", x1: x(s), x2: x(s), y1: 18, y2: bottom }));
    svg.append(make("text", { x: x(s) - 6, y: bottom + 16 }, `${s} s`));
  }
  for (let rank = 0; rank < ranks; rank++) svg.append(make("text", { x: 8, y: 26 + rank * tall + tall / 2 }, `rank ${rank}`));
  for (const [rank, label, start, ends, kind] of bars) {
    const lower = works && kind === "communication";
    const y = 22 + rank * tall + (lower ? 31 : 0);
    const wide = Math.max(1, x(ends) - x(start) - 1.5);
    svg.append(make("rect", { class: "bar", x: x(start), y, width: wide, height: lower || (works && shares) ? 24 : 28, rx: 3, fill: `var(--${kind})` }));
    svg.append(make("text", { x: x(start) + wide / 2, y: y + 17 }, 7.5 * label.length < wide ? label : ""));
  }
  for (const [rank, since] of stuck) {
    const wide = Math.max(20, x(last) - x(since));
    svg.append(make("rect", { class: "stuck", x: Math.min(x(since), x(last) - 20), y: 22 + rank * tall, width: wide, height: 28, rx: 3 }));
    svg.append(make("text", { x: x(last) - 40, y: 40 + rank * tall }, "waits"));
  }
  for (const [source, to, start, arrived] of arrows) {
    const middle = (rank) => 22 + rank * tall + tall / 2;
    const side = Math.sign(to - source) * 12;
    svg.append(make("line", { class: "arrow", x1: x(start), x2: x(arrived), y1: middle(source) + side, y2: middle(to) - side }));
  }
  if (targets.time) target(svg, x(targets.time), 14, x(targets.time), bottom, `target ${targets.time} s`, x(targets.time) - 84, 13);
  if (memory.length) drawMemory(svg, memory, targets.memory, x, bottom + 34, last);
  $("drawing").append(svg);
  explain(new Set(bars.map((bar) => bar[4])));
}

function explain(kinds) {
  for (const [kind, words] of Object.entries(KINDS)) {
    if (!kinds.has(kind)) continue;
    const [sample, entry] = [document.createElement("i"), document.createElement("span")];
    sample.style.background = `var(--${kind})`;
    entry.append(sample, words);
    $("legend").append(entry);
  }
}

function target(svg, x1, y1, x2, y2, text, x, y) {
  svg.append(make("line", { class: "target", x1, y1, x2, y2 }));
  svg.append(make("text", { x, y }, text));
}

function drawMemory(svg, memory, most, x, top, last) {
  const peaks = memory.map((steps) => Math.max(0, ...steps.map((step) => step[1])));
  const highest = 1.15 * Math.max(...peaks, most);
  const y = (gb) => top + 100 * (1 - gb / highest);
  const fullest = peaks.indexOf(Math.max(...peaks));
  const others = memory.keys().filter((rank) => rank !== fullest);
  [...others, fullest].forEach((rank) => {
    const steps = memory[rank];
    const path = steps.map(([at, gb], i) => `${i ? `H${x(at)}` : `M${x(at)} ${y(gb)}`} V${y(gb)}`).join(" ");
    svg.append(make("path", { class: `memory${rank === fullest ? " fullest" : ""}`, d: `${path} H${x(last)}` }));
  });
  svg.append(make("text", { x: 8, y: top + 50 }, "memory"));
  svg.append(make("text", { x: x(last) - 150, y: top + 116 }, `rank ${fullest}: ${peaks[fullest]} GB at most`));
  target(svg, LEFT, y(most), x(last), y(most), `target ${most} GB`, LEFT + 4, y(most) - 4);
}

// -------------------------------------------------------------------------------------------------------------------

$("introductions").innerHTML = introductions
  .map(({ title, text }) => `<details><summary>${title}</summary>${text}</details>`)
  .join("");
start();
show(location.hash.slice(1));
addEventListener("hashchange", () => show(location.hash.slice(1)));
