// The static page: ONNX models continue text, chat and score text in the visitor's browser. Nothing is sent anywhere.
// The same file is the page's service worker, which keeps the page for use without a network.

const KEPT = "page"; // name of the cache
const NEWEST = { cache: "no-cache" }; // the server is asked whether the browser's copy is the newest
const readModels = async () => (await fetch("models.json", NEWEST)).json();

async function keepPage() {
  const { runtime, models } = await readModels(), tokenizers = models.map((model) => model.tokenizerFile);
  const parts = ["ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"].map((name) => runtime + name);
  return (await caches.open(KEPT)).addAll(["./", "models.json", "page.js", "page.css", ...parts, ...tokenizers]);
}

async function answer(request) {
  const cache = await caches.open(KEPT);
  const response = await fetch(request).catch(async () => (await cache.match(request)) ?? Response.error());
  if (response.ok && !request.url.endsWith(".onnx")) cache.put(request, response.clone()).catch(() => {}); // no room
  return response;
}

class Problem extends Error {} // with a sentence for the visitor
const refuse = (sentence) => { throw new Problem(sentence); };
const REASONS = [
  [/SIMD/, "This browser lacks WebAssembly with SIMD, which the models need; update it, or use another."],
  [/alloc|memory/i, "The model needs more memory than this browser offers; close other tabs, or choose another model."],
  [/fetch|network|load failed|import/i, "A part of the page cannot be loaded; check the connection, and reload the page."],
];

// Splits text like GPT-2. White_Space, because \s includes U+FEFF and lacks U+0085, unlike the Rust library `tokenizers`.
const WORDS =
  /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
let next = 256; // GPT-2's letters of the other bytes
const LETTERS = Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : next++));
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));
const utf8 = new TextEncoder();

// Byte-level BPE with GPT-2's words, or characters, from a tokenizer.json.
class Tokenizer {
  constructor({ model, added_tokens: added }) {
    this.isCharacter = model.type === "WordLevel";
    this.ids = new Map(Object.entries(model.vocab));
    this.ranks = new Map((model.merges ?? []).map((pair, rank) => [[pair].flat().join(" "), rank]));
    const bytes = (text) => (this.isCharacter ? utf8.encode(text) : Uint8Array.from(text, (it) => BYTES.get(it)));
    this.bytes = new Map([...this.ids].map(([text, id]) => [id, bytes(text)]));
    this.added = new Map(added.map(({ content, id }) => [content, id]));
    this.special = new Map(added.filter((it) => it.special).map(({ content, id }) => [id, content]));
    for (const { content, id } of added) this.bytes.set(id, this.special.has(id) ? new Uint8Array() : utf8.encode(content));
    const escaped = [...this.added.keys()].sort((a, b) => b.length - a.length).map((it) => it.replace(/\W/g, "\\$&"));
    this.control = new RegExp(`(${escaped.join("|") || "(?!)"})`, "s");
  }

  // Return the ids of the parts of a text. Only in every second part, from the first on, added tokens count as such.
  encode(...parts) {
    const pieces = [""]; // text, added token, text ...
    parts.map((it) => it.toWellFormed()).forEach((part, i) => {
      const [first, ...rest] = i % 2 ? [part] : part.split(this.control);
      pieces.push(pieces.pop() + first, ...rest);
    });
    return pieces.flatMap((piece, i) => (i % 2 ? [this.added.get(piece)] : this.plain(piece)));
  }

  plain(text) {
    if (!this.isCharacter) return (text.match(WORDS) ?? []).flatMap((word) => this.word(word));
    const unknown = new Set([...text].filter((character) => !this.ids.has(character)));
    if (!unknown.size) return [...text].map((character) => this.ids.get(character));
    const list = [...unknown].slice(0, 10).map((it) => JSON.stringify(it)).join(", ");
    refuse(`The text contains ${list}, which is not among this model's ${this.ids.size} characters; remove it.`);
  }

  word(word) {
    for (let parts = Array.from(utf8.encode(word), (byte) => LETTERS[byte]); ; ) {
      let best = Infinity;
      for (let i = 1; i < parts.length; i++) best = Math.min(best, this.ranks.get(`${parts[i - 1]} ${parts[i]}`) ?? best);
      if (best === Infinity) return parts.map((part) => this.ids.get(part));
      const merged = [];
      for (const part of parts) {
        if (merged.length && this.ranks.get(`${merged.at(-1)} ${part}`) === best) merged.push(merged.pop() + part);
        else merged.push(part);
      }
      parts = merged;
    }
  }

  // Return the text of ids without special tokens, and without an unfinished character at the end.
  decode(ids) {
    const bytes = ids.flatMap((id) => [...(this.bytes.get(id) ?? [])]);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes)).replace(/\ufffd+$/, "");
  }
}

let runtime, runtimeFolder; // onnxruntime-web and its backend, shared by all models
async function loadRuntime(isGpuWanted) {
  const isGpu = isGpuWanted && Boolean(await navigator.gpu?.requestAdapter().catch(() => null));
  const ort = await import(new URL(`ort.${isGpu ? "webgpu" : "wasm"}.bundle.min.mjs`, runtimeFolder));
  ort.env.wasm.numThreads = 1; // more need headers that a static page cannot set
  find("#backend").textContent = isGpu ? "WebGPU" : "WebAssembly";
  return { ort, backend: isGpu ? "webgpu" : "wasm" };
}

async function createSession(file) {
  const { ort, backend } = await runtime;
  try {
    return { session: await ort.InferenceSession.create(file, { executionProviders: [backend] }), Tensor: ort.Tensor };
  } catch (error) {
    if (backend === "wasm") throw error;
    runtime = loadRuntime(false); // the GPU cannot run the model
    return createSession(file);
  }
}

const fetchForJob = (file) => fetch(file, { ...NEWEST, signal: job.stop.signal });

// Return the bytes of a model file, kept by the browser, after a comparison with its size and SHA-256.
async function download({ name, file, bytes, sha256 }, report) {
  const cache = await globalThis.caches?.open(KEPT).catch(() => undefined); // there is none without HTTPS
  const key = `${file}?${sha256}`, kept = await cache?.match(key), response = kept ?? (await fetchForJob(file));
  if (!response.ok) refuse(`${name} cannot be loaded: the server answered ${response.status} for ${file}.`);
  let end = 0;
  const counter = new TransformStream({ transform: (part, out) => (out.enqueue(part), report((end += part.length) / bytes)) });
  const content = await new Response(response.body.pipeThrough(counter)).arrayBuffer().catch(() => new ArrayBuffer());
  if (job.isStopped) refuse("Stopped.");
  const digest = await crypto.subtle?.digest("SHA-256", content);
  const hex = digest ? Array.from(new Uint8Array(digest), (it) => it.toString(16).padStart(2, "0")).join("") : sha256;
  if (content.byteLength !== bytes || hex !== sha256) {
    await cache?.delete(key);
    refuse(`${name} is incomplete or was changed: ${count(end, "byte")} of ${bytes.toLocaleString("en")} arrived; reload the page.`);
  }
  if (kept) return content;
  const older = (await cache?.keys())?.filter(({ url }) => url.startsWith(`${new URL(file, location)}?`)) ?? [];
  for (const request of older) await cache.delete(request);
  await cache?.put(key, new Response(content)).catch(() => {}); // no room
  return content;
}

// A model of models.json, loaded when it is used, and again after an error.
class Model {
  load(report) {
    return (this.loading ??= this.#load(report).finally(() => this.session || (this.loading = undefined)));
  }

  async #load(report) {
    const response = await fetchForJob(this.tokenizerFile);
    if (!response.ok) refuse(`${this.name} has no tokenizer: the server answered ${response.status}.`);
    this.tokenizer = new Tokenizer(await response.json());
    Object.assign(this, await createSession(await download(this, report)));
  }

  // Return the logits (T * V) of ids after the tokens in `past`, V, and the keys and values of all.
  async run(ids, past) {
    const tokens = (values) => new this.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
    const feeds = { ...past }, [, , ...caches] = this.session.inputMetadata;
    for (const { name, shape } of past ? [] : caches) feeds[name] = new this.Tensor("float32", [], shape.with(0, 1).with(2, 0));
    const length = feeds[caches[0].name].dims[2] + ids.length;
    Object.assign(feeds, { input_ids: tokens(ids), attention_mask: tokens(Array(length).fill(1)) });
    const { logits, ...present } = await this.session.run(feeds);
    const renamed = Object.entries(present).map(([name, value]) => [name.replace("present", "past_key_values"), value]);
    return { logits: logits.data, vocabulary: logits.dims[2], past: Object.fromEntries(renamed) };
  }

  // Yield new tokens until the model ends its text, as generate.py: a full context is replaced by its second half.
  async *generate(ids, settings) {
    const random = generator(settings.seed);
    let window = ids.slice(1 - this.context), result;
    for (let number = 0; number < settings.length; number++) {
      if (window.length === this.context) [window, result] = [window.slice(-Math.max(1, this.context >> 1)), undefined];
      result = await this.run(result ? window.slice(-1) : window, result?.past);
      const token = choose(result.logits.subarray(-result.vocabulary), settings, random);
      if (this.ends.includes(token)) return;
      yield token;
      window.push(token);
    }
  }

  prompt(text) {
    if (text) return this.tokenizer.encode(text);
    if (this.bos !== null) return [this.bos];
    refuse("The prompt is empty, and this model has no beginning-of-text token; write a prompt.");
  }

  // Return the ids of a chat with an open turn of the assistant, without the oldest messages if they do not fit.
  chatIds(texts, system, room) {
    const { start, before, after, open, trims, system: around } = this.chat, isGiven = Boolean(system.trim());
    if (trims) [texts, system] = [texts.map((text) => text.trim()), system.trim()];
    if (isGiven && !around) refuse(`The chat template of ${this.name} has no system message; leave it empty.`);
    for (let leftOut = 0; ; leftOut += 2) {
      const parts = isGiven ? [around[0], system, around[1]] : [start];
      texts.slice(leftOut).forEach((text, i) => parts.push(text, i % 2 ? after : before));
      const ids = this.tokenizer.encode(...parts.with(-1, open));
      if (ids.length <= room) return { ids, leftOut };
      const isLast = leftOut + 2 >= texts.length;
      if (isLast) refuse(`The chat has ${ids.length} tokens, but at most ${room} fit; write a shorter text.`);
    }
  }
}

// Return a generator of numbers from 0 to 1 (mulberry32).
const generator = (seed) => () => {
  seed = (seed + 0x6d2b79f5) | 0;
  let t = Math.imul(seed ^ (seed >>> 15), seed | 1);
  t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
  return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
};

function choose(logits, { temperature, top_k }, random) {
  const best = logits.indexOf(highest(logits));
  if (temperature < 1e-6) return best;
  const least = top_k ? logits.slice().sort().at(-Math.min(top_k, logits.length)) : -Infinity;
  const weights = Array.from(logits, (it) => (it < least ? 0 : Math.exp((it - logits[best]) / temperature)));
  let rest = random() * weights.reduce((a, b) => a + b);
  const choice = weights.findIndex((weight) => (rest -= weight) < 0);
  return choice < 0 ? best : choice;
}

// Return the pieces of a text with the loss in nats of each, none for the first. A character of several tokens is one.
async function score(model, text) {
  const all = model.tokenizer.encode(text), ids = all.slice(0, model.context);
  if (ids.length < 2) refuse("The first token has no loss; enter a text of at least two tokens.");
  const { logits, vocabulary } = await model.run(ids), decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const losses = ids.slice(1).map((id, i) => {
    const row = logits.subarray(i * vocabulary, (i + 1) * vocabulary), top = highest(row);
    return Math.log(row.reduce((sum, it) => sum + Math.exp(it - top), 0)) + top - row[id];
  });
  const pieces = [{ text: "", value: null }];
  ids.forEach((id, i) => {
    if (pieces.at(-1).text) pieces.push({ text: "", value: 0 });
    const special = model.tokenizer.special.get(id);
    pieces.at(-1).text += special ?? decoder.decode(model.tokenizer.bytes.get(id), { stream: true });
    if (i) pieces.at(-1).value += losses[i - 1];
  });
  const bytesOf = (id) => (model.tokenizer.bytes.get(id).length || utf8.encode(model.tokenizer.special.get(id)).length);
  const bytes = ids.slice(1).reduce((sum, id) => sum + bytesOf(id), 0);
  return { pieces, losses, tokens: all.length, bytes };
}

const highest = (logits) => logits.reduce((a, b) => Math.max(a, b));
const find = (selector, parent = document) => parent.querySelector(selector);
const element = (name, properties) => Object.assign(document.createElement(name), properties);
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const TASKS = { // names of the text and of the button, maximum number of models, and what happens
  continue: { names: ["Prompt", "Continue"], models: 4, run: continueText },
  chat: { names: ["Message", "Send"], models: 1, run: chat },
  watch: { names: ["Text", "Score"], models: 2, run: watch },
};
const task = () => TASKS[find("[name=task]:checked").value];
let job, texts; // the last start, and the chat: texts of the visitor and of the model, in turns

async function start() {
  navigator.serviceWorker?.register("page.js").catch(() => {}); // there is none without HTTPS
  const { title, runtime: folder, models, examples } = await readModels();
  globalThis.demo = { Tokenizer, models: models.map((entry) => Object.assign(new Model(), entry)) };
  runtimeFolder = new URL(folder, location);
  document.title = find("h1").textContent = title;
  find("#models").append(...models.map(({ name }, i) => {
    const label = element("label");
    label.append(element("input", { type: "checkbox", checked: i < 2 }), name);
    return label;
  }));
  find("#models").hidden = models.length < 2;
  find("[value=chat]").parentElement.hidden = !models.some((model) => model.chat);
  find("#prompt").value = examples[0];
  find("#examples").append(...examples.map((text) => element("button", {
    type: "button", textContent: text.trim(), onclick: () => (find("#prompt").value = text),
  })));
  find("#stop").onclick = () => job.stop.abort();
  find("#tasks").onchange = find("#models").onchange = showTask;
  find("#desk").onsubmit = (event) => (event.preventDefault(), find("#start").hidden || run());
  showTask();
  (runtime = loadRuntime(true).catch(() => loadRuntime(false))).catch(report); // offline, only the latter is kept
}

function showTask() {
  [find("[for=prompt]").textContent, find("#start").textContent] = task().names;
  find("#system").parentElement.hidden = task().run !== chat;
  texts = [];
}

// Show an error, and return its text.
function report(error) {
  const reason = REASONS.find(([pattern]) => pattern.test(error))?.[1] ?? String(error);
  return (find("#status").textContent = error instanceof Problem ? error.message : reason);
}

async function run() {
  const number = (name) => Math.max(0, Number(find(`#${name}`).value) || 0), seed = find("#seed").value;
  const settings = { temperature: number("temperature"), top_k: number("top_k"), length: number("length") || 1 };
  settings.seed = seed === "" ? Math.floor(Math.random() * 1e4) : Number(seed);
  const boxes = [...document.querySelectorAll("#models input")];
  const checked = demo.models.filter((_, i) => boxes.length < 2 || boxes[i].checked);
  if (task().run === chat) checked.sort((a, b) => Boolean(b.chat) - Boolean(a.chat));
  const chosen = checked.slice(0, task().models);
  job = { stop: new AbortController(), get isStopped() { return this.stop.signal.aborted; } };
  const isByKeyboard = find("#start").matches(":focus-visible");
  [find("#start").hidden, find("#stop").hidden] = [true, false];
  if (isByKeyboard) find("#stop").focus({ preventScroll: true });
  find("#status").textContent = chosen.length ? "Running." : "Choose a model.";
  find("#results").replaceChildren();
  if (chosen.length) await task().run(chosen.map(card), find("#prompt").value, settings).catch(report);
  const waits = [find("#stop"), document.body].includes(document.activeElement);
  [find("#start").hidden, find("#stop").hidden] = [false, true];
  if (isByKeyboard && waits) find(task().run === chat ? "#prompt" : "#start").focus({ preventScroll: true });
  if (find("#status").textContent === "Running.") find("#status").textContent = job.isStopped ? "Stopped." : "Done.";
}

// Show a card for a model. Return its parts, and functions that show an error, and that load the model for an action.
function card(model) {
  const article = find("#card").content.cloneNode(true).firstElementChild, bar = find("progress", article);
  const [text, note, problem] = [".text", ".note", ".problem"].map((part) => find(part, article));
  find("h2", article).textContent = model.name;
  find(".facts", article).textContent = model.facts.join(" · ");
  find("#results").append(article);
  const fail = (error) => (problem.textContent = report(job.isStopped ? new Problem("Stopped.") : error));
  const load = () => model.load((share) => ([bar.hidden, bar.value] = [false, share])).finally(() => (bar.hidden = true));
  const attempt = async (action) => job.isStopped || load().then(() => action(model)).catch(fail);
  return { model, text, note, fail, attempt };
}

// Show a text that the model writes after ids. Each call of the result writes a token, and returns whether more follow.
function write({ model, text, note, fail }, ids, settings, remark) {
  const span = element("span"), tokens = [], writer = model.generate(ids, settings);
  const seed = settings.temperature < 1e-6 ? "" : ` · seed ${settings.seed}`;
  let begin;
  text.append(span);
  const step = async () => {
    const { done, value } = await writer.next();
    if (!done) tokens.push(value);
    begin ??= performance.now();
    const speed = (1000 * (tokens.length - 1)) / (performance.now() - begin);
    const end = done && tokens.length < settings.length ? " · the model ended its text" : "";
    note.textContent = count(tokens.length, "token") + (speed > 0 ? ` · ${speed.toFixed()} tokens/s` : "") + seed + remark + end;
    span.textContent = model.tokenizer.decode(tokens);
    return !done;
  };
  return () => step().catch((error) => (fail(error), false));
}

// Let texts grow in turns, by one token each, until all are complete or stopped.
async function takeTurns(writers) {
  for (let painted = 0; writers.length && !job.isStopped; ) {
    const active = [];
    for (const writer of writers) if (await writer()) active.push(writer);
    writers = active;
    if (performance.now() - painted < 30) continue;
    await new Promise((resolve) => setTimeout(resolve)); // for the page and the stop button
    painted = performance.now();
  }
}

async function continueText(cards, text, settings) {
  const writers = [];
  for (const it of cards) {
    await it.attempt((model) => {
      const ids = model.prompt(text), limit = model.context - 1;
      it.text.append(element("mark", { textContent: text }));
      const remark = ids.length > limit ? ` · the model read the last ${limit} of ${ids.length} tokens` : "";
      writers.push(write(it, ids, settings, remark));
    });
  }
  await takeTurns(writers);
}

async function chat([it], text, settings) {
  const earlier = texts;
  const show = (turn, i) => it.text.append(element("span", { className: i % 2 ? "" : "user", textContent: turn }));
  texts.forEach(show);
  if (!text.trim()) refuse("The message is empty; write one.");
  await it.attempt(async (model) => {
    if (!model.chat) refuse(`${model.name} has no chat template: it continues text.`);
    const turns = [...texts, text], length = Math.max(1, Math.min(settings.length, model.context >> 1));
    const { ids, leftOut } = model.chatIds(turns, find("#system").value, model.context - length);
    show(text, 0);
    find("#prompt").value = "";
    const remark = leftOut ? ` · the model did not read the oldest ${count(leftOut, "message")}` : "";
    await takeTurns([write(it, ids, { ...settings, length }, remark)]);
    if (texts === earlier) texts = [...turns, it.text.lastChild.textContent]; // else another task or model was chosen
  });
}

async function watch(cards, text) {
  const scores = [];
  for (const it of cards) {
    await it.attempt(async (model) => {
      const { pieces, losses, tokens, bytes } = await score(model, text);
      scores.push(pieces);
      color(it.text, pieces, [1, 2, 4, 8]);
      const total = losses.reduce((a, b) => a + b), mean = (total / losses.length).toFixed(2);
      const bits = bytes ? ` · ${(total / Math.LN2 / bytes).toFixed(2)} bits per byte` : "";
      it.note.textContent = `mean loss ${mean} nats per token${bits} · ${count(losses.length + 1, "token")} of ${tokens} · underlined from 1, 2, 4 and 8`;
    });
  }
  const [first, second] = scores;
  const shared = second ? first.slice(0, second.length) : []; // of the shorter context
  if (!second || shared.some((piece, i) => piece.text !== second[i].text)) return; // other tokenizers have other pieces
  const changes = shared.map((piece, i) => ({ text: piece.text, value: piece.value === null ? null : second[i].value - piece.value }));
  const facts = [`${cards[1].model.name} minus ${cards[0].model.name}`, "wavy: the second model predicts better"];
  color(card({ name: "What changed", facts }).text, changes, [0.1, 0.5, 1, 2]);
}

// Show pieces with their values, in four levels of color and underline.
function color(area, pieces, limits) {
  area.append(...pieces.map(({ text, value }) => {
    const span = element("span", { textContent: text });
    if (value === null) return span;
    const level = limits.filter((limit) => Math.abs(value) >= limit).length;
    Object.assign(span, { tabIndex: 0, className: `piece ${level && (value < 0 ? "better" : "worse")}` });
    span.style.setProperty("--level", level);
    span.dataset.value = `“${text}” ${value.toFixed(2)} nats`;
    return span;
  }));
}

if (typeof document === "undefined") {
  addEventListener("install", (event) => event.waitUntil(keepPage().then(() => skipWaiting())));
  addEventListener("activate", (event) => event.waitUntil(clients.claim()));
  addEventListener("fetch", (event) => event.request.method === "GET" && event.respondWith(answer(event.request)));
} else {
  start().catch(report);
}
