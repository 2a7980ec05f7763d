"""From a sharded model to a folder that `from_pretrained` loads; the ranks write a file each, at the same time."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

MIN_FILE_BYTES = 256 << 20  # a model below this is one file: more of them would gain nothing
_LAYER = re.compile(r"(.*?\.\d+)\.")  # up to the first number: the tensors that Transformers may fuse or cut lie below
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


def save_pretrained(
    lm: torch.nn.Module,
    sizes: Sequence[tuple[str, int]],
    weights: Iterable[tuple[str, torch.Tensor]],
    buffers: dict[str, torch.Tensor],
    path: Path,
    tokenizer_from: str | Path | None = None,
    min_file_bytes: int = MIN_FILE_BYTES,
) -> None:
    """Write the folder (a collective, where there is a process group). lm: for its config and class; sizes: (name,
    bytes) of each tensor, in the order in which weights gives them, whole, on every rank."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    path.mkdir(parents=True, exist_ok=True)
    file_of = spread(sizes, num_ranks, min_file_bytes)
    # What is not of this rank's file is dropped at once, so each holds its own share in host memory.
    mine = {name: tensor.cpu().contiguous() for name, tensor in weights if file_of[name] == rank}
    dtype = next(iter(mine.values())).dtype if mine else torch.float32
    shell = _shell(lm, dtype)
    if rank == 0:
        mine |= {name: buffer.cpu() for name, buffer in buffers.items()}
        shell.save_pretrained(path, state_dict={})  # config.json and generation_config.json
        _copy_tokenizer(tokenizer_from, path)
    if dist.is_initialized():
        dist.barrier()  # save_pretrained removes files of weights that it does not know
    num_files = 1 + max(file_of.values(), default=0)
    written = _write(shell, mine, path / _file_name(rank, num_files)) if rank < num_files else {}
    if dist.is_initialized():
        everywhere: list[dict[str, int]] = [{} for _ in range(num_ranks)]
        dist.all_gather_object(everywhere, written)  # the folder is whole when this returns
    else:
        everywhere = [written]
    if rank == 0 and num_files > 1:
        _write_index(path, everywhere, num_files)
    if dist.is_initialized():
        dist.barrier()


def spread(sizes: Sequence[tuple[str, int]], num_ranks: int, min_file_bytes: int) -> dict[str, int]:
    """Tensor -> number of its file: runs of whole layers with about the same bytes, at most one file a rank."""
    total = sum(size for _, size in sizes)
    num_files = max(1, min(num_ranks, total // max(1, min_file_bytes)))
    file_of, before = {}, 0
    for _, members in groupby(sizes, key=lambda entry: _layer_of(entry[0])):
        layer = list(members)
        number = min(num_files - 1, before * num_files // max(1, total))
        file_of |= dict.fromkeys((name for name, _ in layer), number)
        before += sum(size for _, size in layer)
    numbers = {number: i for i, number in enumerate(sorted(set(file_of.values())))}  # a huge layer may skip one
    return {name: numbers[number] for name, number in file_of.items()}


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[1] if found else name


def _shell(lm: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model's class with the config to be written, without weights."""
    config = copy.deepcopy(lm.config)
    config.use_cache = True
    config._attn_implementation = None
    config.dtype = dtype  # save_pretrained writes the shell's dtype into config.json
    with torch.device("meta"):
        shell = type(lm)._from_config(config)
    shell.generation_config = lm.generation_config
    return shell


def _write(shell: torch.nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> dict[str, int]:
    """One file, under the names that Transformers' files have; name -> bytes."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    kept = {name: t for name, t in tensors.items() if name not in (shell._keys_to_ignore_on_save or ())}
    named = {name: t.contiguous() for name, t in revert_weight_conversion(shell, kept).items()}
    save_file(named, path, metadata={"format": "pt"})
    return {name: t.numel() * t.element_size() for name, t in named.items()}


def _file_name(number: int, num_files: int) -> str:
    return "model.safetensors" if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def _write_index(path: Path, written: Sequence[dict[str, int]], num_files: int) -> None:
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in written)},
        "weight_map": {name: _file_name(i, num_files) for i, names in enumerate(written) for name in sorted(names)},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(tokenizer_from: str | Path | None, path: Path) -> None:
    for name in TOKENIZER_FILES if tokenizer_from is not None else ():
        if (Path(tokenizer_from) / name).is_file():
            shutil.copy(Path(tokenizer_from) / name, path / name)
