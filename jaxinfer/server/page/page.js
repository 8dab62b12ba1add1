"use strict";

const find = (id) => document.getElementById(id);
const conversation = find("conversation");
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed"];

let messages = [];
let model = null;
let running = null; // the AbortController of the answer that is being written

function headers() {
  const key = find("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function findModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await reason(response));
  model = (await response.json()).data[0].id;
  find("model").textContent = model;
  document.title = model;
}

function show(kind, text) {
  const turn = document.createElement("p");
  turn.className = `turn ${kind}`;
  turn.textContent = text;
  const follows = isAtEnd() || kind === "user";
  conversation.append(turn);
  if (follows) turn.scrollIntoView({ block: "end" });
  return turn;
}

function isAtEnd() {
  return conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 60;
}

// Adds a piece of an answer; tokens of one origin that follow each other share an element.
function add(turn, choice) {
  const content = choice.delta.content;
  const texts = choice.token_texts ?? [];
  const isKnown = texts.join("") === content;
  const parts = isKnown ? texts.map((text, index) => [text, choice.from_draft[index]]) : [[content, false]];
  for (const [text, isDraft] of parts) {
    if (!text) continue;
    const kind = isDraft ? "draft" : "own";
    if (turn.lastChild?.className !== kind) {
      const span = document.createElement("span");
      span.className = kind;
      turn.append(span);
    }
    turn.lastChild.append(text);
  }
}

function request() {
  const system = find("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    return_drafts: true,
  };
  for (const name of SETTINGS.slice(1)) {
    const value = find(name).value.trim();
    if (value) body[name] = Number(value);
  }
  return body;
}

// Yields the objects of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function pace(began, first, count, drafted, usage) {
  if (first === null) return;
  const now = performance.now();
  const parts = [`first token ${((first - began) / 1000).toFixed(2)} s`];
  if (count > 1 && now > first) parts.push(`${((count - 1) / ((now - first) / 1000)).toFixed(1)} tokens/s`);
  parts.push(`${count} tokens`);
  if (usage) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  const line = find("pace");
  line.textContent = parts.join(" · ");
  if (!drafted) return;
  const share = document.createElement("span");
  share.className = "draft";
  share.textContent = `${Math.round((100 * drafted) / count)}% from drafts`;
  line.append(" · ", share);
}

async function answer(turn) {
  const began = performance.now();
  let first = null;
  let count = 0;
  let drafted = 0;
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(request()),
    signal: running.signal,
  });
  if (!response.ok) throw new Error(await reason(response));
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    if (choice?.from_draft?.length) {
      first ??= performance.now();
      count += choice.from_draft.length;
      drafted += choice.from_draft.filter(Boolean).length;
    }
    if (choice && choice.delta.content) {
      const follows = isAtEnd();
      add(turn, choice);
      if (follows) turn.scrollIntoView({ block: "end" });
    }
    pace(began, first, count, drafted, chunk.usage);
  }
}

function setRunning(controller) {
  running = controller;
  find("send").hidden = Boolean(controller);
  find("stop").hidden = !controller;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  const turn = show("assistant waiting", "");
  setRunning(new AbortController());
  const own = messages;
  try {
    if (model === null) await findModel();
    await answer(turn);
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    turn.classList.remove("waiting");
    if (turn.textContent) {
      own.push({ role: "assistant", content: turn.textContent });
    } else {
      // Without an answer the question is asked anew: two in a row would break most templates.
      own.pop();
      turn.remove();
      if (own === messages && !find("message").value) find("message").value = text;
    }
    setRunning(null);
    find("message").focus();
  }
}

function grow() {
  const box = find("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const box = find("message");
  const text = box.value.trim();
  if (running || !text || !find("ask").reportValidity()) return;
  box.value = "";
  grow();
  ask(text);
});
find("message").addEventListener("input", grow);
find("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
find("stop").addEventListener("click", () => running && running.abort());
find("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  conversation.replaceChildren();
  find("pace").textContent = "";
  find("message").focus();
});

findModel().catch((error) => show("error", error.message));
