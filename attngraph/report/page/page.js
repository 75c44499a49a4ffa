"use strict";
// Unfolds what is folded, searches passes, moves through charts. All text goes through textContent.

const passes = [...document.querySelectorAll(".passes > li")];
const said = document.getElementById("said");
document.getElementById("without-script").remove();

function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// The texts of graphs and the blocks of folds, unpacked once.
let unpacked = null;
function store() {
  unpacked ??= (async () => {
    const packed = atob(document.getElementById("store").textContent);
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const found = JSON.parse(await new Response(stream).text());
    return { ...found, texts: found.texts.map((text) => text.split("\n").map(visible)) };
  })();
  return unpacked;
}

// Characters that steer the display, written out; as html.py does it.
const unseen = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]/gu;
function visible(text) {
  return text.replace(unseen, (letter) => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"));
}

// Lines below each other; a note that the line above has too is not repeated.
function lines(texts, start, stop) {
  const pre = make("pre");
  let last = "";
  for (const text of texts.slice(start, stop)) {
    const at = text.indexOf("  # ");
    const code = at < 0 ? text : text.slice(0, at).trimEnd(), note = at < 0 ? "" : text.slice(at);
    const line = make("span");
    line.append(code.startsWith("  [") ? make("b", "", code) : code);
    if (note && note !== last) line.append(make("small", "", note));
    if (/^  %\d+ = /.test(code)) last = note;
    pre.append(line);
  }
  return pre;
}

function side(texts, start, stop, word) {
  const pre = lines(texts, start, stop);
  if (start === stop) pre.className = "none";
  else pre.prepend(make("i", "vh", word));
  return pre;
}

function block(kind, before, after, [a, b, c, d]) {
  const row = make("div", kind);
  if (kind === "equal") {
    const left = lines(before, a, b);
    left.setAttribute("aria-hidden", "true");
    row.append(left, lines(after, c, d));
  } else {
    const words = kind === "changed" ? ["was: ", "is: "] : ["removed: ", "added: "];
    row.append(side(before, a, b, words[0]), side(after, c, d, words[1]));
  }
  return row;
}

function each([a, b, c]) {
  return Array.from({ length: b - a }, (_, n) => [a + n, a + n + 1, c + n, c + n + 1]);
}

async function unfold(button) {
  const open = button.getAttribute("aria-expanded") !== "true";
  button.setAttribute("aria-expanded", String(open));
  const known = button.nextElementSibling;
  if (known) {
    known.hidden = !open;
    return;
  }
  const made = make("div", "unfolded");
  button.after(made);
  await unpackInto(made, ({ texts, folds }) => {
    const [before, after, blocks] = folds[Number(button.dataset.fold)];
    for (const [code, ...ends] of blocks) {
      const kind = ["equal", "changed", "replaced"][code];
      for (const one of kind === "changed" ? each(ends) : [ends]) made.append(block(kind, texts[before], texts[after], one));
    }
  });
}

async function unpackInto(place, fill) {
  try {
    fill(await store());
  } catch (problem) {
    place.textContent = "This browser cannot unpack the text (" + problem + "). The dump's files hold it.";
  }
}

async function showText(place) {
  if (place.dataset.done) return;
  place.dataset.done = "yes";
  await unpackInto(place, ({ texts }) => {
    const pre = make("pre", "", texts[Number(place.dataset.text)].join("\n"));
    pre.tabIndex = 0;
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", "text of the graph");
    const button = make("button", "copy", "Copy");
    button.type = "button";
    place.replaceChildren(button, pre);
  });
}

async function copy(button) {
  const whole = button.parentElement.querySelector(".code, pre");
  const pres = whole.matches("pre") ? [whole] : [...whole.querySelectorAll("pre")];
  let words = "Copied";
  try {
    await navigator.clipboard.writeText(pres.map((pre) => pre.textContent).join(""));
  } catch {
    getSelection().selectAllChildren(whole);
    words = "Selected: copy it with your keyboard";
  }
  button.textContent = words;
  said.textContent = words;
  setTimeout(() => { button.textContent = "Copy"; said.textContent = ""; }, 3000);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.classList.contains("fold")) unfold(button);
  if (button.classList.contains("copy")) copy(button);
});
document.addEventListener("toggle", (event) => {
  if (event.target.open) {
    for (const place of event.target.querySelectorAll(":scope > .text")) showText(place);
  }
}, true);

// Passes: search, unchanged ones, all at once.
const search = document.getElementById("search");
const unchanged = document.getElementById("unchanged");
const found = document.getElementById("found");
const openAll = document.getElementById("open-all");
const contents = new Map(passes.map((item) => [item, item.textContent.toLowerCase()]));
const boxes = [...document.querySelectorAll(".chart g[tabindex]")];

// What is folded, and the whole text that a pass left or found, once it is unpacked: searched like the rest.
let whole = null;
async function readWhole() {
  const { texts, folds } = await store();
  const lines = new Map();
  let before = null;
  for (const item of passes) {
    const place = item.querySelector(".text");
    if (!place) continue;
    const after = Number(place.dataset.text);
    const both = [...(before === null ? [] : texts[before]), ...texts[after]];
    contents.set(item, contents.get(item) + "\n" + both.join("\n").toLowerCase());
    before = after;
  }
  for (const button of document.querySelectorAll("button.fold")) {
    const [a, b, blocks] = folds[Number(button.dataset.fold)];
    const inside = blocks.flatMap(([, i, j, k, l]) => [...texts[a].slice(i, j), ...texts[b].slice(k, l)]);
    lines.set(button, [...new Set(inside.map((line) => line.toLowerCase()))]);
  }
  return lines;
}

// Marks the folds and the boxes of charts that hold the words; returns how many boxes do.
function markFound(words) {
  const has = (text) => words.length > 0 && words.every((word) => text.includes(word));
  for (const [button, inside] of whole ?? []) {
    const hits = inside.filter(has).length;
    if (hits) button.dataset.hits = hits + " found here";
    else delete button.dataset.hits;
  }
  let hits = 0;
  for (const box of boxes) {
    const hit = has(box.querySelector("title").textContent.toLowerCase());
    box.classList.toggle("hit", hit);
    hits += hit;
  }
  return hits;
}

function count(number, word) {
  return number + " " + word + (number === 1 ? "" : /[sx]$/.test(word) ? "es" : "s");
}

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0, total = 0, waiting = 0;
  for (const item of passes) {
    const matches = words.every((word) => contents.get(item).includes(word));
    const kept = unchanged.checked || item.dataset.kind !== "unchanged";
    item.hidden = !(matches && kept);
    if (item.dataset.kind === "capture") continue;
    total += 1;
    shown += matches && kept;
    waiting += matches && !kept;
  }
  const drawn = markFound(words);
  const hidden = waiting ? ", " + waiting + " unchanged hidden" : "";
  found.textContent = words.length
    ? shown + " of " + count(total, "pass") + " found" + hidden + (drawn ? ", " + count(drawn, "box") + " of charts" : "")
    : count(shown, "pass") + " shown" + hidden;
}

if (search) {
  document.querySelector(".controls").hidden = false;
  search.addEventListener("input", async () => {
    filter();
    try {
      whole ??= await readWhole();
    } catch {
      return; // what is shown is searched
    }
    filter();
  });
  unchanged.addEventListener("change", filter);
  openAll.addEventListener("click", () => {
    const open = openAll.getAttribute("aria-expanded") !== "true";
    openAll.setAttribute("aria-expanded", String(open));
    openAll.textContent = open ? "Close all" : "Open all";
    for (const item of passes) if (!item.hidden && item.dataset.kind !== "capture") item.firstElementChild.open = open;
  });
  filter();
}

// Charts: one stop of the tab key each, arrow keys within, the words of a box beside the picture.
function middle(box) {
  const { x, y, width, height } = box.querySelector("rect").getBBox();
  return [x + width / 2, y + height / 2];
}

function tell(box) {
  const chart = box.closest(".chart");
  for (const other of chart.querySelectorAll(".shown")) other.classList.remove("shown");
  box.classList.add("shown");
  const beside = chart.closest(".drawn").querySelector(".beside");
  beside.querySelector(".about").textContent = box.querySelector("title").textContent;
  const led = beside.querySelector(".led");
  led.hidden = !box.dataset.panel;
  led.firstElementChild.href = "#" + (box.dataset.panel ?? "attention");
  tellCode(box, beside.querySelector(".yours"));
}

// The user's code beside a chart: the lines that lead to a box's op, and the function with one of them. A line
// that ops of the chart come from is a button that leads to the next of their boxes.
function lineOf(frame) {
  const at = frame.lastIndexOf(":");
  return [frame.slice(0, at), Number(frame.slice(at + 1))];
}

function stretchWith(code, [file, number]) {
  return code.stretches.find(([name, first, text]) =>
    name === file && number >= first && number < first + text.split("\n").length);
}

async function tellCode(box, place) {
  if (!place) return;
  let code;
  try {
    code = (await store()).code[Number(place.dataset.code)];
  } catch {
    return;
  }
  if (!box.classList.contains("shown")) return;
  const [at] = (box.dataset.at ?? "").split(" ").filter(Boolean).map(Number);
  if (at === undefined) return place.replaceChildren();
  const [frames, own] = code.reached[at];
  const calls = make("ol", "calls");
  const listing = make("div");
  frames.forEach((frame, n) => {
    const item = make("li");
    const button = make("button", "frame", visible(frame.split("/").at(-1)));
    button.type = "button";
    button.title = visible(frame);
    button.setAttribute("aria-pressed", String(n === own));
    button.addEventListener("click", () => {
      for (const other of calls.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      list(box, code, frame, frames, listing);
    });
    const stretch = stretchWith(code, lineOf(frame));
    const text = stretch ? stretch[2].split("\n")[lineOf(frame)[1] - stretch[1]].trim() : "";
    item.append(button, " ", make("code", "", visible(text)));
    calls.append(item);
  });
  place.replaceChildren(...(frames.length > 1 ? [calls] : []), listing);
  list(box, code, frames[own], frames, listing);
}

// The boxes of a chart by the user's lines that lead to them.
const comeFrom = new WeakMap();
function boxesByLine(chart, code) {
  if (!comeFrom.has(chart)) {
    const found = new Map();
    for (const box of chart.querySelectorAll("g[data-at]")) {
      const frames = new Set(box.dataset.at.split(" ").flatMap((at) => code.reached[Number(at)][0]));
      for (const frame of frames) found.set(frame, [...(found.get(frame) ?? []), box]);
    }
    comeFrom.set(chart, found);
  }
  return comeFrom.get(chart);
}

function list(box, code, frame, frames, place) {
  const stretch = stretchWith(code, lineOf(frame));
  place.replaceChildren();
  if (!stretch) return;
  const [file, first, text] = stretch;
  const chart = box.closest(".chart"), byLine = boxesByLine(chart, code);
  const pre = make("pre", "lines");
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", visible(file) + ", arrow keys move between lines that ops come from");
  text.split("\n").forEach((code, n) => {
    const name = file + ":" + (first + n), from = byLine.get(name);
    const line = make(from ? "button" : "span", "line");
    line.append(make("small", "", String(first + n).padStart(5) + "  "), visible(code));
    if (frames.includes(name)) line.setAttribute("aria-current", "true");
    if (from) {
      line.type = "button";
      line.tabIndex = -1;
      line.addEventListener("click", () => from[(from.indexOf(chart.querySelector(".shown")) + 1) % from.length].focus());
      for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]]) {
        line.addEventListener(event, () => from.forEach((other) => other.classList.toggle("led-to", on)));
      }
    }
    pre.append(line);
  });
  const buttons = [...pre.querySelectorAll("button")];
  const now = pre.querySelector("[aria-current]");
  const stop = buttons.includes(now) ? now : buttons[0];
  if (stop) stop.tabIndex = 0;
  else pre.tabIndex = 0;
  pre.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const to = step && buttons[buttons.indexOf(event.target) + step];
    if (!step) return;
    event.preventDefault();
    if (!to) return;
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
  place.append(pre);
  if (now) pre.scrollTop = now.offsetTop - pre.offsetTop - pre.clientHeight / 3;
}

// A link to a box of a chart opens what it is folded in, and shows the box.
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  const aim = link && document.getElementById(link.getAttribute("href").slice(1));
  if (!aim) return;
  for (let it = aim; it; it = it.parentElement) if (it.tagName === "DETAILS") it.open = true;
  if (!aim.matches(".chart g")) return;
  event.preventDefault();
  aim.scrollIntoView({ block: "center" });
  aim.focus();
});

function nearest(boxes, from, key) {
  const [x, y] = middle(from);
  const vertical = key === "ArrowDown" || key === "ArrowUp";
  const sign = key === "ArrowDown" || key === "ArrowRight" ? 1 : -1;
  let best = null, least = Infinity;
  for (const box of boxes) {
    const [bx, by] = middle(box);
    const along = sign * (vertical ? by - y : bx - x), aside = Math.abs(vertical ? bx - x : by - y);
    const cost = along + 3 * aside;
    if (along > 1 && cost < least && (vertical || aside < 30)) [best, least] = [box, cost];
  }
  return best;
}

for (const chart of document.querySelectorAll(".chart")) {
  const boxes = [...chart.querySelectorAll("g[tabindex]")];
  for (const box of boxes) {
    box.addEventListener("focus", () => {
      for (const other of boxes) other.tabIndex = other === box ? 0 : -1;
      tell(box);
    });
    box.addEventListener("mouseenter", () => tell(box));
    box.addEventListener("click", () => box.focus());
  }
  const first = boxes.find((box) => box.tabIndex === 0);
  if (first) tell(first);
  chart.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const ends = { Home: boxes[0], End: boxes.at(-1) };
    const to = ends[event.key] ?? (event.key.startsWith("Arrow") ? nearest(boxes, event.target, event.key) : null);
    if (!to && !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    to?.focus();
  });
}

// On paper everything is open but the sources of kernels.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open]):not(.source):not(.shared):not(.whole)")];
  closed = closed.filter((item) => item.parentElement.dataset.kind !== "capture");
  for (const item of closed) item.open = true;
});
addEventListener("afterprint", () => {
  for (const item of closed) item.open = false;
});
