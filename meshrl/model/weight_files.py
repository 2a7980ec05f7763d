"""The tensors of a model folder by the headers of its safetensors files: position, dtype and shape of each.

Before any data is read, headers are compared with their files and files with the index: a truncated, overlapping or
missing tensor is a fault that names the file. Nothing outside the folder is opened.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, decode, open_plain, parse_json, read_json, size_of
from meshrl.core.unloaded import ParamFault

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
KINDS = {  # torch's dtypes, as safetensors spells them
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
UNREADABLE = ""  # in place of a dtype
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little-endian


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. kind: its dtype, as safetensors spells it. offset: its first byte in the file."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[ParamFault]]:
    """Every tensor of a model folder, by the names in its files, and the faults of the files. A tensor is UNREADABLE if
    the index places it in a file that can't be read, or that does not hold it.
    """
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        other_files = f" but {pickled[0]}, a pickle, which can run code when it is read" if pickled else ""
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX}{other_files}. If you trust its source, write the model by "
            "save_pretrained"
        )
    places = None if (folder / SINGLE).exists() else _by_index(folder)
    tensors, faults, unreadable = dict[str, StoredTensor](), list[ParamFault](), set[Path]()
    for file in sorted(set(places.values())) if places is not None else [folder / SINGLE]:
        try:
            header = _read_header(file)
        except Unreadable as cause:
            faults.append(ParamFault(str(file), f": {cause}"))
            unreadable.add(file)
            continue
        for stored in header:
            other = tensors.setdefault(stored.name, stored)
            if other is not stored:
                faults.append(ParamFault(stored.name, f" is in {other.file.name} and in {file.name}; remove one"))
    for name, file in (places or {}).items():
        if file not in unreadable and (name not in tensors or tensors[name].file != file):
            faults.append(ParamFault(name, f" should be in {file.name} by {INDEX}, but is not"))
        tensors.setdefault(name, StoredTensor(file, name, UNREADABLE, (0,), 0))
    return tensors, faults


def _read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file."""
    with opened(file), open_plain(file) as data:
        length = int.from_bytes(data.read(_LENGTH_BYTES), "little")
        header = parse_json(decode(data.read(length)))
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    return [
        StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    ]


def opened(file: Path) -> Any:
    """The file, opened by safetensors' own reader, which checks its header: known dtypes, shapes that fit the bytes,
    and tensors that cover the file without a gap or an overlap. A context manager."""
    from safetensors import SafetensorError, safe_open

    size = size_of(file)  # refuses a pipe, for which the reader would wait
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as cause:
        raise Unreadable(f"no complete safetensors file ({size:,} bytes): {cause}") from cause


def _by_index(folder: Path) -> dict[str, Path]:
    """Tensor -> its file, by model.safetensors.index.json."""
    path = folder / INDEX
    try:
        index = read_json(path)
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places or not isinstance(index.get("metadata", {}), dict):
            raise Unreadable(f"weight_map should be an object of tensors and files, not {places!r:.80}")
        for name, file in places.items():
            plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
            if not plain:
                raise Unreadable(
                    f"tensor {name} should be in {file!r:.80}, which is no safetensors file of this folder; files "
                    "outside it and pickles (.bin) are never read"
                )
    except Unreadable as cause:
        raise ConfigError(
            f"{path}: {cause}. Copy or download the model folder again, or write it again by save_pretrained"
        ) from cause
    return {name: folder / file for name, file in places.items()}


def write_tensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file of these tensors that Transformers can read, with the mode of other new files."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, file, metadata={"format": "pt"} | (metadata or {})
        )
    except SafetensorError as cause:  # the library's own form of an OSError
        raise OSError(None, str(cause), str(file)) from cause
    file.chmod(mode)  # safetensors lets only the owner read a file
