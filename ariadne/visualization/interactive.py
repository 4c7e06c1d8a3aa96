"""A drawing as a page of its own: modules open and close, names are searched, a click shows an op; nothing from a network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from ariadne.cut import SplitCandidate
from ariadne.plan import TracePlan, uses
from ariadne.units import size
from ariadne.visualization import labels
from ariadne.visualization.chart import DARK, LIGHT
from ariadne.visualization.fold import Frame, frames
from ariadne.visualization.repeat import Repeats, Run, span

MOST_OPS = 4  # of a module's own in a row; more open and close together


def interactive(plan: TracePlan, candidate: SplitCandidate | None, *, fold_repeats: bool = True) -> str:
    """The page as HTML: each module a part that opens and closes, each op with its line of the plan, its shapes and bytes."""
    root = frames(plan)
    tree = _Tree(plan, candidate.cut if candidate else None, fold_repeats)
    title = f"{root.call.kind or 'model'}{f', cut at {candidate.split_id}' if candidate else ''}"
    data = json.dumps(_data(plan, candidate, tree.items(root)), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "TITLE": html.escape(title),
        "LIGHT": " ".join(f"--{name}: {color};" for name, color in LIGHT.items()),
        "DARK": " ".join(f"--{name}: {color};" for name, color in DARK.items()),
        "COUNT": f"{len(plan.nodes)} ops, {html.escape(plan.for_batches)}",
        "DATA": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    }
    pieces = TEMPLATE.split("@@")  # texts and names by turns: nothing that is put in is looked at again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


class _Tree:
    """Modules as nested lists: an op is its number, a module or the rest of a repeat a dict."""

    def __init__(self, plan: TracePlan, cut: int | None, fold_repeats: bool) -> None:
        self.plan, self.cut, self.alike = plan, cut, Repeats(plan) if fold_repeats else None

    def items(self, frame: Frame) -> list[Any]:
        """What is in a module; of blocks that are alike the first stands there, and the others closed behind it."""
        found: list[Any] = []
        for runs in self.sides(list(frame.runs())):
            at = 0
            while at < len(runs):
                turn = self.alike.find(runs, at) if self.alike else None
                period, count = (turn[0], turn[1].count) if turn else (1, 1)
                found += [item for run in runs[at : at + period] for item in self.item(run, frame, count)]
                if count > 1:
                    rest = runs[at + period : at + period * count]
                    names = [r.call.path for r in rest if isinstance(r, Frame)]
                    inner = [item for run in rest for item in self.item(run, frame, 1)]
                    found.append({"more": f"{count - 1} more alike, to {names[-1]}", "items": inner, "count": count})
                at += period * count
        return found

    def sides(self, runs: list[Run]) -> list[list[Run]]:
        """Runs before the cut, the one that it falls into, and those after it: they are not folded with one another."""
        if self.cut is None:
            return [runs]
        held = [r for r in runs if span([r])[0] < self.cut < span([r])[1]]
        before = [r for r in runs if span([r])[1] <= self.cut]
        return [before, held, [r for r in runs if span([r])[0] >= self.cut]]

    def item(self, run: Run, parent: Frame, count: int) -> list[Any]:
        """A module call, or ops one by one."""
        if not isinstance(run, Frame):
            ops = list(range(*run))
            if len(ops) <= MOST_OPS:
                return ops
            words = labels.ops(self.plan, self.plan.nodes[slice(*run)])
            return [{"name": words, "path": parent.call.path, "params": "", "span": list(run), "items": ops}]
        call = run.call
        if run.size == 1 and not run.frames and count == 1:
            return [call.start]
        many = f" × {count}" if count > 1 else ""
        which = f" (call {call.call})" if call.call > 1 else ""
        name = f"{labels.local(call.path, parent.call.path)} {call.kind}{which}{many}"
        state = labels.parameters(self.plan, self.plan.nodes[call.start : call.end], call.path, True)
        return [
            {"name": name, "path": call.path, "params": state, "span": [call.start, call.end], "items": self.items(run)}
        ]


def _data(plan: TracePlan, candidate: SplitCandidate | None, items: list[Any]) -> dict[str, Any]:
    names = labels.inputs(plan)
    number = {name: -1 - i for i, (_, name) in enumerate(plan.inputs)} | plan.definitions

    def made(found: Sequence[str]) -> tuple[str, str]:
        values = [plan.values[n] for n in found if n in plan.values]
        total = sum(labels.per_sample(plan, v) for v in values)
        fixed = bool(values) and not any(map(labels.follows_batch, values))
        types = labels.some([v.describe() for v in values], 4)
        return types, f"{size(total)}{' once per batch' if fixed else ' per sample'}" if values else ""

    ops = []
    for node in plan.nodes:
        types, nbytes = made(node.outputs)
        reads = list(dict.fromkeys(number[n] for n in node.reads if n in number))
        state = labels.parameters(plan, [node], node.module, False)
        ops.append([labels.op(node), node.module, plan.show(node), types, nbytes, reads, state])
    returned = list(dict.fromkeys(number[n] for n in uses(plan.output) if n in number))
    live = [[number[n], n, *made([n])] for n in candidate.live] if candidate else []
    return {
        "ops": ops,
        "inputs": [[names[n], *made([n])] for _, n in plan.inputs],
        "output": [returned, *made(list(uses(plan.output)))],
        "tree": items,
        "cut": candidate.cut if candidate else None,
        "live": live,
        "crossing": size(candidate.boundary_bytes) if candidate else "",
    }


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>@@TITLE@@</title>
<style>
:root { @@LIGHT@@ --cut: #fff8c5; }
@media (prefers-color-scheme: dark) { :root { @@DARK@@ --cut: #4d3f12; } }
* { box-sizing: border-box; }
body { margin: 0; height: 100vh; display: grid; grid-template: auto minmax(0, 1fr) / minmax(0, 1fr) 340px;
  background: var(--paper); color: var(--ink); font: 13px/1.4 system-ui, Helvetica, Arial, sans-serif; }
header { grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; padding: 8px 14px;
  border-bottom: 1px solid var(--grid); }
h1 { font-size: 16px; margin: 0; } h2 { font-size: 14px; margin: 0 0 6px; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); } p { margin: 4px 0; overflow-wrap: anywhere; }
#view { overflow: auto; cursor: grab; } #view.dragged { cursor: grabbing; user-select: none; }
#size { position: relative; } #board { position: absolute; width: max-content; padding: 16px 90px 40px 16px;
  transform-origin: 0 0; }
#arrows { position: absolute; inset: 0; width: 100%; height: 100%; pointer-events: none; overflow: visible; }
#arrows path { fill: none; stroke: var(--quiet); stroke-width: 1; opacity: 0.7; }
#arrows path.lit { stroke: var(--bad); stroke-width: 2.5; opacity: 1; }
.items { display: flex; flex-direction: column; align-items: center; gap: 12px; padding: 6px 12px 12px; }
details { border: 1px solid var(--quiet); border-radius: 8px; background: color-mix(in srgb, var(--band) 60%, transparent); }
summary, .op { cursor: pointer; padding: 4px 10px; border-radius: 8px; position: relative; z-index: 1; }
summary { width: max-content; } .more { border-style: dashed; }
.op { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--quiet); text-align: center; }
.suffix { border-style: dashed; border-color: var(--bad); }
.end { border-radius: 18px; background: var(--band); }
.cut { background: var(--cut); border: 2px solid var(--ink); padding: 6px 12px; border-radius: 4px; z-index: 1; }
.holds > summary::after { content: " ✂ cut inside"; color: var(--bad); }
.chosen { outline: 3px solid var(--safe); } .hit { background: var(--cut); }
:focus-visible { outline: 3px solid var(--best); outline-offset: 1px; }
aside { border-left: 1px solid var(--grid); padding: 12px 14px; overflow: auto; background: var(--band); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; margin: 6px 0;
  padding: 8px; background: var(--paper); border: 1px solid var(--grid); border-radius: 6px; }
aside button { all: unset; cursor: pointer; color: var(--safe); text-decoration: underline; overflow-wrap: anywhere; }
input, header button { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--quiet);
  border-radius: 6px; padding: 3px 8px; }
@media (max-width: 720px) { body { grid-template: auto minmax(0, 1fr) 34vh / minmax(0, 1fr); }
  aside { border-left: 0; border-top: 1px solid var(--grid); } }
</style>
</head>
<body>
<header>
<h1>@@TITLE@@</h1><span class="quiet">@@COUNT@@</span>
<label>Search <input id="search" type="search" size="18" placeholder="a name ( / )"></label><span id="hits" class="quiet"
  aria-live="polite"></span>
<span><button id="in" type="button" aria-label="zoom in">+</button> <button id="out" type="button" aria-label="zoom out">−</button>
<button id="fit" type="button">100 %</button> <button id="open" type="button">Open all</button>
<button id="close" type="button">Close all</button></span>
</header>
<main id="view"><div id="size"><div id="board"><svg id="arrows" aria-hidden="true"><defs><marker id="tip" viewBox="0 0 8 8"
  refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" style="fill: var(--quiet)"/></marker>
</defs></svg><div id="top" class="items"></div></div></div></main>
<aside id="detail" aria-live="polite"><p>Click an op or a module to see its line of the plan, its shapes and bytes.</p>
<p class="quiet">Drag to pan, Ctrl and wheel to zoom. Keys: ↑ ↓ to go,
 → ← to open and close, / to search, + − 0 to zoom.</p></aside>
<noscript>This page needs JavaScript, which it has in itself.</noscript>
<script type="application/json" id="data">@@DATA@@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const id = (name) => document.getElementById(name);
const view = id("view"), board = id("board"), arrows = id("arrows"), detail = id("detail");
const readers = new Map(), places = new Map();  // of each op: who reads it; its element (inputs are -1, -2, ...)
let zoom = 1, chosen = null;
data.ops.forEach((op, i) => op[5].forEach((r) => readers.set(r, [...(readers.get(r) || []), i])));
for (const r of data.output[0]) readers.set(r, [...(readers.get(r) || []), data.ops.length]);

function element(tag, className, ...inside) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...inside);
  return made;
}

function label(number) {
  if (number < 0) return "input " + data.inputs[-1 - number][0];
  if (number === data.ops.length) return "output";
  const [op, module] = data.ops[number];
  return (module ? module + ": " : "") + op;
}

function box(number, words) {
  const suffix = data.cut !== null && number >= data.cut && number < data.ops.length;
  const end = number < 0 || number === data.ops.length;
  const made = element("button", "op" + (suffix ? " suffix" : "") + (end ? " end" : ""), words);
  made.type = "button";
  made.addEventListener("click", () => { choose(made); showOp(number); });
  made.show = () => showOp(number);
  made.number = number;
  places.set(number, made);
  return made;
}

function build(item, parent) {
  if (item === data.cut) parent.append(boundary());
  if (typeof item === "number") {
    const [op, module, , types] = data.ops[item];
    parent.append(box(item, op + (module ? " · " + module.split(".").slice(-2).join(".") : "") + " · " + types));
    return;
  }
  if (item.span && item.span[0] === data.cut) parent.append(boundary());
  const [start, end] = item.span || [0, 0];
  const made = element("details", item.more ? "more" : "", element("summary", "", item.more || item.name));
  if (data.cut !== null && start < data.cut && data.cut < end) made.classList.add("holds");
  if (item.span && data.cut !== null && start >= data.cut) made.classList.add("suffix");
  const inner = element("div", "items");
  made.append(inner);
  parent.append(made);
  made.show = () => showModule(item);
  made.firstChild.addEventListener("click", () => { choose(made.firstChild); made.show(); });
  made.firstChild.show = made.show;
  made.path = item.path || "";
  made.addEventListener("toggle", draw);
  for (const next of item.items) build(next, inner);
}

let boundaryMade = false;
function boundary() {
  if (boundaryMade) return "";
  boundaryMade = true;
  const lines = data.live.map(([, name, types, bytes]) => element("div", "", name + " · " + types + " · " + bytes));
  return element("div", "cut", element("b", "", "✂ cut:" + data.cut + ", " + data.crossing + " per sample"), ...lines);
}

function jump(number) {
  const button = element("button", "", label(number));
  button.type = "button";
  button.addEventListener("click", () => reveal(places.get(number)));
  return element("div", "", button);
}

function showOp(number) {
  detail.replaceChildren(element("h2", "", label(number)));
  const add = (words, className) => words && detail.append(element("p", className, words));
  let reads = [];
  if (number < 0) { const [, types, bytes] = data.inputs[-1 - number]; add(types); add(bytes); }
  else if (number === data.ops.length) { reads = data.output[0]; add(data.output[1]); add(data.output[2]); }
  else {
    const [, , line, types, bytes, before, params] = data.ops[number];
    reads = before;
    detail.append(element("pre", "", line));
    add(types); add(bytes); add(params);
    const side = data.cut === null ? "" : number < data.cut ? ", in the prefix" : ", in the suffix";
    add("op " + number + " of " + data.ops.length + side, "quiet");
  }
  if (reads.length) detail.append(element("h2", "", "Reads"), ...reads.slice(0, 30).map(jump));
  const after = readers.get(number) || [];
  if (after.length) detail.append(element("h2", "", "Read by"), ...after.slice(0, 30).map(jump));
}

function showModule(item) {
  detail.replaceChildren(element("h2", "", item.more || item.name));
  if (item.path) detail.append(element("p", "", item.path));
  if (!item.span) { detail.append(element("p", "", "Each is fed by the one before it.")); return; }
  const [start, end] = item.span;
  detail.append(element("p", "", (end - start) + (end - start === 1 ? " op" : " ops") + ", from " + start + " on"));
  if (item.params) detail.append(element("p", "", item.params));
  const lines = data.ops.slice(start, Math.min(end, start + 60)).map((op) => op[2]);
  detail.append(element("pre", "", lines.join("\\n") + (end - start > 60 ? "\\n..." : "")));
}

function choose(made) {
  if (chosen) chosen.classList.remove("chosen");
  chosen = made;
  made.classList.add("chosen");
  light();
}

function reveal(made) {
  for (let up = made.parentElement; up !== board; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  choose(made);
  made.show();
  draw();
  made.scrollIntoView({ block: "center", inline: "center" });
  made.focus({ preventScroll: true });
}

function visible(made) {  // itself, or the outermost closed part that it is in
  let found = made;
  for (let up = made.parentElement; up !== board; up = up.parentElement) {
    if (up.tagName === "DETAILS" && !up.open) found = up.firstChild;
  }
  return found;
}

function draw() {
  const base = board.getBoundingClientRect(), seen = new Map(), order = new Map();
  const shown = [...board.querySelectorAll("summary, .op")].filter((e) => e.checkVisibility());
  shown.forEach((e, i) => order.set(e, i));
  const rect = (e) => {
    const r = (e.tagName === "SUMMARY" && !e.parentElement.open ? e.parentElement : e).getBoundingClientRect();
    return { left: (r.left - base.left) / zoom, right: (r.right - base.left) / zoom,
      top: (r.top - base.top) / zoom, bottom: (r.bottom - base.top) / zoom };
  };
  const boxes = shown.map(rect), rights = boxes.map((b) => b.right), lanes = [];
  const join = (from, to) => {
    const a = visible(places.get(from)), b = visible(places.get(to));
    if (a !== b && order.get(a) < order.get(b)) seen.set(order.get(a) + " " + order.get(b), [a, b]);
  };
  data.ops.forEach((op, i) => op[5].forEach((r) => join(r, i)));
  data.output[0].forEach((r) => join(r, data.ops.length));
  const drawn = [...seen.values()].map(([a, b]) => [a, b, order.get(a), order.get(b)]);
  drawn.sort((x, y) => (x[3] - x[2]) - (y[3] - y[2]));  // short ones first: they take the inner lanes
  for (const old of arrows.querySelectorAll("path.arrow")) old.remove();
  for (const [a, b, i, j] of drawn) {
    const p = boxes[i], q = boxes[j], leaf = shown.slice(i + 1, j).every((e) => e.tagName === "SUMMARY" && e.parentElement.open);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    if (leaf) path.setAttribute("d", `M${(p.left + p.right) / 2} ${p.bottom}L${(q.left + q.right) / 2} ${q.top}`);
    else {
      let lane = 0;
      while ((lanes[lane] || []).some(([s, e]) => s < j && i < e)) lane += 1;
      (lanes[lane] = lanes[lane] || []).push([i, j]);
      const x = Math.max(...rights.slice(i, j + 1)) + 14 + 7 * (lane % 10), y = (p.top + p.bottom) / 2, z = (q.top + q.bottom) / 2;
      path.setAttribute("d", `M${p.right} ${y}H${x - 6}Q${x} ${y} ${x} ${y + 6}V${z - 6}Q${x} ${z} ${x - 6} ${z}H${q.right}`);
    }
    path.setAttribute("class", "arrow");
    path.setAttribute("marker-end", "url(#tip)");
    path.ends = [a, b];
    arrows.append(path);
  }
  id("size").style.width = board.offsetWidth * zoom + "px";
  id("size").style.height = board.offsetHeight * zoom + "px";
  light();
}

function light() {
  const now = chosen && visible(chosen);
  for (const path of arrows.querySelectorAll("path.arrow")) path.classList.toggle("lit", path.ends.includes(now));
}

function setZoom(to) {
  zoom = Math.min(4, Math.max(0.1, to));
  board.style.transform = `scale(${zoom})`;
  id("fit").textContent = Math.round(zoom * 100) + " %";
  draw();
}

let hits = [], at = -1;
function search(words) {
  for (const e of board.querySelectorAll(".hit")) e.classList.remove("hit");
  words = words.trim().toLowerCase();
  hits = words ? [...board.querySelectorAll("summary, .op")].filter((e) =>
    (e.tagName === "SUMMARY" ? e.textContent + " " + e.parentElement.path : label(e.number) + " "
      + ((data.ops[e.number] || [])[2] || "")).toLowerCase().includes(words)) : [];
  for (const e of hits) e.classList.add("hit");
  at = -1;
  id("hits").textContent = words ? hits.length + " found" + (hits.length ? ", Enter goes to the next" : "") : "";
}

id("search").addEventListener("input", (event) => search(event.target.value));
id("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !hits.length) return;
  at = (at + (event.shiftKey ? hits.length - 1 : 1)) % hits.length;
  reveal(hits[at]);
  id("hits").textContent = (at + 1) + " of " + hits.length;
  id("search").focus({ preventScroll: true });
});
function setAll(open) {
  for (const e of board.querySelectorAll("details")) if (!open || !e.classList.contains("more")) e.open = open;
  draw();
}
id("open").addEventListener("click", () => setAll(true));
id("close").addEventListener("click", () => setAll(false));
id("in").addEventListener("click", () => setZoom(zoom * 1.25));
id("out").addEventListener("click", () => setZoom(zoom / 1.25));
id("fit").addEventListener("click", () => setZoom(1));
view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  setZoom(zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
}, { passive: false });
let held = null;
view.addEventListener("pointerdown", (event) => {
  if (event.pointerType === "mouse" && event.button === 0 && !event.target.closest("summary, .op"))
    held = [event.clientX + view.scrollLeft, event.clientY + view.scrollTop];
});
window.addEventListener("pointermove", (event) => {
  if (!held) return;
  view.classList.add("dragged");
  view.scrollTo(held[0] - event.clientX, held[1] - event.clientY);
});
window.addEventListener("pointerup", () => { held = null; view.classList.remove("dragged"); });
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
  const shown = [...board.querySelectorAll("summary, .op")].filter((e) => e.checkVisibility());
  const now = shown.indexOf(document.activeElement), part = shown[now]?.tagName === "SUMMARY" ? shown[now].parentElement : null;
  if (event.key === "/") id("search").focus();
  else if (event.key === "+" || event.key === "=") setZoom(zoom * 1.25);
  else if (event.key === "-") setZoom(zoom / 1.25);
  else if (event.key === "0") setZoom(1);
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const next = shown[now < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, now + (event.key === "ArrowDown" ? 1 : -1)))];
    next.focus(); choose(next); next.show();
  } else if (event.key === "ArrowRight" && part) part.open = true;
  else if (event.key === "ArrowLeft" && part?.open) part.open = false;
  else if (event.key === "ArrowLeft" && now >= 0) (part || shown[now]).parentElement.closest("details")?.firstChild.focus();
  else return;
  event.preventDefault();
});

const top_ = id("top");
data.inputs.forEach(([name, types], i) => top_.append(box(-1 - i, "input " + name + " · " + types)));
for (const item of data.tree) build(item, top_);
top_.append(box(data.ops.length, "output · " + data.output[1]));
for (let level = 0; level < 8; level += 1) {  // from the outside in, as long as it stays a page or so
  const closed = [...board.querySelectorAll("details:not(.more):not([open])")].filter((e) => e.checkVisibility());
  const more = closed.reduce((n, e) => n + e.querySelector(".items").children.length, 0);
  if (!closed.length || (level && more + board.querySelectorAll("details[open] > .items > *").length > 40)) break;
  for (const e of closed) e.open = true;
}
for (const e of board.querySelectorAll(".holds")) e.open = true;
draw();
</script>
</body>
</html>
"""
