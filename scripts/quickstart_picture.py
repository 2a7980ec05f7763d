"""Write docs/quickstart.svg, the picture of README, from a run: that of `make quickstart`, if no folder is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from meshrl.monitor.sinks import read_metrics
from meshrl.tools.page.charts import HEIGHT, WIDTH, Line, line_chart

ROOT = Path(__file__).resolve().parents[1]
STYLE = """<style>text { font: 11px system-ui, sans-serif; fill: #626b76; } path { fill: none; stroke-width: 2; }
.grid { stroke: #eceff2; stroke-width: 1; } .axis { stroke: #dfe3e8; stroke-width: 1; } .raw { opacity: .33; }
.thin { display: none; } .l0 { stroke: #2563c9; } .l1 { stroke: #d9730d; }
circle.f1 { fill: #d9730d; } .k0 { fill: #2563c9; font-size: 13px; } .k1 { fill: #d9730d; font-size: 13px; }
</style>"""


def main() -> None:
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "quickstart" / "seed_0" / "grpo"
    lines, _ = read_metrics(run / "metrics.jsonl")
    chart = []
    for name, label, style in (
        ("reward/mean", "reward of sampled answers", "noisy"),
        ("eval/reward/mean", "held-out accuracy", "dots"),
    ):
        known = [(line.step, line.metrics[name]) for line in lines if name in line.metrics]
        chart.append(Line(label, *zip(*known), style))
    drawing = re.sub(r' data-chart="[^"]*"', "", line_chart(chart, "fraction"))  # that is for the script of a page
    names = "".join(
        f'<text class="k{i}" x="{WIDTH - 210}" y="{110 + 20 * i}">{c.label}</text>' for i, c in enumerate(chart)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{2 * HEIGHT}"'
    paper = f'{STYLE}<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    drawing = drawing.replace("<svg", head, 1).replace(">", f">{paper}", 1).replace("</svg>", f"{names}</svg>\n")
    (ROOT / "docs" / "quickstart.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
