"""Which tensors contain a value that is not finite: NaN, an infinity, or out of the range of a dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from meshrl.core.errors import ConfigError
from meshrl.parallel.fsdp import local_shard


@torch.no_grad()
def not_finite(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> list[str]:
    """The names of the tensors of which this rank's shard has NaN, or a value that is infinite in `dtype`.

    Integers, bools and float8 numbers (which need a scale) are not checked. One pass over the values, and one
    synchronization with the device for all tensors.
    """
    shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
    checked = {name: t for name, t in shards.items() if t.is_floating_point() and t.element_size() > 1 and t.numel()}
    if not checked:
        return []
    values = list(checked.values())
    # Both propagate NaN. On the CPU aminmax takes a twentieth of the time of an infinity norm; on an accelerator all
    # norms take one launch.
    on_cpu = values[0].device.type == "cpu"
    ends = [end for t in values for end in torch.aminmax(t)] if on_cpu else torch._foreach_norm(values, math.inf)
    extremes = torch.stack([end.float() for end in ends]).abs().view(len(values), -1)
    fits = (extremes <= torch.finfo(dtype).max).all(1).tolist()
    return [name for name, does_fit in zip(checked, fits, strict=True) if not does_fit]


def not_finite_error(source: str, name: str, dtype: torch.dtype) -> ConfigError:
    """The error for a tensor of a model's folder. source: its file, or the folder if the file is not known."""
    kind = str(dtype).removeprefix("torch.")
    return ConfigError(
        f"{source}: tensor {name} contains NaN, an infinity, or a value outside the range of {kind} (largest: "
        f"{torch.finfo(dtype).max:g}), so the model can't be used. The file is damaged, or the run that wrote it had "
        "diverged. Give another model"
    )
