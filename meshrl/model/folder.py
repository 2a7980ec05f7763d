"""The checks of a model folder before Transformers reads it: complete, plain data, and no larger than its weights.

Transformers trusts the folder: it follows an adapter to another model, and builds as many layers as config.json states.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, read_json
from meshrl.model.weight_files import SINGLE, StoredTensor, stored_tensors

_LAYERS = re.compile(r"(n|num)_(\w+_)?(layers?|blocks)")
_SIZES = re.compile(r"(\w+_)?(dim|rank)|(hidden|vocab|intermediate)_size")
_NAMED = 5  # tensors named in an error; the rest are counted
_EXPERTS = re.compile(r"(n|num)_(\w+_)?experts")


def check_folder(folder: Path) -> dict[str, StoredTensor]:
    """Check that a model folder holds plain data of one model, and return its tensors by name.

    Raises: ConfigError naming file and key or tensor.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    config = _json(path)
    if generation.exists():  # Transformers ignores one that it can't read
        _json(generation)
    _require_known_class(path, config)
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise ConfigError(
            f"{adapter}: this folder holds an adapter of another model. Merge the two (merge_and_unload) and give the "
            "folder of the merged model"
        )
    if "transformers_weights" in config:
        raise ConfigError(f"{path}: transformers_weights names other weights than {SINGLE}; remove that key")
    stored = stored_tensors(folder)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _require_sane_counts(path, part, stored)
    return stored


def require_same_size(model: torch.nn.Module, stored: dict[str, StoredTensor], path: str | Path) -> None:
    """Check that the files can fill a model that is still on the meta device. Raises: ConfigError."""
    wanted, num_stored = sum(p.numel() for p in model.parameters()), sum(tensor.numel for tensor in stored.values())
    if wanted > num_stored:
        raise ConfigError(
            f"model.path {str(path)!r}: the model of config.json has {wanted:,} parameters, but the weight files hold "
            f"{num_stored:,}. They are of different models, or a file is missing"
        )


def require_all_loaded(info: dict[str, Any], path: str | Path) -> None:
    """Check Transformers' loading info: the files filled every weight of the model, and all their tensors were used.

    Raises: ConfigError naming tensors."""
    for key, problem in (
        ("missing_keys", "lack tensors of the model, which would be left random"),
        ("mismatched_keys", "hold tensors of other shapes than the model's"),
        ("unexpected_keys", "hold tensors that the model of config.json has no place for"),
    ):
        names = sorted(str(name) for name in info.get(key) or ())
        if names:
            shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
            raise ConfigError(
                f"model.path {str(path)!r}: its weight files {problem}: {shown}. Give config.json and weights of "
                "one model"
            )


def require_numbers(model: torch.nn.Module, stored: dict[str, StoredTensor]) -> None:
    """Check that floating-point parameters are stored as floating-point numbers: integers mean damage or quantization.

    Raises: ConfigError naming file and tensor.
    """
    floats = {name for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    for name in sorted(floats & stored.keys()):
        if not stored[name].kind.startswith(("F", "BF")):
            raise ConfigError(
                f"{stored[name].file}: tensor {name} is stored as {stored[name].kind}, where the model has floating-"
                "point numbers; the file is damaged, or it is quantized and can't be trained"
            )


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except Unreadable as cause:
        raise ConfigError(f"{path}: {cause}. Give a folder made by save_pretrained") from cause


def _require_known_class(path: Path, config: dict[str, Any]) -> None:
    """The code of a class that neither Transformers nor an installed package has could only come from the folder."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind, code = config.get("model_type"), config.get("auto_map")
    known = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    if known is not None:
        if known in MODEL_FOR_CAUSAL_LM_MAPPING:
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
    num_stored = sum(tensor.numel for tensor in stored.values())
    widest = max((size for tensor in stored.values() for size in tensor.shape), default=0)
    for key, value in config.items():
        limits = {_LAYERS: len(stored), _EXPERTS: max(len(stored), widest), _SIZES: num_stored}
        limit = next((limit for pattern, limit in limits.items() if pattern.fullmatch(key)), None)
        if limit is not None and isinstance(value, int) and value > limit:
            raise ConfigError(
                f"{path}: {key} is {value:,}, but the weight files next to it hold {len(stored):,} tensors of "
                f"{num_stored:,} numbers. They are of different models, or config.json is damaged"
            )
