"""From a sharded model to a folder that `from_pretrained` loads; each rank writes one file, all at the same time."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshrl.core.errors import CheckpointError
from meshrl.model.finite import not_finite
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lora import Adapter, adapters_of, is_adapter, merged, named_weights
from meshrl.model.weight_files import INDEX, SINGLE, write_tensors
from meshrl.parallel.boxes import LocalBox, boxes, index_of, owners
from meshrl.parallel.gather import all_gather_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_FILE_BYTES = 256 << 20  # a smaller model is one file: more files would not be faster
_LAYER = re.compile(r".*?\.\d+(?=\.)|.*")  # to the first number; Transformers may join or split tensors of a layer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
)


@torch.no_grad()
def save_pretrained(
    lm: PreTrainedModel,
    dtype: torch.dtype,
    path: Path,
    tokenizer_from: str | Path | None = None,
    min_file_bytes: int = MIN_FILE_BYTES,
) -> None:
    """Write the folder, parameters in `dtype` and LoRA adapters merged (a collective, if there is a process group).
    Each rank receives only the tensors of its own file.

    Raises: CheckpointError on every rank, before anything is written, when a value is not finite in `dtype`.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ignored = lm._keys_to_ignore_on_save or ()
    weights = {name: p for name, p in named_weights(lm) if not is_adapter(name) and name not in ignored}
    file_of = assign_files(
        [(name, p.numel() * dtype.itemsize) for name, p in weights.items()], num_ranks, min_file_bytes
    )
    adapters = adapters_of(lm)
    mine = {}
    for name, p in weights.items():
        values = _merged_values(adapters[name]) if name in adapters else attrgetter("tensor")
        full = gathered(p, file_of[name], dtype, values)
        if full is not None:
            mine[name] = full.cpu()
    if rank == 0:
        mine |= {name: buffer.cpu() for name, buffer in persistent_buffers(lm).items() if name not in ignored}
    _require_finite(mine, dtype)
    path.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        _model_without_weights(lm, dtype).save_pretrained(path, state_dict={})  # config.json and generation_config.json
        _copy_tokenizer(tokenizer_from, path)
    if dist.is_initialized():
        dist.barrier()  # before any rank writes: save_pretrained removes other weight files
    num_files = 1 + max(file_of.values(), default=0)
    written = _write(lm, mine, path / _file_name(rank, num_files)) if rank < num_files else {}
    everywhere = all_gather_json(written)  # the folder is complete when this returns
    if rank == 0 and num_files > 1:
        _write_index(path, everywhere, num_files)
    if dist.is_initialized():
        dist.barrier()


def _require_finite(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raises: CheckpointError on every rank when any rank has a tensor with a value that is not finite."""
    bad = [name for names in all_gather_json(not_finite(tensors)) for name in names]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        kind = f"{str(dtype).removeprefix('torch.')} (largest: {torch.finfo(dtype).max:g})"
        raise CheckpointError(
            f"the model is not written: {bad[0]}{more} has values that are not finite in {kind}. If the "
            "training has diverged, continue from an earlier checkpoint with a lower train.optimizer.lr; if only the "
            "range is too small, set model.dtype=bfloat16"
        )


def _merged_values(adapter: Adapter) -> Callable[[LocalBox], torch.Tensor]:
    rows_of = merged(adapter)
    return lambda local: rows_of(local.tensor, local.box, range(local.tensor.dim()))(0, len(local.tensor))


def gathered(
    tensor: torch.Tensor, root: int, dtype: torch.dtype, values: Callable[[LocalBox], torch.Tensor]
) -> torch.Tensor | None:
    """The full tensor on rank `root`, None elsewhere (a collective, if the tensor is sharded): each rank casts the
    `values` of its boxes to `dtype` and sends them to the root only."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not isinstance(tensor, DTensor):
        return values(LocalBox((0,) * tensor.dim(), tensor.detach())).to(dtype) if rank == root else None
    holders = owners(tensor, root)
    own = [values(local).to(dtype) for local in boxes(tensor)] if rank in holders else []
    if rank != root:
        if own:
            dist.send(torch.cat([part.reshape(-1) for part in own]).view(torch.uint8), root)
        return None
    full = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    for holder, boxes_of_holder in holders.items():
        if not boxes_of_holder:
            continue
        sizes, parts = [prod(shape) for _, shape in boxes_of_holder], own
        if holder != root:
            flat = torch.empty(sum(sizes), dtype=dtype, device=tensor.device)
            dist.recv(flat.view(torch.uint8), holder)
            parts = list(flat.split(sizes))
        for box, part in zip(boxes_of_holder, parts, strict=True):
            full[index_of(box)] = part.view(box[1])
    return full


def assign_files(sizes: Sequence[tuple[str, int]], num_ranks: int, min_file_bytes: int) -> dict[str, int]:
    """Tensor -> number of its file: complete layers, about the same bytes in each file, at most one file a rank."""
    total = sum(size for _, size in sizes)
    num_files = max(1, min(num_ranks, total // max(1, min_file_bytes)))
    file_of: dict[str, int] = {}
    before = 0
    for _, members in groupby(sizes, key=lambda entry: _LAYER.match(entry[0])[0]):  # type: ignore[index]
        layer = list(members)
        number = min(num_files - 1, before * num_files // max(1, total))
        file_of |= dict.fromkeys((name for name, _ in layer), number)
        before += sum(size for _, size in layer)
    numbers = {number: i for i, number in enumerate(sorted(set(file_of.values())))}  # a huge layer may skip a number
    return {name: numbers[number] for name, number in file_of.items()}


def _model_without_weights(lm: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the same class on the meta device, with the config to be written."""
    config = copy.deepcopy(lm.config)
    config.use_cache = True
    config._attn_implementation = None
    config.dtype = dtype  # save_pretrained writes this model's dtype into config.json
    with torch.device("meta"):
        empty = type(lm)._from_config(config)
    empty.generation_config = lm.generation_config
    return empty


def _write(lm: PreTrainedModel, tensors: dict[str, torch.Tensor], path: Path) -> dict[str, int]:
    """Write one file, with hub names. Returns {hub name: bytes}."""
    from transformers.core_model_loading import revert_weight_conversion

    names = HubNames(lm)
    computed = {name: t for name, t in tensors.items() if name in names.computed}
    named = revert_weight_conversion(lm, computed) if computed else {}
    for name, tensor in tensors.items():
        if name not in computed:
            named |= {hub_name: view for hub_name, _, view in names.split(name, (0,) * tensor.dim(), tensor)}
    write_tensors(named, path)
    return {name: t.numel() * t.element_size() for name, t in named.items()}


def _file_name(number: int, num_files: int) -> str:
    return SINGLE if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def _write_index(path: Path, written: Sequence[dict[str, int]], num_files: int) -> None:
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in written)},
        "weight_map": {name: _file_name(i, num_files) for i, names in enumerate(written) for name in sorted(names)},
    }
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(tokenizer_from: str | Path | None, path: Path) -> None:
    if tokenizer_from is None:
        return
    for name in TOKENIZER_FILES:
        if (Path(tokenizer_from) / name).is_file():
            shutil.copy(Path(tokenizer_from) / name, path / name)
