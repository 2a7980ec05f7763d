"""The training state of a role in one rank, as tensors by name: a checkpoint holds it, a resume restores it to the bit.

model.NAME               parameters in their master dtype; with LoRA only the adapters, since the rest never changes
buffer.NAME              buffers that belong to a model's files, such as a router's correction bias
optimizer.SLOT.NAME      the optimizer's state of a parameter: step, exp_avg, exp_avg_sq, and in 8 bits their scales
gradient.NAME            only in a replay, which saves between a gradient and its optimizer step; not loaded
lora.base                int64[2], with LoRA: a digest of all frozen parameters, and the bits of the adapters' scale
reference.base.DTYPE     int64[], with a reference model: a digest of all its parameters, which has this compute dtype
counters                 int64[2]: optimizer steps, steps skipped in a row
rng.RANK.DEVICE          states of the rank's torch generators; a rank without saved states keeps its current ones
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from meshrl.core.device import generator_states, set_generator_state
from meshrl.core.errors import CheckpointError
from meshrl.model.hub_names import persistent_buffers
from meshrl.model.lora import adapters_of, is_adapter, named_weights, trained_weights
from meshrl.parallel.boxes import LocalBox, boxes, element_keys, replica
from meshrl.parallel.fsdp import local_shard
from meshrl.plan.decisions import moment_bytes
from meshrl.sync.digest import bits_of
from meshrl.train.checkpoint import SavedTensors, Tensors
from meshrl.train.optim import AdamW

Counters = tuple[int, int]
NO_TENSORS: Tensors = {}
_BASE, GRADIENT = "lora.base", "gradient."
_DIGEST_ELEMENTS = 1 << 18  # at a time: their bits as int64 stay in a core's cache
# Frozen parameters never change, so their digest is computed once, before their memory is released.
_base_digests: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def state_tensors(
    lm: torch.nn.Module, optimizer: torch.optim.Optimizer | None, counters: Counters, device: torch.device
) -> dict[str, torch.Tensor]:
    """The full state of this rank, as views of the engine's tensors: copy them before the next optimizer step. That of
    a run with a reference model has also its `reference_digest`."""
    tensors = _model_tensors(lm) | base_digest(lm)
    for name, p in trained_weights(lm).items():
        if p.grad is not None:
            tensors[f"{GRADIENT}{name}"] = p.grad
        for slot, value in (optimizer.state.get(p, {}) if optimizer else {}).items():
            tensors[f"optimizer.{slot}.{name}"] = value
    tensors["counters"] = torch.tensor(counters)
    for kind, rng in generator_states(device).items():
        tensors[f"rng.{dist.get_rank()}.{kind}"] = rng
    return tensors


def load_state(
    folder: Path,
    role: str,
    lm: torch.nn.Module,
    optimizer: AdamW | None,
    device: torch.device,
    reference: Tensors = NO_TENSORS,
) -> Counters:
    """Fill the model of a role and its optimizer in place, and set the generators (a collective). Returns the counters.
    If it fails, nothing is changed."""
    saved = SavedTensors(folder, role)
    tensors, counters = _model_tensors(lm), torch.zeros(2, dtype=torch.int64)
    theirs, own = _adapters_in(saved.entries), _adapters_in(tensors)
    if theirs and own and theirs != own:
        other = min(theirs ^ own).removeprefix("model.")
        raise CheckpointError(
            f"{folder} holds adapters of other layers than the model has (the first difference is {other}): "
            "model.lora.targets or model.path is not what they were trained with; restore it"
        )
    for name in saved.entries:
        if name.startswith(("model.", "buffer.")) and name not in tensors:
            lora = "; model.lora.enabled has changed, too" if bool(base_digest(lm)) != (_BASE in saved.entries) else ""
            raise CheckpointError(
                f"{folder} holds {name}, which this model does not have; it is of another model{lora}"
            )
    _require_same_base(saved, folder, base_digest(lm) | dict(reference))
    states = _saved_states(saved, lm, optimizer)
    tensors |= {f"optimizer.{slot}.{name}": t for name, state in states.items() for slot, t in state.items()}
    generators = {f"rng.{dist.get_rank()}.{kind}": rng for kind, rng in generator_states(device).items()}
    mine = {name: rng for name, rng in generators.items() if name in saved.entries}
    saved.load({**tensors, **mine, "counters": counters})
    for name, rng in mine.items():
        set_generator_state(name.rpartition(".")[2], rng)
    if optimizer:
        optimizer.state.update({p: states[name] for name, p in trained_weights(lm).items() if name in states})
    steps, skipped = counters.tolist()
    return steps, skipped


def _saved_states(
    saved: SavedTensors, lm: torch.nn.Module, optimizer: AdamW | None
) -> dict[str, dict[str, torch.Tensor]]:
    """Empty states of the parameters that have one in the checkpoint."""
    slots: dict[str, set[str]] = {}
    for _, slot, name in (key.split(".", 2) for key in saved.entries if key.startswith("optimizer.")):
        slots.setdefault(name, set()).add(slot)
    parameters = trained_weights(lm) if optimizer else {}
    states = {name: optimizer.empty_state(p) for name, p in parameters.items() if name in slots}  # type: ignore[union-attr]
    for name, state in states.items():
        if state.keys() != slots[name]:
            raise CheckpointError(
                f"{saved.folder} holds {', '.join(sorted(slots[name]))} of {name}, but this optimizer has "
                f"{', '.join(sorted(state))}: train.optimizer.kind has changed. Restore it, or start a new run from "
                "the model of this one"
            )
    return states


def load_model(folder: Path, role: str, lm: torch.nn.Module) -> None:
    """Fill an unsharded model of a role in one process, without a process group."""
    saved = SavedTensors(folder, role)
    _require_same_base(saved, folder, base_digest(lm))
    saved.load(_model_tensors(lm))


def unequal_tensor(folder: Path, role: str, lm: torch.nn.Module, dtype: torch.dtype) -> str | None:
    """The first parameter of this unsharded float32 model that is not the one in the state, rounded to `dtype`."""
    saved = SavedTensors(folder, role)
    for name, p in lm.named_parameters():
        entry = saved.entries.get(f"model.{name}")
        theirs = torch.empty(() if entry is None else entry.shape, dtype=None if entry is None else entry.dtype)
        saved.load({f"model.{name}": theirs})
        if not torch.equal(theirs.to(dtype).float(), p):
            return name
    return None


def state_bytes(lm: torch.nn.Module, optimizer: AdamW | None) -> int:
    """Bytes of this rank's share of a checkpoint after the first optimizer step, without headers."""
    is_8bit = optimizer is not None and optimizer.is_8bit
    own = [(p, local_shard(p)) for p in trained_weights(lm).values() if replica(p)[0] == 0]
    moments = [moment_bytes(shard.shape, p.numel(), p.element_size(), is_8bit) for p, shard in own if p.requires_grad]
    return sum(shard.nbytes for _, shard in own) + sum(moments) * (optimizer is not None)


def _model_tensors(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": p.detach() for name, p in trained_weights(lm).items()}
    return tensors | {f"buffer.{name}": b for name, b in persistent_buffers(lm).items()}


def base_digest(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The entry `lora.base`, which identifies the base model; empty for a model without adapters (a collective, if
    there is a process group)."""
    adapters = adapters_of(lm)
    if not adapters:
        return {}
    scale = torch.tensor(next(iter(adapters.values())).scale, dtype=torch.float64).view(torch.int64)
    return {_BASE: torch.stack([_frozen_digest(lm), scale])}


def reference_digest(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The entry `reference.base.DTYPE` of a reference model (a collective)."""
    dtype = str(next(iter(lm.parameters())).dtype).removeprefix("torch.")
    return {f"reference.base.{dtype}": _frozen_digest(lm)}


def _frozen_digest(lm: torch.nn.Module) -> torch.Tensor:
    """The digest of all frozen parameters, independent of the sharding (a collective, as `base_digest`)."""
    if lm in _base_digests:
        return _base_digests[lm]
    total = torch.zeros((), dtype=torch.int64)
    for name, p in named_weights(lm):
        if not is_adapter(name) and replica(p)[0] == 0:
            factor = 2 * zlib.crc32(name.encode()) + 1  # odd, so that swapped tensors change the sum
            for local in boxes(p):
                total = total + box_digest(local) * factor
    if dist.is_initialized():
        dist.all_reduce(total)
    _base_digests[lm] = total
    return total


def box_digest(local: LocalBox) -> torch.Tensor:
    """int64[]: the sum over all elements of bits times a key of the element's index in the tensor. So the digests of
    the boxes of a tensor add up to its digest for any sharding. It detects accidents, not attacks."""
    values = local.tensor
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.view(1, 1)
    row_keys, keys = element_keys(local)
    step = max(1, _DIGEST_ELEMENTS // rows.shape[1])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part, part_keys in zip(rows.split(step), row_keys.split(step), strict=True):
        total += ((bits_of(part.contiguous()).long() * keys).sum(1) * part_keys).sum()
    return total.cpu()


def _adapters_in(entries: Iterable[str]) -> set[str]:
    return {name for name in entries if name.startswith("model.") and is_adapter(name)}


def _require_same_base(saved: SavedTensors, folder: Path, digests: Tensors) -> None:
    """Adapters fit only the base model that they were trained with, and a KL term only one reference model."""
    for name, mine in digests.items():
        if name not in saved.entries:
            continue
        theirs = torch.zeros_like(mine)
        saved.load({name: theirs})
        if torch.equal(mine, theirs):
            continue
        if name != _BASE:
            raise CheckpointError(
                f"{folder} was trained with another reference model: the weights in model.path have changed since, and "
                "algo.kl.coef is above 0. Restore them, set algo.kl.coef=0, or start a new run (run.resume=never) from "
                "a model of this one, which is then the reference"
            )
        changed = "model.lora.alpha" if mine[0] == theirs[0] else "the model in model.path, or model.dtype,"
        raise CheckpointError(f"{folder} holds adapters, and {changed} is not what they were trained with; restore it")
