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
from meshrl.model.facts import as_config_error, local_folder
from meshrl.model.folder import INDEX, SINGLE, not_finite, write_tensors
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lora import Adapter, RoundedChange, adapters_of, is_adapter, merged, named_weights
from meshrl.parallel.boxes import LocalBox, boxes, index_of, owners
from meshrl.parallel.exchange import all_gather_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_FILE_BYTES = 256 << 20  # a smaller model is one file: more files would not be faster
_LAYER = re.compile(r".*?\.\d+(?=\.)|.*")  # to the first number; Transformers may join or split tensors of a layer
_COPIED = (  # patterns of the files besides weights and configs that a tokenizer, a processor or a user needs
    *("*token*.json", "*token*.txt", "tokenizer.model*", "*.model", "*.spm", "*.tiktoken", "tekken.json", "*vocab*"),
    *("merges*", "bpe.codes", "chat_template*", "additional_chat_templates/*.jinja", "*processor_config.json"),
    "LICENSE*",
)


@torch.no_grad()
def save_pretrained(
    lm: PreTrainedModel,
    dtype: torch.dtype,
    path: Path,
    tokenizer_from: str | Path | None = None,
    min_file_bytes: int = MIN_FILE_BYTES,
) -> float | None:
    """Write the folder, parameters in `dtype` and LoRA adapters merged (a collective, if there is a process group).
    Each rank receives only the tensors of its own file. Returns the share of the adapters' change that the weights have
    (`RoundedChange`), which is also in the files' metadata; None without adapters, or if they change nothing."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ignored = lm._keys_to_ignore_on_save or ()
    weights = {name: p for name, p in named_weights(lm) if not is_adapter(name) and name not in ignored}
    file_of = assign_files(
        [(name, p.numel() * dtype.itemsize) for name, p in weights.items()], num_ranks, min_file_bytes
    )
    adapters, rounded = adapters_of(lm), RoundedChange(dtype)
    mine = {}
    for name, p in weights.items():
        values = _merged_values(adapters[name], rounded) if name in adapters else attrgetter("tensor")
        full = gathered(p, file_of[name], dtype, values)
        if full is not None:
            mine[name] = full.cpu()
    if rank == 0:
        mine |= {name: buffer.cpu() for name, buffer in persistent_buffers(lm).items() if name not in ignored}
    _require_finite(mine, dtype)
    projection, square = (sum(each) for each in zip(*all_gather_json(rounded.sums())))
    share = projection / square if square else None
    path.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        write_configs(lm, dtype, path, tokenizer_from)
    num_files = 1 + max(file_of.values(), default=0)
    metadata = {} if share is None else {"lora_merged_share": f"{share:.4f}"}
    written = _write(lm, mine, path / _file_name(rank, num_files), metadata) if rank < num_files else {}
    everywhere = all_gather_json(written)  # the folder is complete when this returns
    if rank == 0 and num_files > 1:
        places = {name: _file_name(i, num_files) for i, names in enumerate(everywhere) for name in sorted(names)}
        index = {"metadata": {"total_size": sum(map(sum, map(dict.values, everywhere)))}, "weight_map": places}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
    return share


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


def _merged_values(adapter: Adapter, rounded: RoundedChange) -> Callable[[LocalBox], torch.Tensor]:
    rows_of = merged(adapter, rounded)
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


def write_configs(lm: PreTrainedModel, dtype: torch.dtype, path: Path, tokenizer_from: str | Path | None) -> None:
    """Write all files of the folder except the weights: config.json, generation_config.json, and copies of those of the
    tokenizer. tokenizer_from: a folder or a hub id; None = no copies."""
    config = copy.deepcopy(lm.config)
    config.use_cache = True
    config._attn_implementation = None
    config.dtype = dtype
    config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    for name in config._get_generation_parameters():  # they are in generation_config.json, or it replaces them
        config.__dict__.pop(name, None)
    path.mkdir(parents=True, exist_ok=True)
    with as_config_error(f"{config.name_or_path}/config.json"):
        config.save_pretrained(path)
    # save_pretrained would refuse values that Transformers loads with a warning.
    lm.generation_config.to_json_file(path / "generation_config.json", keys_to_pop=["compile_config"])
    if tokenizer_from is not None:
        folder = local_folder(tokenizer_from, _COPIED)
        for file in {file for pattern in _COPIED for file in folder.glob(pattern) if file.is_file()}:
            to = path / file.relative_to(folder)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, to)


def _write(
    lm: PreTrainedModel, tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]
) -> dict[str, int]:
    """Write one file, with hub names. Returns {hub name: bytes}."""
    from transformers.core_model_loading import revert_weight_conversion

    names = HubNames(lm)
    computed = {name: t for name, t in tensors.items() if name in names.computed}
    named = revert_weight_conversion(lm, computed) if computed else {}
    for name, tensor in tensors.items():
        if name not in computed:
            named |= {hub_name: view for hub_name, _, view in names.split(name, (0,) * tensor.dim(), tensor)}
    write_tensors(named, path, metadata)
    return {name: t.numel() * t.element_size() for name, t in named.items()}


def _file_name(number: int, num_files: int) -> str:
    return SINGLE if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
