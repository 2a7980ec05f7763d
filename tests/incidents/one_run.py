"""One process of run_incidents.py: tiny runs in a copy of the package, and what each of them did, as JSON.

python one_run.py FOLDER SPEC, where SPEC is JSON: {"parts": [overrides, ...], "seeds": [...]}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    folder, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    from tiny_run import write_run

    config = write_run(folder)
    for seed in spec["seeds"]:
        outcome = one_run(config, f"seed_{seed}", [[*part, f"run.seed={seed}"] for part in spec["parts"]])
        (folder / f"{seed}.json").write_text(json.dumps(outcome))


def one_run(config: Path, name: str, parts: list[list[str]]) -> dict[str, Any]:
    """Each part is one start of the run. weights: a digest of the weights after each optimizer step, in the order of
    the steps, also of those that the run has not reported because it ended."""
    from tiny_run import train

    from meshrl.cluster.train_group import TrainGroup

    weights, error, optim_step = list[str](), None, TrainGroup.optim_step

    async def recorded(self: TrainGroup, *args: Any, **kwargs: Any) -> Any:
        report = await optim_step(self, *args, **kwargs)
        weights.append(str([sorted(own.weights.items()) for own in report.shards]))
        return report

    TrainGroup.optim_step = recorded  # type: ignore[method-assign]
    try:
        for part in parts:
            train(config, name, *part)
    except (Exception, SystemExit) as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        TrainGroup.optim_step = optim_step  # type: ignore[method-assign]
    run = config.parent / "runs" / name
    steps = metrics(run / "metrics.jsonl")
    notes = run / "run_notes.txt"
    lines = [line[21:] for line in notes.read_text().splitlines()] if notes.is_file() else []
    result = run / "result.json"
    return {
        "error": error,
        "starts": sum(line.startswith("ready after") for line in lines),
        "weights": weights,
        "notes": lines,
        "limits": limits(run / "metrics.jsonl"),
        "status": json.loads(result.read_text())["status"] if result.is_file() else None,
        "reward": [step["reward/mean"] for step in steps if "reward/mean" in step],
        "loss": [step["loss/policy"] for step in steps if "loss/policy" in step],
    }


def metrics(path: Path) -> list[dict[str, float]]:
    if not path.is_file():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["metrics"] for record in records if "metrics" in record]


def limits(path: Path) -> dict[str, str]:
    """Metrics of which a rule of health.json finds something, and what."""
    from meshrl.monitor.health import Health
    from meshrl.monitor.sinks import read_metrics

    lines = read_metrics(path)[0] if path.is_file() else []
    return {finding.metric: finding.reason for finding in Health(lines).findings}


if __name__ == "__main__":
    main()
