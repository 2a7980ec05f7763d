"""A complete run of tiny size: a model with its tokenizer, prompts, a reward, and the config that names them.

Each process that grades imports this file, so it imports little itself, and rewards of other tests are here, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def ascii_share(completion: str, answer: str) -> float:
    """A reward that differs from answer to answer, also for the answers of a random model."""
    return sum(c.isascii() for c in completion) / max(1, len(completion))


def no_reward(completion: str, answer: str) -> float:
    """A reward without a signal."""
    return 0.0


def differs_for_some(completion: str, answer: str) -> float:
    """Equal for the prompts whose answer is divisible by 4: half of them."""
    return 0.0 if int(answer) % 4 == 0 else sum(c.isascii() for c in completion) + len(completion) / 100


def abstains_for_some(completion: str, answer: str) -> float | None:
    return None if int(answer) % 12 == 4 else differs_for_some(completion, answer)


def slow_share(completion: str, answer: str) -> float:
    time.sleep(0.1)
    return ascii_share(completion, answer)


def share_of_ended(completion: str, answer: str, stop_reason: str) -> float:
    return ascii_share(completion, answer) if stop_reason == "stop" else 0.0


def length(completion: str, answer: str) -> float:
    return float(len(completion))


def write_run(folder: Path) -> Path:
    """A model, rows and a config.yaml in `folder`; returns the config's path."""
    from tiny_models import tiny_qwen2
    from tiny_tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_qwen2(vocab_size=len(tokenizer), initializer_range=0.1).save_pretrained(folder / "model")
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "model": {"path": "model", "dtype": "float32"},
        "train": {
            "activation_checkpointing": False,
            "max_tokens_per_microbatch": 160,
            "optimizer": {"lr": 0.01},
        },
        "rollout": {"sampling": {"max_new_tokens": 8}, "sync_bucket_bytes": 20000},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 64},
        "reward": {"terms": {"ascii": {"kind": "tiny_run:ascii_share"}}},
        "loop": {"num_steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4},
        "run": {"folder": str(folder / "runs")},
    }
    (folder / "config.yaml").write_text(json.dumps(config, indent=1))
    return folder / "config.yaml"


def train(config: Path, name: str, *overrides: str, on_step: Callable[[int, Any], None] | None = None) -> Path:
    """Run `meshrl train` in this process. Returns the run's folder."""
    from meshrl.config.load import load_run_config
    from meshrl.run import start
    from meshrl.run.inputs import Objects
    from meshrl.tools.report.page import write_report

    loaded = load_run_config(config, [*overrides, f"run.name={name}"])
    return start.train(loaded, write_report, Objects(on_step=on_step))


def steps_of(folder: Path, without_units: Sequence[str] = ("s", "tokens/s", "GB/s", "bytes")) -> list[dict[str, float]]:
    """The metrics of each step, without times and memory, which differ from run to run."""
    units: dict[str, str] = {}
    steps = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        units |= record.get("units", {})
        if "metrics" in record:
            steps.append(record["metrics"])
    of_times = ("run/train_idle", "run/rollout_idle", "rollout/agent_idle", "perf/")  # ratios of times
    return [
        {k: v for k, v in step.items() if units[k] not in without_units and not k.startswith(of_times)}
        for step in steps
    ]


def read_tokens(path: Path, trajectory: str) -> list[Any]:
    """The TokenValues of each turn of this trajectory, in their order."""
    from meshrl.monitor.token_log import read_token_file

    file = read_token_file(path)
    return [file.turn(name, turn) for name, turn in sorted(file.rows) if name == trajectory] if file else []
