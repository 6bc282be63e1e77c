const HEADS = ["seat", "hand", "failing tries", "minutes without progress", "last at"];

function row({ seat, hand, place, at, tries, minutes }) {
  const cells = [hand === null ? "" : `${place}, ${hand} min`, tries || "", minutes, at];
  const kind = hand !== null ? "hand" : tries >= 3 || minutes >= 10 ? "stuck" : "";
  return element("tr", kind, element("th", "", seat), ...cells.map((cell, i) => element("td", i === 1 || i === 2 ? "n" : "", cell)));
}

repeat(async () => {
  const { rows } = await ask("helpers");
  const hands = rows.filter(seat => seat.hand !== null).length;
  say("name", hands === 1 ? "1 hand is raised" : `${hands || "No"} hands are raised`);
  say("count", `${rows.length} seats`);
  const heads = element("thead", "", element("tr", "", ...HEADS.map(head => element("th", "", head))));
  by("picture").replaceChildren(element("table", "", heads, element("tbody", "", ...rows.map(row))));
}, 2000);
