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
  const isAtEnd = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 60;
  conversation.append(turn);
  if (isAtEnd || kind === "user") turn.scrollIntoView({ block: "end" });
  return turn;
}

function request() {
  const system = find("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
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

function pace(began, first, count, usage) {
  if (first === null) return;
  const now = performance.now();
  const parts = [`first token ${((first - began) / 1000).toFixed(2)} s`];
  if (count > 1 && now > first) parts.push(`${((count - 1) / ((now - first) / 1000)).toFixed(1)} tokens/s`);
  parts.push(`${count} tokens`);
  if (usage) {
    parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
    parts.push(`${usage.completion_tokens_details.accepted_prediction_tokens} accepted`);
  }
  find("pace").textContent = parts.join(" · ");
}

async function answer(turn) {
  const began = performance.now();
  let first = null;
  let count = 0;
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
    if (choice && choice.token_ids && choice.token_ids.length) {
      first ??= performance.now();
      count += choice.token_ids.length;
    }
    if (choice && choice.delta.content) {
      const isAtEnd = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 60;
      turn.textContent += choice.delta.content;
      if (isAtEnd) turn.scrollIntoView({ block: "end" });
    }
    pace(began, first, count, chunk.usage);
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
    // Without an answer the question is asked anew: two in a row would break most templates.
    if (turn.textContent) own.push({ role: "assistant", content: turn.textContent });
    else own.pop();
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
