const NEXT = ["show the guesses", "vote again", "show the second vote", "show the truth", "(the end)"];
const TURNS = { ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1, t: 4, ArrowUp: 0, ArrowDown: 0 };
let room = {}, wanted = "", drawn = "";

function bars({ labels, first, latest, right, stage }) {
  const most = Math.max(...first, ...latest);
  const bar = (kind, votes) => {
    const made = element("div", kind);
    made.style.width = `${100 * votes / most}%`;
    return made;
  };
  return labels.flatMap((label, i) => {
    const track = element("div", i === right ? "right" : "", bar("bar", latest[i]));
    if (stage > 2 && first[i]) track.append(bar("before", first[i]));
    return [element("span", i === right ? "right" : "", label), element("b", "", latest[i]), track];
  });
}

function grid({ rows, columns, latest, truth, guessed }) {
  const cell = (row, column) => {
    const at = row * columns.length + column, count = latest[at];
    const made = element("td", "", element("b", "", truth ? truth[at] || "–" : ""), count ? ` ${count} ✗` : "");
    made.style.setProperty("--share", count / guessed);
    return made;
  };
  const heads = element("tr", "", element("td"), ...columns.map(column => element("th", "", column)));
  const lines = rows.map((name, row) => element("tr", "", element("th", "", name), ...columns.map((_, column) => cell(row, column))));
  return [element("table", "", heads, ...lines)];
}

function words({ seats, stage, guessed, again, form, truth, said, held }) {
  const crosses = form === "grid" ? `✗ counts ${truth ? "wrong guesses" : "guesses unlike the commonest"}. ` : "";
  if (stage === 0) return [`${guessed} of ${seats}`, "have guessed"];
  if (stage === 1) return [`${guessed} of ${seats} have guessed`, crosses];
  if (stage === 2) return ["Convince your neighbour", `Then change your guess and run its cell: ${again} of ${guessed} have.`];
  if (stage === 3) return [`${again} of ${guessed} voted again`, crosses || "Dashed: the first vote."];
  if (truth === null) return ["Nobody has measured it yet", ""];
  return [said, `${crosses}${held[0]} of ${guessed} were right at first, ${held[1]} in the end.`];
}

async function show() {
  room = await ask(`wall?id=${wanted}`);
  const { ids, id, seats, ready, stage } = room;
  document.body.dataset.stage = id ? stage : "";
  const [count, note] = id ? words(room) : [`${ready} of ${seats} seats are ready`, ""];
  const keys = `→ ${NEXT[stage] || ""} · ← back · t truth · ↑ ↓ question ${ids.indexOf(id) + 1} of ${ids.length}`;
  const texts = { lesson: room.lesson || "", name: room.name || "No guess yet", count, said: note, keys };
  Object.entries(texts).forEach(([place, text]) => say(place, text));
  const picture = JSON.stringify([id, room.first, room.latest, room.truth]);
  if (picture === drawn) return;
  drawn = picture;
  by("picture").className = room.form || "";
  by("picture").replaceChildren(...(room.latest ? (room.form === "grid" ? grid : bars)(room) : []));
}

document.onkeydown = async event => {
  const turn = TURNS[event.key], at = room.ids.indexOf(room.id);
  if (turn === undefined || !room.id) return;
  event.preventDefault();
  if (turn) await ask("wall", { id: room.id, stage: Math.max(0, Math.min(4, room.stage + turn)) });
  else wanted = room.ids[at + (event.key === "ArrowDown" ? 1 : -1)] || room.id;
  await show();
};
repeat(show, 1000);
