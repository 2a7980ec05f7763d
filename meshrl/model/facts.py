"""What a model's folder determines before a value is read: its class and modules, and where its files hold the values.

Only this file calls from_pretrained.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshrl.config.model import IMAGE_MODELS
from meshrl.core.errors import ConfigError
from meshrl.core.files import read_json
from meshrl.model import attention
from meshrl.model.folder import (
    INDEX,
    SINGLE,
    StoredTensor,
    check_folder,
    loaded_faults,
    not_finite,
    not_finite_error,
    require_fillable,
    require_same_size,
)
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.limits import import_plugins
from meshrl.model.parts import Parts, parts_of, text_attention
from meshrl.model.state_layers import ATTENTION_KINDS, layer_kinds, require_known_layers
from meshrl.model.stream import LoadedWeights, StoredWeights, match_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """path: the value of model.path. lm: a Transformers causal LM with attention "meshrl", whose parameters are on the
    meta device in fp32, and whose buffers are ready on the CPU; it has the class, the blocks, the head and the ties of
    the model, and is never changed. weights: fills a model with its values. parts: by name."""

    path: str
    lm: PreTrainedModel
    weights: StoredWeights | LoadedWeights
    parts: Parts


def model_facts(path: str | Path, implementation: str = "auto") -> ModelFacts:
    """Read config.json and the headers of the weight files. If only Transformers can compute the values from the files,
    the full model is loaded into host memory."""
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    import_plugins()
    transformers_logging.disable_progress_bar()  # one bar for each rank would break the run's own display
    attention.register()
    require_config(path)
    weights: StoredWeights | LoadedWeights
    with as_config_error(path, AssertionError, ImportError, MemoryError, OSError, RuntimeError):
        folder = _downloaded(path)
        stored, faults = check_folder(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _require_attention_interface(config, path)
        name = text_attention(config.model_type, implementation)
        lm = _skeleton(config, folder, name)
        require_known_layers(lm, path)
        quantized = getattr(config, "quantization_config", None) is not None
        names = HubNames(lm)
        if quantized:
            require_fillable(path, type(lm).__name__, {"files": faults})
        matched = "it is quantized" if quantized else match_names(lm, stored, names, path, faults)
        if isinstance(matched, str):
            if not quantized:  # its files hold fewer numbers, of more than one parameter each
                require_same_size(lm, stored, path)
            if not dist.is_initialized() or dist.get_rank() == 0:
                log = logging.getLogger(__name__)
                log.warning("model.path %r: every rank loads the full model: %s", str(path), matched)
            full = _load_full(config, stored, folder, name)
            lm, weights = meta_copy(full), LoadedWeights(full)
        else:
            weights = StoredWeights(matched, names)
        lm = _with_own_attention(lm, implementation)
        parts = parts_of(lm)
    return ModelFacts(str(path), lm, weights, parts)


def require_config(path: str | Path) -> None:
    """Raises: ConfigError for a folder without config.json, which Transformers would take for a model of the hub."""
    folder = Path(path)
    if (folder.is_absolute() or folder.is_dir()) and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path is {str(path)!r}, but it holds no config.json; give a folder made by save_pretrained"
        )


@contextmanager
def as_config_error(path: str | Path, *more: type[Exception]) -> Iterator[None]:
    """Turn what Transformers and our code raise for a folder without a usable model into a ConfigError."""
    from huggingface_hub.errors import StrictDataclassError

    refused: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, *more)
    try:
        yield
    except (*refused, StrictDataclassError) as cause:  # type: ignore[misc]  # huggingface_hub does not type it
        raise ConfigError(
            f"model.path {str(path)!r} can't be used by meshrl: {type(cause).__name__}: {cause!s:.1000}"
        ) from cause


def auto_class(config: Any) -> Any:
    """Transformers' class that builds the model of a config: with its tower, if it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_tower = getattr(config, "vision_config", None) is not None and config.model_type in IMAGE_MODELS
    return AutoModelForImageTextToText if has_tower else AutoModelForCausalLM


def unfilled(config: Any, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with initial values, and this attention; that of a tower is Transformers' own."""
    attn = _of_parts(config, name)
    return auto_class(config).from_config(config, attn_implementation=attn, dtype=dtype, trust_remote_code=False)


def without_values(config: Any, implementation: str, dtype: torch.dtype) -> Any:
    """A model as meshrl computes it, of a config alone; call it where tensors have no values, since none is useful."""
    attention.register()
    return _with_own_attention(
        unfilled(config, text_attention(config.model_type, implementation), dtype), implementation
    )


def _with_own_attention(lm: Any, implementation: str) -> Any:
    if lm.config.model_type in attention.OWN_CODE:
        from meshrl.model.own_attention import use_context_attention

        use_context_attention(lm, implementation)
    lm.config.use_cache = False
    _disable_dropout(lm)
    return lm.eval()


def _of_parts(config: Any, name: str) -> str | dict[str, str]:
    return name if config.get_text_config() is config else {"text_config": name}


def _skeleton(config: Any, path: str | Path, name: str) -> PreTrainedModel:
    """The model with its parameters on the meta device and its buffers as `from_pretrained` makes them."""
    from transformers import GenerationConfig

    with torch.device("meta"):
        lm = unfilled(config, name)
    for module in lm.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    for p in lm.parameters():
        p._is_hf_initialized = True  # else initialize_weights would draw random numbers for it
    lm.initialize_weights()
    try:
        lm.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:  # no generation_config.json: config.json may hold its keys
        lm.generation_config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True
        )
    return lm


def _load_full(config: Any, stored: dict[str, StoredTensor], folder: Path, name: str) -> PreTrainedModel:
    loaded: Any = auto_class(config).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=_of_parts(config, name),
        output_loading_info=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are in the report
        trust_remote_code=False,
    )
    lm, report = loaded
    require_fillable(folder, type(lm).__name__, loaded_faults(report, lm, stored))
    for name in not_finite(dict(lm.named_parameters()) | persistent_buffers(lm)):
        raise not_finite_error(str(stored[name].file if name in stored else folder), name, torch.float32)
    return lm


def text_model(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """The language model of a folder with a tower, as a model of its own class. dtype: None = as in the folder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    with as_config_error(folder, ImportError, OSError, RuntimeError):
        transformers_logging.disable_progress_bar()
        full: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=False
        )
        decoder, config = full.get_decoder(), full.config.get_text_config()
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"Transformers has no causal language model for its {type(config).__name__}")
        with torch.device("meta"):
            text: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if type(decoder) is not type(text.base_model):
            raise TypeError(f"its text model is a {type(decoder).__name__}, which {type(text).__name__} does not have")
        setattr(text, text.base_model_prefix, decoder)
        text.set_output_embeddings(full.get_output_embeddings())
        text.generation_config = full.generation_config
    return text


def local_folder(path: str | Path, names: Sequence[str]) -> Path:
    """The folder itself, or for a hub id that in the hub's cache, with all files of these names or patterns."""
    from huggingface_hub import snapshot_download

    return Path(path) if Path(path).is_dir() else Path(snapshot_download(str(path), allow_patterns=[*names]))


def _downloaded(path: str | Path) -> Path:
    """The folder itself, or the folder into which a model of the hub is downloaded."""
    folder = local_folder(path, ["config.json", "generation_config.json", INDEX])
    if Path(path).is_dir() or not (folder / INDEX).is_file():
        return local_folder(path, [SINGLE])
    return local_folder(path, sorted({Path(name).name for name in read_json(folder / INDEX)["weight_map"].values()}))


def meta_copy(lm: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same buffers and ties, its parameters on the meta device; `lm` itself is not copied."""
    shapes = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in lm.parameters()}
    return copy.deepcopy(lm, shapes)


def _disable_dropout(model: torch.nn.Module) -> None:
    """Scores must be repeatable: old and new logprobs, sampler and trainer, need the same network."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(module, name, 0.0)


def _require_attention_interface(config: Any, path: str | Path) -> None:
    """Raises: ConfigError for a model that computes attention without Transformers' table of attention functions."""
    from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

    mapping, text_config = AutoModelForCausalLM._model_mapping, config.get_text_config()
    if type(text_config) not in mapping:
        mapping = AutoModel._model_mapping  # some text models exist inside of models of images alone
    model: Any = mapping[type(text_config)]
    code = model.__module__
    own = model.__mro__[: model.__mro__.index(PreTrainedModel)]  # a class of a plugin may inherit its attention
    asks = any(hasattr(sys.modules[base.__module__], "ALL_ATTENTION_FUNCTIONS") for base in own)
    kinds = set(layer_kinds(text_config))
    has_attention = not kinds or kinds & ATTENTION_KINDS
    if has_attention and config.model_type not in attention.OWN_CODE and not asks:
        raise ConfigError(
            f"model.path {str(path)!r} is a {config.model_type}: {code} computes attention by itself (in some models "
            "with a position bias, such as ALiBi), and not through Transformers' attention interface, which meshrl "
            "needs for packed rows and its KV cache. Choose another model"
        )
