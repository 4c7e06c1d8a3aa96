"""The frontier profile as a page of its own: no file beside it, nothing from a network; without scripts it is still a table."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

from ariadne.plan import TracePlan
from ariadne.units import size
from ariadne.visualization import labels
from ariadne.visualization.chart import DARK, LIGHT, chart, style, summary
from ariadne.visualization.curve import Point, Profile

WIDE, NARROW = 1040, 358
Sources = Mapping[int, tuple[str, str]]  # by the number of ops in the prefix: the generated prefix and suffix


def page(profile: Profile, plan: TracePlan, sources: Sources) -> str:
    """The page as HTML: hover shows what crosses at a cut, a click the generated source of both sides, where it is given."""
    charts = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        body, height = chart(profile, width, listed=False)
        charts.append(
            f'<svg class="chart {name}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" tabindex="0" role="img" '
            f'aria-label="Bytes per sample across each cut; arrow keys go from cut to cut, Enter shows the source">{body}</svg>'
        )
    data = json.dumps(_data(profile, plan, sources), separators=(",", ":"), ensure_ascii=False)
    variables = {name: f"var(--{name})" for name in LIGHT}
    parts = {
        "TITLE": html.escape(profile.title),
        "LIGHT": _variables(LIGHT),
        "DARK": _variables(DARK),
        "CHARTSTYLE": style(variables),
        "CHARTS": "\n".join(charts),
        "BEST": "\n".join(_best(profile, i, p) for i, p in enumerate(profile.best, start=1)),
        "ROWS": "\n".join(map(_row, profile.points)),
        "COUNT": f"{len(profile.points)} cuts, {sum(not p.candidate.safe for p in profile.points)} of them not safe",
        "DATA": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    }
    pieces = TEMPLATE.split("@@")  # texts and names by turns: nothing that is put in is looked at again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _variables(colors: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def _best(profile: Profile, number: int, point: Point) -> str:
    words = html.escape(summary(profile, point))
    return f'<li><button type="button" data-cut="{point.candidate.cut}"><b>{number}</b> {words}</button></li>'


def _row(point: Point) -> str:
    c = point.candidate
    cells = [c.split_id, point.where, size(c.boundary_bytes), str(len(c.live)), c.reason or "safe"]
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _data(profile: Profile, plan: TracePlan, sources: Sources) -> dict[str, Any]:
    """What the page's script shows. A source is a list of (first line, how many) in a common pool: neighbours share most lines."""
    pool: dict[str, int] = {}
    kept = {cut: [_runs(text, pool) for text in sides] for cut, sides in sorted(sources.items())}
    crossing = dict.fromkeys(name for p in profile.points for name in p.candidate.live)
    names = {name: i for i, name in enumerate(crossing)}
    inputs = labels.inputs(plan)
    values = []
    for name in crossing:
        value = plan.values[name]
        made = plan.definitions.get(name)
        where = f"input {inputs.get(name, name)}" if made is None else plan.nodes[made].module or "the model itself"
        once = "" if labels.follows_batch(value) else " once per batch"
        values.append([name, value.describe(), where, size(labels.per_sample(plan, value)) + once])
    return {
        "ops": profile.ops,
        "cuts": [_cut(p, names) for p in profile.points],
        "values": values,
        "lines": list(pool),
        "sources": kept,
    }


def _cut(point: Point, names: Mapping[str, int]) -> dict[str, Any]:
    c = point.candidate
    found = {
        "cut": c.cut,
        "boundary": point.boundary,
        "where": point.where,
        "kind": point.kind,
        "bytes": size(c.boundary_bytes),
        "size": c.boundary_bytes,
        "live": [names[n] for n in c.live],
        "reason": c.reason,
        "marks": [*(["Pareto-best"] if point.best else []), *(["the chosen cut"] if point.chosen else [])],
        "trainable": [c.trainable_prefix, c.trainable],
    }
    if point.times is not None:
        t = point.times
        found["time"] = f"{t.share:.0%} of {t.both * 1e3:.3g} ms in the prefix (median, measured)"
    return found


def _runs(text: str, pool: dict[str, int]) -> list[int]:
    runs: list[int] = []
    for line in text.splitlines():
        at = pool.setdefault(line, len(pool))
        if runs and runs[-2] + runs[-1] == at:
            runs[-1] += 1
        else:
            runs += [at, 1]
    return runs


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>@@TITLE@@: where to cut</title>
<style>
:root { @@LIGHT@@ }
@media (prefers-color-scheme: dark) { :root { @@DARK@@ } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1080px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, Helvetica, Arial, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 20px 0 6px; } p { margin: 4px 0; }
.quietly { color: var(--quiet); }
svg.chart { display: block; max-width: 100%; height: auto; touch-action: pan-y; cursor: crosshair; }
svg.narrow { display: none; }
svg.chart:focus { outline: none; }
svg.chart:focus-visible, button:focus-visible { outline: 2px solid var(--safe); outline-offset: 2px; }
#detail { border: 1px solid var(--grid); border-radius: 8px; padding: 10px 14px; background: var(--band); min-height: 190px;
  overflow-wrap: anywhere; }
#detail h2 { margin: 0 0 4px; } #detail ul { margin: 4px 0; padding-left: 20px; }
.unsafe { border-left: 4px solid var(--bad); padding-left: 8px; }
ol, .plain { list-style: none; margin: 0; padding: 0; }
li button { all: unset; cursor: pointer; padding: 3px 0; overflow-wrap: anywhere; }
li button:hover { text-decoration: underline; } li b { color: var(--best); display: inline-block; min-width: 22px; }
.sides { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 12px; }
pre { margin: 0; padding: 10px; max-height: 460px; overflow: auto; border: 1px solid var(--grid); border-radius: 8px;
  background: var(--band); font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } td, th { text-align: left; padding: 3px 10px 3px 0; vertical-align: top;
  border-bottom: 1px solid var(--grid); }
@media (max-width: 720px) {
  .sides { grid-template-columns: minmax(0, 1fr); } svg.wide { display: none; } svg.narrow { display: block; }
}
@@CHARTSTYLE@@
</style>
</head>
<body>
<h1>@@TITLE@@: where to cut</h1>
<p class="quietly">@@COUNT@@. Point at a cut to see what crosses there; click it, or press Enter, to see the Python of both
sides.</p>
@@CHARTS@@
<section id="detail" aria-live="polite"><p class="quietly">No cut is selected.</p></section>
<h2>Pareto-best cuts: neither the input nor a safe cut before it is as small</h2>
<ol id="best">
@@BEST@@
</ol>
<section id="source" hidden>
<h2 id="source-title"></h2>
<p id="source-note" class="quietly"></p>
<div class="sides">
<div><h2>Prefix</h2><pre id="prefix" tabindex="0"></pre></div>
<div><h2>Suffix</h2><pre id="suffix" tabindex="0"></pre></div>
</div>
</section>
<h2>All cuts</h2>
<details><summary>As a table</summary><div class="scroll"><table>
<thead><tr><th>cut</th><th>after</th><th>per sample</th><th>values</th><th>safe?</th></tr></thead>
<tbody>
@@ROWS@@
</tbody></table></div></details>
<script type="application/json" id="data">@@DATA@@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = [...document.querySelectorAll("svg.chart")];
const detail = document.getElementById("detail");
let shown = -1, pinned = -1;

function element(tag, words, className) {
  const made = document.createElement(tag);
  if (words !== undefined) made.textContent = words;
  if (className) made.className = className;
  return made;
}

function show(index) {
  if (index === shown) return;
  shown = index;
  const c = data.cuts[index];
  detail.replaceChildren(
    element("h2", "after " + c.where + (c.kind ? " (" + c.kind + ")" : "") + ": cut " + c.cut + " of " + data.cuts.length));
  if (c.reason) detail.append(element("p", "Not safe: " + c.reason, "unsafe"));
  else detail.append(element("p", "Safe" + c.marks.map((m) => ", " + m).join("")));
  detail.append(element("p", c.bytes + " per sample in " + c.live.length + (c.live.length === 1 ? " value:" : " values:")));
  const list = element("ul");
  for (const i of c.live.slice(0, 8)) {
    const [name, type, where, size] = data.values[i];
    list.append(element("li", name + ": " + type + ", " + size + ", from " + where));
  }
  if (c.live.length > 8) list.append(element("li", "and " + (c.live.length - 8) + " more"));
  detail.append(list);
  if (c.time) detail.append(element("p", c.time));
  const sides = ["prefix", "suffix"].filter((_, i) => c.trainable[i]);
  detail.append(element("p", c.cut + " of " + data.ops + " ops in the prefix; something to train in: "
    + (sides.join(" and ") || "neither"), "quietly"));
  detail.append(element("p", 'In Python: split="' + c.boundary + '"', "quietly"));
  for (const svg of charts) mark(svg, c);
}

function mark(svg, c) {
  const [x, y] = place(svg, c), cursor = svg.querySelector(".cursor"), ring = svg.querySelector(".ring");
  cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
  ring.setAttribute("cx", x); ring.setAttribute("cy", y);
  cursor.style.visibility = ring.style.visibility = "visible";
}

function place(svg, c) {
  const { left, right, top, bottom, low, high } = JSON.parse(svg.querySelector(".cursor").dataset.scale);
  const y = c.size > 0 ? top + (bottom - top) * (high - Math.log10(c.size)) / (high - low) : bottom;
  return [left + c.cut / data.ops * (right - left), y];
}

function nearest(svg, event) {
  const { left, right } = JSON.parse(svg.querySelector(".cursor").dataset.scale), box = svg.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  const cut = Math.round((x - left) / (right - left) * data.ops);
  return Math.min(data.cuts.length, Math.max(1, cut)) - 1;
}

function text(runs) {
  const lines = [];
  for (let i = 0; i < runs.length; i += 2) lines.push(...data.lines.slice(runs[i], runs[i] + runs[i + 1]));
  return lines.join("\\n");
}

function pin(index) {
  show(index);
  pinned = index;
  const c = data.cuts[index], kept = data.sources[c.cut], note = document.getElementById("source-note");
  document.getElementById("source").hidden = false;
  const cut = "cut:" + c.cut;
  document.getElementById("source-title").textContent = "Source at " + c.boundary + (c.boundary === cut ? "" : " (" + cut + ")");
  for (const [i, side] of ["prefix", "suffix"].entries()) {
    const place = document.getElementById(side);
    place.textContent = kept ? text(kept[i]) : "";
    place.parentElement.hidden = !kept;
  }
  const others = c.reason ? [] : Object.keys(data.sources).map(Number).sort((a, b) => Math.abs(a - c.cut) - Math.abs(b - c.cut));
  note.replaceChildren();
  if (c.reason) note.append("There is none, for the cut is not safe: " + c.reason);
  else if (!kept) {
    note.append('It is not in this page. In Python: runtime.resplit("cut:' + c.cut + '").prefix_source. ');
    if (others.length) {
      const button = element("button", "Show the nearest that is, cut:" + others[0]);
      button.addEventListener("click", () => pin(others[0] - 1));
      note.append(button);
    }
  }
}

for (const svg of charts) {
  svg.addEventListener("pointermove", (event) => show(nearest(svg, event)));
  svg.addEventListener("pointerleave", () => { if (pinned >= 0) show(pinned); });
  svg.addEventListener("click", (event) => pin(nearest(svg, event)));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step) show(Math.min(data.cuts.length - 1, Math.max(0, shown + step)));
    else if (event.key === "Enter" && shown >= 0) pin(shown);
    else return;
    event.preventDefault();
  });
}
for (const button of document.querySelectorAll("#best button")) {
  const index = Number(button.dataset.cut) - 1;
  button.addEventListener("pointerenter", () => show(index));
  button.addEventListener("focus", () => show(index));
  button.addEventListener("click", () => pin(index));
}
const first = data.cuts.findIndex((c) => c.marks.includes("the chosen cut"));
if (first >= 0) show(first);
</script>
</body>
</html>
"""
