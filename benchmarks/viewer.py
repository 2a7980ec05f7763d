"""The page of `meshrl view` about 50,000 answers: how long it takes to write, to appear, and to filter.

    python benchmarks/viewer.py

Writes a run's folder through the real RolloutLog, with answers of 20 to 600 tokens of a vocabulary of words and random
values for each token, and opens the page in headless Chromium. Times are those of the page's own clock:

    first_paint       until the first content is painted (Performance API)
    list              until the list of answers is there
    texts             until all texts are decoded in the background; a search before that has to wait for them
    filter_NAME       from the typing of a filter until the list is painted again, the delay of the input included
    token             from the opening of a link to a token until its group is painted

`plain` is a page of the same bytes with one line of text. It shows how much of the first paint is only the reading of
the file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import ROOT, Report, median, median_interval, parser

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.config.algo import AlgoConfig
from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.token_log import TrainerValues
from meshrl.tools.viewer.page import write_view

sys.path.append(str(ROOT / "tests"))
from chromium import Chromium, Page

GROUP, GROUPS_OF_A_STEP = 8, 64
FILTERS = {  # name -> (id of the field, what is typed)
    "word": ("text", "{word}"),
    "letters": ("text", "an"),
    "missing": ("text", "no answer has this"),
    "reward": ("low", "0.5"),
    "tokens": ("short", "400"),
    "sorted": ("sort", "-tokens"),
}
TYPED = """new Promise((done) => {
  const field = document.getElementById(%s), count = document.getElementById("count");
  const seen = new MutationObserver(() => {
    if (count.textContent.startsWith("searching")) return;
    seen.disconnect();
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
  });
  seen.observe(count, { childList: true });
  const began = performance.now();
  field.value = %s;
  field.dispatchEvent(new Event("input", { bubbles: true }));
})"""


def words(count: int) -> list[str]:
    """Words of random syllables, each with a space before it."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfglmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "in")]
    return [" " + "".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(count)]


def write_run(folder: Path, num_answers: int, vocabulary: list[str]) -> int:
    """A run's rollouts with about this many answers; returns the number of their tokens."""
    rng = np.random.default_rng(0)
    log = RolloutLog(folder, lambda ids: "".join(map(vocabulary.__getitem__, ids.tolist())))
    num_tokens, per_step = 0, min(GROUPS_OF_A_STEP, max(1, num_answers // (2 * GROUP)))
    for step in range(1, 1 + num_answers // (per_step * GROUP)):
        trajectories = [answer(rng, step, row, i, vocabulary) for row in range(per_step) for i in range(GROUP)]
        samples, _ = flatten(trajectories)
        assign_advantages(samples, AlgoConfig())
        values = TrainerValues(version=step, samples=samples)
        for sample in samples:
            sample.loss_weight = sample.mask.astype(np.float32)
            size = int(sample.mask.sum())
            noise = rng.normal(0, 1e-3, size) + sample.rollout_logprobs[sample.mask]
            values.values[sample.trajectory_id, 0] = np.stack([noise, rng.gamma(1, 1, size)]).astype(np.float32)
            num_tokens += size
        log.write(step, trajectories, trainer=values)
    return num_tokens


def answer(rng: np.random.Generator, step: int, row: int, index: int, vocabulary: list[str]) -> Trajectory:
    size = int(np.clip(rng.lognormal(5, 0.7), 20, 600))
    prompt = Prompt(
        id=f"row-{row}", ordinal=step, messages=[{"role": "user", "content": f"Question {row}?"}], answer="1"
    )
    turn = Turn(
        context_ids=np.arange(8, dtype=np.int32),
        output_ids=rng.integers(0, len(vocabulary), size, np.int32),
        logprobs=-rng.gamma(0.5, 1, size).astype(np.float32),
        versions=np.full(size, step - 1, np.int32),
        stop_reason="stop" if size < 600 else "length",
        messages=[{"role": "assistant", "content": ""}],
    )
    made = Trajectory(prompt=prompt, group_id=f"row-{row}@{step}", index=index, turns=[turn])
    made.reward = float(rng.random() < 0.3)
    made.rewards = {"right": made.reward, "format": float(rng.random())}
    return made


def clock(page: Page, name: str) -> float:
    kind = "paint" if name == "first-contentful-paint" else "mark"
    return page.wait_for(f"performance.getEntriesByType('{kind}').find((e) => e.name === '{name}')?.startTime") / 1000


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--answers", type=int, default=50_000, help="number of answers (default 50,000)")
    args = p.parse_args()
    if args.smoke:
        args.answers, args.rounds = 64, 2
    report = Report("viewer", args)
    with tempfile.TemporaryDirectory() as name:
        measure(report, args, Path(name))
    report.finish()


def measure(report: Report, args: argparse.Namespace, folder: Path) -> None:
    vocabulary = words(20_000)
    report.figure("tokens", write_run(folder, args.answers, vocabulary))
    logged = list((folder / "rollouts").iterdir())
    report.figure("log_bytes", sum(path.stat().st_size for path in logged if path.suffix == ".jsonl"))
    report.figure("token_log_bytes", sum(path.stat().st_size for path in logged if path.suffix == ".parquet"))
    began = time.perf_counter()
    lines = write_view(folder)
    report.figure("write_s", time.perf_counter() - began)
    for line in lines[1:]:
        report.print_line(line)
    path = folder / "view.html"
    size = path.stat().st_size
    report.figure("page_bytes", size)
    plain = folder / "plain.html"
    plain.write_text("<!doctype html><p>One line.</p><script type='text/plain'>" + "A" * (size - 80) + "</script>\n")
    samples: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    for _ in range(args.rounds):
        with Chromium() as browser:
            add("first_paint_plain_s", clock(browser.open(plain), "first-contentful-paint"))
        with Chromium() as browser:
            page = browser.open(path)
            add("first_paint_s", clock(page, "first-contentful-paint"))
            add("list_s", clock(page, "list"))
            add("texts_s", clock(page, "texts"))
            for name, (field, value) in FILTERS.items():
                typed = value.format(word=vocabulary[7].strip())
                add(f"filter_{name}_s", page.evaluate(TYPED % (json.dumps(field), json.dumps(typed))) / 1000)
                page.evaluate("document.getElementById('filters').reset()")
                page.wait_for("document.getElementById('count').textContent.match(/^([0-9,]+) of \\1 /)")
            add("token_s", open_token(page))
            assert page.errors == [], page.errors
    report.raw |= samples
    for name, values in samples.items():
        report.figure(name, median_interval(values))
    for name in ("first_paint_s", "list_s"):
        report.bar(name, median(samples[name]), at_most=2.0)
    for name in FILTERS:
        report.bar(f"filter_{name}_s", median(samples[f"filter_{name}_s"]), at_most=0.2)


def open_token(page: Page) -> float:
    code = """new Promise((done) => {
      const began = performance.now();
      new MutationObserver((_, seen) => {
        seen.disconnect();
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
      }).observe(document.documentElement, { attributeFilter: ["data-open"] });
      location.hash = "1/1/2&turn=0&token=3";
    })"""
    return float(page.evaluate(code)) / 1000


if __name__ == "__main__":
    main()
