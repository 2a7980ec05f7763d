"""The files of a model folder, and their checks before Transformers reads them: complete, plain data, no larger than
its weights, all of whose values are finite.

Before any data is read, the headers of safetensors files are compared with their files and files with the index: a
truncated, overlapping or missing tensor is a fault that names the file. Nothing outside the folder is opened.
Transformers trusts the folder: it follows an adapter to another model, and builds as many layers as config.json states.
"""

from __future__ import annotations

import math
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshrl.config.model import IMAGE_MODELS, TOWER_REFUSED, unknown_tower
from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, decode, open_plain, parse_json, read_json, size_of
from meshrl.core.unloaded import ParamFault, unloaded_params
from meshrl.parallel.fsdp import local_shard

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
    the index places it in a file that can't be read, or that does not hold it."""
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


_LAYERS = re.compile(r"(n|num)_(\w+_)?(layers?|blocks)")
_SIZES = re.compile(r"(\w+_)?(dim|rank)|(hidden|vocab|intermediate)_size")
_EXPERTS = re.compile(r"(n|num)_(\w+_)?experts")


def check_folder(folder: Path) -> tuple[dict[str, StoredTensor], list[ParamFault]]:
    """Check that a model folder holds plain data of one model, and return its `stored_tensors`."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    config = _json(path)
    if generation.exists():  # Transformers ignores one that it can't read
        _json(generation)
    require_known_tower(folder, config)
    _require_known_class(path, config)
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise ConfigError(
            f"{adapter}: this folder holds an adapter of another model. Merge the two (merge_and_unload) and give the "
            "folder of the merged model"
        )
    if "transformers_weights" in config:
        raise ConfigError(f"{path}: transformers_weights names other weights than {SINGLE}; remove that key")
    stored, faults = stored_tensors(folder)
    if not stored:
        require_fillable(folder, "the model of its config.json", {"files": faults})
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _require_sane_counts(path, part, stored)
    return stored, faults


def require_known_tower(path: str | Path, config: dict[str, Any]) -> None:
    """Raises: ConfigError when the model of this config.json has a tower that meshrl does not train."""
    if (more := unknown_tower(config)) is not None:
        raise ConfigError(f"{path} is {TOWER_REFUSED.format(more=more, path=path)}")


def require_fillable(path: str | Path, model: str, faults: Mapping[str, Sequence[ParamFault]]) -> None:
    """Raise an UnloadedParamsError if there are faults. model: its class. faults: by kind, see _FAULTS."""
    if count := sum(map(len, faults.values())):
        kinds = [kind for kind in _FAULTS if faults.get(kind)]
        raise unloaded_params(
            f"model.path {str(path)!r}: its files don't fill {model}, so nothing was loaded; "
            f"{count} fault{'s' if count > 1 else ''}:",
            [(_FAULTS[kind][0], faults[kind]) for kind in kinds],
            "\n".join(["What to do:", *(f"- {_FAULTS[kind][1]}" for kind in kinds)]),
        )


_FAULTS = {  # kind: title, what to do
    "files": ("files that can't be used", "copy or download these files again"),
    "missing": (
        "parameters that no file holds; they would be left random",
        "names that differ by a prefix, or by joined tensors (qkv_proj), are of another program: load the model there, "
        "and write it by save_pretrained. Without lm_head.weight, tie_word_embeddings=true in config.json makes the "
        "embedding the head, if the model was trained so",
    ),
    "unexpected": (
        "tensors that the model has no parameter for; they would be ignored",
        "remove tensors that the model does not use, such as a head of another task; for layers or experts correct "
        "their number in config.json",
    ),
    "shape": (
        "tensors of another shape than the parameter",
        "correct the size in config.json, such as vocab_size; after resize_token_embeddings, save config.json, too",
    ),
    "dtype": (
        "tensors of another dtype than the parameter",
        "quantized weights can't be trained: give BF16, F16 or F32",
    ),
    "twice": ("tensors that fill a parameter twice", "remove one of the two tensors"),
}


def require_same_size(model: torch.nn.Module, stored: dict[str, StoredTensor], path: str | Path) -> None:
    """Check that the files can fill a model that is still on the meta device."""
    wanted, num_stored = sum(p.numel() for p in model.parameters()), sum(tensor.numel for tensor in stored.values())
    if wanted > num_stored:
        text = f" of {wanted:,} numbers in all; the files hold {num_stored:,}"
        require_fillable(path, type(model).__name__, {"missing": [ParamFault("parameters", text)]})


def loaded_faults(
    info: dict[str, Any], model: torch.nn.Module, stored: dict[str, StoredTensor]
) -> dict[str, list[ParamFault]]:
    """The faults of a model that Transformers has loaded: by its loading info, and integers in place of floating-point
    numbers, which mean damage or quantization."""
    floats = {name for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    return {
        "missing": [ParamFault(name) for name in sorted(info["missing_keys"])],
        "unexpected": [ParamFault(name) for name in sorted(info["unexpected_keys"])],
        "shape": [
            ParamFault(name, f": {list(held)} in the files, {list(wanted)} in the model")
            for name, held, wanted in sorted(info["mismatched_keys"])
        ],
        "dtype": [
            ParamFault(name, f" is stored as {stored[name].kind} in {stored[name].file.name}")
            for name in sorted(floats & stored.keys())
            if not stored[name].kind.startswith(("F", "BF"))
        ],
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except Unreadable as cause:
        raise ConfigError(f"{path}: {cause}. Give a folder made by save_pretrained") from cause


def _require_known_class(path: Path, config: dict[str, Any]) -> None:
    """The code of a class that neither Transformers nor an installed package has could only come from the folder."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind, code = config.get("model_type"), config.get("auto_map")
    if kind in IMAGE_MODELS and kind in CONFIG_MAPPING:
        return
    config_class = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    if config_class is not None:
        if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
            return
        raise ConfigError(
            f"{path}: model_type is {kind!r}, for which Transformers has no causal language model "
            "(AutoModelForCausalLM). Choose a text model"
        )
    own_code = f", and its auto_map names code of its own ({code!r:.120}), which meshrl never runs" if code else ""
    raise ConfigError(
        f"{path}: model_type is {kind!r:.80}, which this Transformers does not know{own_code}. Choose a model whose "
        "class is part of Transformers, or install a Transformers or a package that has it (docs/add_a_model.md)"
    )


def _require_sane_counts(path: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
    """Check that numbers of layers and experts, and sizes, fit the files: Transformers builds or allocates all of them
    before it compares the weights."""
    is_known = all(tensor.kind != UNREADABLE for tensor in stored.values())
    num_stored = sum(tensor.numel for tensor in stored.values()) if is_known else sys.maxsize
    widest = max((size for tensor in stored.values() for size in tensor.shape), default=0)
    for key, value in config.items():
        limits = {_LAYERS: len(stored), _EXPERTS: max(len(stored), widest), _SIZES: num_stored}
        limit = next((limit for pattern, limit in limits.items() if pattern.fullmatch(key)), None)
        if limit is not None and isinstance(value, int) and value > limit:
            raise ConfigError(
                f"{path}: {key} is {value:,}, but the weight files next to it hold {len(stored):,} tensors of "
                f"{num_stored:,} numbers. They are of different models, or config.json is damaged"
            )


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
