// What both pages do: ask the server, with the token behind the # of the address, and draw what it says.
const by = id => document.getElementById(id);

async function ask(path, body) {
  const headers = { Authorization: `Bearer ${location.hash.slice(1)}` };
  const answer = await fetch(`api/${path}`, body ? { headers, method: "POST", body: JSON.stringify(body) } : { headers });
  if (!answer.ok) throw new Error(answer.status);
  return body ? null : answer.json();
}

async function repeat(show, every) {
  let fault = "";
  await show().catch(error => fault = `No answer from the room (${error.message}). Is the address whole, with its #?`);
  if (by("fault").textContent !== fault) by("fault").textContent = fault;
  setTimeout(repeat, every, show, every);
}

function element(name, kind = "", ...inside) {
  const made = document.createElement(name);
  made.className = kind;
  made.append(...inside);  // texts stay texts, never HTML: a seat may have sent them
  return made;
}

function say(id, text) {
  if (by(id).textContent !== text) by(id).textContent = text;
}
