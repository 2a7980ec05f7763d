"""The contents of a run's folder, for tests that compare two runs to the bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from meshrl.monitor.rollout_log import read_rollouts


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The model that was written after `step` steps."""
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The training state; each rank's slices have the name of its file as a prefix. The states of random generators
    are left out, because a run draws nothing from them."""
    files = sorted((folder / "checkpoints" / f"step_{step:06d}" / "state").glob("policy_rank_*.safetensors"))
    assert files
    tensors = {f"{path.stem}/{name}": tensor for path in files for name, tensor in load_file(path).items()}
    return {name: tensor for name, tensor in tensors.items() if "/rng." not in name}


def prompt_counts(folder: Path) -> list[Counter[int]]:
    """For each step, how often each prompt was answered, by the prompt's ordinal."""
    paths = sorted((folder / "rollouts").glob("step_*.jsonl"))
    assert [path.name for path in paths] == [f"step_{i:06d}.jsonl" for i in range(1, len(paths) + 1)]
    return [Counter(record.trajectory.prompt.ordinal for record in read_rollouts(path)) for path in paths]


def sampled_turns(folder: Path) -> list[Any]:
    """All turns that were sampled, also in evaluations."""
    return [
        (path.name, r.trajectory.id, t.output_ids.tolist(), t.logprobs.tolist(), t.versions.tolist())
        for path in sorted((folder / "rollouts").glob("*.jsonl"))
        for r in read_rollouts(path)
        for t in r.trajectory.turns
    ]


def assert_equal_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
