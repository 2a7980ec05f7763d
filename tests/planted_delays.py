"""Delays for real runs, in the places where a user's code or the system can cause them. A file names the current one,
so that one run can have several in sequence: `write(file, "slow rank", step)`.

The loss is `planted_delays:loss` with the argument `file`; the reward is `planted_delays:reward` with the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from meshrl.algo.losses import LossInputs

DELAYS = {
    "none": "",
    "slow rank": "rank 1 computes longer in its loss",
    "stalled rank": "rank 1 sleeps in its loss",
    "slow link": "each collective of FSDP2 takes longer in all ranks",
    "slow link of a rank": "each collective takes longer in rank 1, after the others have got their data",
    "host stall": "all ranks sleep in the loss",
    "large copy": "the sender of weights copies much memory",
    "slow grader": "the reward function sleeps",
}
DELAY_S = 0.6
_last = ("", "")  # the delay and step of the last call in this process
_is_patched = False


def write(file: Path, delay: str, step: int) -> None:
    new = file.with_suffix(".new")
    new.write_text(f"{delay}:{step}")
    new.replace(file)


def _delay(file: str) -> str:
    return Path(file).read_text().partition(":")[0]


def _is_first(file: str) -> bool:
    """Whether this is the first call of a step."""
    global _last
    delay, _, step = Path(file).read_text().partition(":")
    before, _last = _last, (delay, step)
    return before != _last


def _work(seconds: float) -> None:
    import torch

    matrix, until = torch.ones(200, 200), time.monotonic() + seconds
    while time.monotonic() < until:
        matrix @ matrix


def _patch(file: str) -> None:
    """Delays inside of torch's collectives and of the sender's copies."""
    global _is_patched
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    from meshrl.sync.sender import WeightSender

    if _is_patched:
        return
    _is_patched = True
    for kind in (DefaultAllGather, DefaultReduceScatter):

        def call(self: Any, *args: Any, _original: Any = kind.__call__, **kwargs: Any) -> Any:
            work = _original(self, *args, **kwargs)
            delay = _delay(file)
            if delay == "slow link" or (delay == "slow link of a rank" and dist.get_rank() == 1):
                time.sleep(DELAY_S / 6)
            return work

        kind.__call__ = call

    def fill(self: Any, *args: Any, _original: Any = WeightSender.fill, **kwargs: Any) -> Any:
        if _delay(file) == "large copy":
            import torch

            source, until = torch.ones(4_000_000), time.monotonic() + DELAY_S / 3
            while time.monotonic() < until:
                source.clone()
        return _original(self, *args, **kwargs)

    WeightSender.fill = fill


def loss(inputs: LossInputs, file: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch.distributed as dist

    if Path(file).exists():  # the trial of the loss before the start has no process group
        _patch(file)
        rank = dist.get_rank() if dist.is_initialized() else 0
        if _is_first(file):
            delay = _delay(file)
            if delay == "slow rank" and rank == 1:
                _work(DELAY_S)
            if delay == "host stall" or (delay == "stalled rank" and rank == 1):
                time.sleep(DELAY_S)
    return -inputs.advantages * inputs.logprobs, {}


def reward(completion: str, answer: str, file: str) -> float:
    if Path(file).exists() and _delay(file) == "slow grader":
        time.sleep(DELAY_S / 4)  # of 4 answers
    return sum(c.isascii() for c in completion) / max(1, len(completion))
