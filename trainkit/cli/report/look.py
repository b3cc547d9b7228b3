"""How the page looks, and what it does when pointed at."""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "quiet": "#5b6470",
    "faint": "#e3e6ea",
    "train": "#0072b2",
    "validation": "#d55e00",
    "plan": "#8a929c",
    "other1": "#009e73",
    "other2": "#b5548c",
    "other3": "#7a6a00",
    "other4": "#5a4fcf",
}
"""Okabe and Ito's colours, which the colour-blind can tell apart, or near them."""

DARK = {
    "paper": "#14171a",
    "ink": "#e6e8ea",
    "quiet": "#9aa4af",
    "faint": "#2b3036",
    "train": "#56b4e9",
    "validation": "#f0a03c",
    "plan": "#7d8792",
    "other1": "#3cc79c",
    "other2": "#e08fbd",
    "other3": "#d8c84a",
    "other4": "#a49cf5",
}

STYLES = tuple(name for name in LIGHT if name not in ("paper", "ink", "quiet", "faint"))


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


def _lines() -> str:
    return "".join(
        f".line.{name}{{stroke:var(--{name})}}.dot.{name}{{fill:var(--{name})}}"
        f"i.{name}{{border-color:var(--{name})}}"
        for name in STYLES
    )


# The page follows the system, until its switch says otherwise.
STYLE = (
    f"""\
:root{{color-scheme:light;{_variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root:not([data-theme=light])\
{{color-scheme:dark;{_variables(DARK)}}}}}
:root[data-theme=dark]{{color-scheme:dark;{_variables(DARK)}}}
{_lines()}\
"""
    + """\
*{box-sizing:border-box}
body{margin:0 auto;max-width:1200px;padding:28px 28px 48px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
header{display:flex;justify-content:space-between;align-items:baseline;gap:16px}
h1{font-size:24px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;line-height:1.3;margin:0;overflow-wrap:anywhere}
button{font:inherit;font-size:13px;color:var(--quiet);background:none;cursor:pointer;
border:1px solid var(--faint);border-radius:6px;padding:3px 10px;white-space:nowrap}
button:hover{color:var(--ink)}
.where,.says,.note,.left-out{color:var(--quiet);font-size:13px;margin:0}
.where,.left-out,.legend,.note,td{overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:14px}
th{font-weight:400;color:var(--quiet);text-align:left;vertical-align:top}
th,td{padding:3px 20px 3px 0;font-variant-numeric:tabular-nums}
.summary{margin:18px 0 30px}
.summary th{white-space:nowrap}
main{display:grid;grid-template-columns:1fr 1fr;gap:34px 30px}
figure{margin:0;min-width:0}
.plot{position:relative}
figure.wide{grid-column:1/-1}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;margin:4px 0 2px;
min-height:20px}
i{display:inline-block;width:16px;border-top:2px solid;vertical-align:middle;
margin-right:6px}
i.plan{border-top-width:5px;opacity:.45}
i.other1,i.other2,i.other3,i.other4{border-top-style:dashed}
svg{display:block;width:100%;height:auto;outline-offset:3px;touch-action:pan-y}
svg text{fill:var(--quiet);font-size:12px;font-variant-numeric:tabular-nums}
text.y,text.unit{text-anchor:end}
text.x{text-anchor:middle}
.grid{stroke:var(--faint);stroke-width:1}
.axis{stroke:var(--quiet);stroke-width:1;fill:none}
.line{fill:none;stroke-width:1.5;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.line.band{stroke-width:1;opacity:.3}
.line.plan{stroke-width:5;opacity:.45}
.line.other1,.line.other2,.line.other3,.line.other4{stroke-dasharray:8 4}
.hover line{stroke:var(--quiet);stroke-width:1;stroke-dasharray:2 3}
.tip{position:absolute;top:14px;pointer-events:none;background:var(--paper);z-index:1;
border:1px solid var(--faint);border-radius:6px;padding:6px 10px;font-size:13px;
line-height:1.45;box-shadow:0 2px 8px rgb(0 0 0/.18);white-space:nowrap}
.tip[hidden]{display:none}
.tip b{font-weight:600}
details{margin-top:34px}
.scroll{overflow-x:auto}
summary{cursor:pointer;color:var(--quiet);font-size:14px}
details table{margin-top:8px}
details td+td,details th+th{text-align:right}
.left-out{margin-top:28px}
@media (max-width:800px){main{grid-template-columns:1fr}body{padding:18px}
.plot{max-width:620px}
.wide .plot{max-width:none;overflow-x:auto}
.wide svg{min-width:760px}.wide svg text{font-size:15px}}
@media print{button,details{display:none}main{display:block}figure{break-inside:avoid}}
"""
)

# A chart answers to the pointer and, once it has the focus, to the arrow keys.
SCRIPT = """\
"use strict";
const charts = JSON.parse(document.getElementById("points").textContent);
const root = document.documentElement;
const isDark = () => root.dataset.theme
  ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
const theme = document.getElementById("theme");
const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  name();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
name();
theme.hidden = false;

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return x - points[low][0] <= points[high][0] - x ? points[low] : points[high];
}
function element(kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
}
function text(kind, content, parent) {
  const made = document.createElement(kind);
  made.textContent = content;
  parent.append(made);
  return made;
}
for (const [id, lines] of Object.entries(charts)) {
  const figure = document.getElementById(id);
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip");
  const hover = svg.querySelector(".hover"), box = svg.viewBox.baseVal;
  const places = [...new Set(lines.flatMap(l => l.at.map(p => p[0])))];
  places.sort((a, b) => a - b);
  let current = null;
  function show(x) {
    const at = lines.map(line => nearest(line.at, x));
    const best = at.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    current = best[0];
    hover.replaceChildren(element("line", {x1: best[0], x2: best[0], y1: 10,
      y2: box.height - 34}));
    tip.replaceChildren();
    text("b", "step " + best[2].toLocaleString("en"), tip);
    lines.forEach((line, i) => {
      const row = text("div", "", tip);
      text("i", "", row).className = line.style;
      const other = at[i][2] === best[2] ? ""
        : " (step " + at[i][2].toLocaleString("en") + ")";
      row.append(line.label + "  " + at[i][3] + other);
      hover.append(element("circle",
        {class: "dot " + line.style, cx: at[i][0], cy: at[i][1], r: 3.5}));
    });
    tip.hidden = false;
    const scale = svg.clientWidth / box.width;
    const side = best[0] * scale, room = figure.clientWidth;
    const left = side + 14 + tip.offsetWidth <= room
      ? side + 14 : Math.max(0, side - 14 - tip.offsetWidth);
    tip.style.left = left + "px";
  }
  function hide() { hover.replaceChildren(); tip.hidden = true; current = null; }
  svg.addEventListener("pointermove", event => {
    const around = svg.getBoundingClientRect();
    show((event.clientX - around.left) / around.width * box.width);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") hide();
    if (!by) return;
    event.preventDefault();
    const from = current === null ? (by > 0 ? -1 : places.length)
      : places.indexOf(current);
    show(places[Math.min(Math.max(from + by, 0), places.length - 1)]);
  });
}
"""
