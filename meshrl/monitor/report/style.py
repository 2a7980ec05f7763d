"""The look of report.html, and the few lines of script that read values off its curves. Nothing outside is loaded."""

STYLE = """
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #fff; --ink: #1b1f24; --soft: #626b76; --line: #dfe3e8; --grid: #eceff2;
  --yes: #1a7f4b; --no: #c0392b; --maybe: #9a6700;
  --c0: #2563c9; --c1: #d9730d; --c2: #2e9e6b; --c3: #9b51c9; --c4: #c2405f; --c5: #8a7a1f; --c6: #7c8794; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #111418; --card: #1a1e24; --ink: #e6e9ee; --soft: #97a1ae; --line: #2c323b; --grid: #252b33;
  --yes: #4cc38a; --no: #ff7b6b; --maybe: #e0b341;
  --c0: #6ea8fe; --c1: #f2a65a; --c2: #5fd3a0; --c3: #c792ea; --c4: #f07d98; --c5: #d3c35a; --c6: #8d99a8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 1160px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 20px 0 8px; }
small { color: var(--soft); font-weight: 400; font-size: 12px; }
h3 small, figcaption small { margin-left: 6px; }
code, pre { font: 12px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
header { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; }
header p { flex-basis: 100%; margin: 0; color: var(--soft); overflow-wrap: anywhere; }
.badge { border: 1px solid currentColor; border-radius: 99px; padding: 1px 10px; font-size: 13px; color: var(--soft); }
.badge b { color: var(--ink); }
.badge.done { color: var(--yes); } .badge.failed { color: var(--no); } .badge.interrupted { color: var(--maybe); }
.error { border-left: 4px solid var(--no); background: var(--card); padding: 10px 14px; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 16px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); gap: 10px; margin-top: 20px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.tile span { display: block; color: var(--soft); font-size: 12px; }
.tile b { display: block; font-size: 19px; font-weight: 600; white-space: nowrap;
  line-height: 1.35; font-variant-numeric: tabular-nums; }
.tile small { display: block; line-height: 1.35; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 14px; }
figure, .proofs { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; min-width: 0; }
figcaption { display: flex; justify-content: space-between; gap: 8px; }
.at { color: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12px; color: var(--soft); min-height: 20px; }
.legend b { color: var(--ink); font-variant-numeric: tabular-nums; font-weight: 600; }
figure p { margin: 4px 0 0; padding-left: 18px; font-size: 12.5px; line-height: 1.4; color: var(--soft);
  position: relative; }
figure p.good::before { content: "✓"; color: var(--yes); position: absolute; left: 2px; }
figure p.else::before { content: "!"; color: var(--maybe); position: absolute; left: 5px; font-weight: 700; }
figure p code { font-size: 11.5px; }
.plot { display: block; width: 100%; height: auto; margin: 4px 0; touch-action: pan-y; }
.plot text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.plot path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.plot .grid { stroke: var(--grid); stroke-width: 1; } .plot .axis { stroke: var(--line); stroke-width: 1; }
.plot .raw { opacity: .33; stroke-width: 1.2; } .plot .thin { stroke-width: 1.2; stroke-dasharray: 3 4; }
.plot .limit { stroke: var(--no); stroke-dasharray: 6 4; stroke-width: 1.5; }
.plot .cursor { stroke: var(--soft); stroke-width: 1; }
.spark { width: 90px; height: 18px; } .spark path { fill: none; stroke-width: 1.3; }
i { font-style: normal; }
.legend i, .phases td i[class^=k] { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 5px; }
.klimit { background: var(--no); }
LAYERS
table { border-collapse: collapse; font-size: 13px; width: 100%; }
td, th { text-align: left; padding: 4px 8px; border-top: 1px solid var(--grid); vertical-align: top; }
th { color: var(--soft); font-weight: 500; border: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.phases td { padding: 2px 6px; border: 0; font-size: 12.5px; } .phases .bar { width: 45%; vertical-align: middle; }
.phases .bar i { display: block; height: 8px; border-radius: 4px; min-width: 1px; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 4px 6px; }
.settings td:nth-child(2) { overflow-wrap: anywhere; } .origin { color: var(--soft); white-space: nowrap; }
.numbers .told { color: var(--soft); min-width: 220px; font-size: 12px; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); margin-bottom: 8px; }
.note { color: var(--soft); font-size: 13px; margin: 0; }
.sample { display: grid; grid-template-columns: 1fr 1fr 1fr; gap: 1px; background: var(--line);
  border: 1px solid var(--line); border-radius: 10px; overflow: hidden; margin-bottom: 10px; }
.sample > div { background: var(--card); padding: 10px 12px; min-width: 0; }
.sample .yes { box-shadow: inset 3px 0 var(--yes); } .sample .no { box-shadow: inset 3px 0 var(--no); }
.sample pre { margin: 2px 0 6px; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 260px; overflow-y: auto; }
.proofs { list-style: none; } .proofs li { padding: 6px 0 6px 26px; position: relative; }
.proofs b { display: block; }
.proofs li::before { position: absolute; left: 2px; font-weight: 700; }
.proofs .yes::before { content: "✓"; color: var(--yes); } .proofs .no::before { content: "✗"; color: var(--no); }
footer { margin-top: 40px; color: var(--soft); font-size: 12px; }
@media (max-width: 720px) {
  .sample { grid-template-columns: 1fr; } body { padding-top: 16px; }
  .settings td { display: block; border: 0; padding: 0 4px; } .settings td:first-child { padding-top: 8px; }
  .settings td:nth-child(2) { font-weight: 600; } }
""".replace(
    "LAYERS",
    "\n".join(
        f".l{i} {{ stroke: var(--c{i % 7}); }} .f{i} {{ fill: var(--c{i % 7}); }} "
        f".k{i}, .b{i} {{ background: var(--c{i % 7}); }}"
        for i in range(12)
    ),
)

SCRIPT = """
for (const plot of document.querySelectorAll("svg[data-chart]")) {
  const { steps, lines, x } = JSON.parse(plot.dataset.chart);
  const figure = plot.closest("figure"), at = figure.querySelector(".at");
  const shown = [...figure.querySelectorAll(".legend b")], last = shown.map((b) => b.textContent);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  plot.append(cursor);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const here = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
    let near = 0;
    x.forEach((place, i) => { if (Math.abs(place - here) < Math.abs(x[near] - here)) near = i; });
    cursor.setAttribute("d", `M${x[near]} 10V196`);
    at.textContent = `step ${steps[near]}`;
    shown.forEach((b, i) => { b.textContent = lines[i][near] || "–"; });
  });
  plot.addEventListener("pointerleave", () => {
    cursor.removeAttribute("d");
    at.textContent = "";
    shown.forEach((b, i) => { b.textContent = last[i]; });
  });
}
"""
