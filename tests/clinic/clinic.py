"""The runs of cases.yaml, and the page docs/health.md from the rules and from results.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
SEED = 100  # of the first evaluated run; limits were chosen with seeds below it


class Case(NamedTuple):
    """One run. rule: "" of a healthy one. reward: reward.terms in place of the right answer. held_out: with
    evaluations. drift: by which the sampler's logprobs are off, in nats, times the step. edit: metric, shape and factor
    of a change to the lines of a healthy run."""

    what: str
    rule: str
    seed: int
    reward: str = "answer: {kind: 'sick_parts:right'}"
    options: Sequence[str] = ()
    held_out: bool = False
    drift: float = 0.0
    edit: Sequence[Any] = ()
    sft: bool = False

    @property
    def name(self) -> str:
        return f"{self.rule or 'healthy'}: {self.what}"


def cases(first_seed: int = SEED) -> list[Case]:
    """All runs, each with a seed of its own."""
    table = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))
    rows = [(rule, case) for rule, of_rule in table["sick"].items() for case in of_rule]
    rows += [("", case) for case in table["healthy"]]
    return [Case(rule=rule, seed=first_seed + i, **case) for i, (rule, case) in enumerate(rows)]


def interval(found: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, JASA 22, 1927)."""
    z, share = 1.96, found / total
    middle, half = share + z * z / (2 * total), z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return max(0.0, (middle - half) / (1 + z * z / total)), min(1.0, (middle + half) / (1 + z * z / total))


def page() -> str:
    """The text of docs/health.md."""
    from meshrl.monitor.health import RULES

    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    by_name = {each.name: each for each in cases()}
    sick = {name: row for name, row in results.items() if by_name[name].rule}
    healthy = {name: row for name, row in results.items() if not by_name[name].rule}
    found = {name for name, row in sick.items() if by_name[name].rule in row["found"]}
    alarms = [name for name, row in healthy.items() if row["found"]]
    rules, tables = [], []
    for rule in RULES:
        conditions = " **or** ".join(
            " and ".join(f"`{c.metric}`: {c.text}" for c in all_of).replace("|", "\\|") for all_of in rule.when
        )
        means = (
            f"{rule.means}\n\n**Try:** {rule.advice}\n" if rule.means else "[metrics.md](metrics.md) has the texts.\n"
        )
        rules.append(f"### {rule.name[0].upper()}{rule.name[1:]}\n\n{means}\nRule: {conditions}.\n")
        of_rule = [name for name in sick if by_name[name].rule == rule.name]
        if of_rule:
            steps = ", ".join(str(sick[name]["found"][rule.name]) for name in of_rule if name in found)
            count = sum(name in found for name in of_rule)
            tables.append(f"| {rule.name} | {len(of_rule)} | {count} | {steps} |")
    runs = []
    for name, row in results.items():
        others = ", ".join(rule for rule in row["found"] if rule != by_name[name].rule)
        own = by_name[name].rule
        outcome = ("found" if name in found else "**missed**") if own else "an alarm" if row["found"] else "silent"
        runs.append(f"| {own or 'healthy'} | {by_name[name].what} | {row['seed']} | {outcome} | {others} |")
    return (
        (HERE / "page.md")
        .read_text(encoding="utf-8")
        .format(
            rules="\n".join(rules),
            table="\n".join(tables),
            runs="\n".join(runs),
            num_sick=len(sick),
            num_found=len(found),
            found="{:.0%} to {:.0%}".format(*interval(len(found), len(sick))),
            num_healthy=len(healthy),
            num_alarms=len(alarms),
            alarms="{:.0%} to {:.0%}".format(*interval(len(alarms), len(healthy))),
        )
    )
