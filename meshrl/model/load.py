"""From a folder to a Transformers model that computes our attention. Only this file calls from_pretrained.

`open_causal_lm` returns the model without its values, and where the files hold them: a train rank shards it and then
reads only its own rows. `load_causal_lm` returns the full model. Both refuse a model that we would compute differently.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrl.core.errors import ConfigError
from meshrl.core.files import read_json
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.finite import not_finite, not_finite_error
from meshrl.model.folder import check_folder, require_all_loaded, require_numbers, require_same_size
from meshrl.model.hub_names import HubNames, persistent_buffers, tied_names
from meshrl.model.names import match_names
from meshrl.model.stream import StoredWeights
from meshrl.model.weight_files import INDEX, SINGLE, StoredTensor
from meshrl.parallel.fsdp import reshard, shard_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound=torch.nn.Module)

# Above rounding, below faults. In fp32 other shapes of the same matrix products change a logprob by up to 7e-5 nats
# (mixtures of experts with large logits). A leak between packed rows changes it by more than 1e-2, even in an untrained
# model, which gives all tokens nearly the same probability; an unknown head changes it by more than that.
TOLERANCE_NATS = 2e-3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_causal_lm(path: str | Path) -> tuple[PreTrainedModel, StoredWeights | None]:
    """A Transformers causal LM with attention "meshrl", in fp32, and where the files hold its values. Its buffers are
    ready, on the CPU; its parameters are on the meta device until `materialize` and `StoredWeights.fill` are called.

    If only Transformers can compute the values from the files, returns the complete model on the CPU, and None.

    Raises: ConfigError when the folder holds no model that Transformers knows, or files of another model.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one bar for each rank would break the run's own display
    attention.register()
    folder = Path(path)
    if folder.is_absolute() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path is {str(path)!r}, but it holds no config.json; give a folder made by save_pretrained"
        )
    with _as_config_error(path, AssertionError, ImportError, MemoryError, OSError, RuntimeError):
        folder = _downloaded(path)
        stored = check_folder(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _require_plain_attention(config.get_text_config(), path)
        _require_attention_interface(config, path)
        lm = _skeleton(config, folder)
        quantized = getattr(config, "quantization_config", None) is not None
        names = HubNames(lm)
        found = "it is quantized" if quantized else match_names(lm, stored, names, path)
        if isinstance(found, str):
            if not quantized:  # its files hold fewer numbers, of more than one parameter each
                require_same_size(lm, stored, path)
            if not dist.is_initialized() or dist.get_rank() == 0:
                log = logging.getLogger(__name__)
                log.warning("model.path %r: every rank loads the full model: %s", str(path), found)
            lm = _load_full(stored, folder)
        lm.config.use_cache = False
        _disable_dropout(lm)
    return lm.eval(), None if isinstance(found, str) else StoredWeights(found, names)


def load_causal_lm(path: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A Transformers causal LM on the CPU with attention "meshrl", parameters in `dtype`, buffers untouched.

    Before the cast, our forward scores a short row alone and packed with another, and Transformers' forward scores both
    one by one. A model is refused if its packed rows see each other, or if its attention, its head or its structure is
    not known to meshrl.

    Raises: ConfigError when the folder holds no model that Transformers can load, or one that we compute differently.
    """
    lm, weights = open_causal_lm(path)
    if weights is not None:
        materialize(lm, torch.device("cpu"))
        weights.fill(lm)
    with _as_config_error(path):
        compared = _Comparison(lm)()
    _require_same(compared, lm, path)
    return cast_parameters(lm, dtype)


def require_same_scores(meta_lm: PreTrainedModel, lm: PreTrainedModel, dp_mesh: DeviceMesh, path: str | Path) -> None:
    """The check of `load_causal_lm` for a sharded model (a collective, in fp32 whatever dtype `lm` computes in).
    meta_lm: a `meta_copy` of `lm` that was made before `lm` was sharded; it gets the shards of `lm`, without a copy.

    Raises: ConfigError, as load_causal_lm.
    """
    comparison = _Comparison(meta_lm.eval())
    shard_model(
        comparison,
        list(comparison.model.layers),
        dp_mesh,
        compute_dtype=torch.float32,
        reshard_after_forward=True,
    )
    meta_lm.load_state_dict(lm.state_dict(), assign=True)
    for module, same in zip(meta_lm.modules(), lm.modules(), strict=True):
        module._buffers.update(same._buffers)
    with _as_config_error(path):
        compared = comparison()
    reshard(comparison)
    _require_same(compared, lm, path)


@contextmanager
def _as_config_error(path: str | Path, *more: type[Exception]) -> Iterator[None]:
    """Turn what Transformers and our code raise for a folder without a usable model into a ConfigError."""
    from huggingface_hub.errors import StrictDataclassError

    refused: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, *more)
    try:
        yield
    except (*refused, StrictDataclassError) as cause:  # type: ignore[misc]  # huggingface_hub does not type it
        raise ConfigError(
            f"model.path {str(path)!r} can't be used by meshrl: {type(cause).__name__}: {cause!s:.1000}"
        ) from cause


def _skeleton(config: Any, path: str | Path) -> PreTrainedModel:
    """The model with its parameters on the meta device and its buffers as `from_pretrained` makes them."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.NAME, dtype=torch.float32, trust_remote_code=False
        )
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


def _load_full(stored: dict[str, StoredTensor], folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention.NAME,
        output_loading_info=True,
        use_safetensors=True,
        trust_remote_code=False,
    )
    lm, report = loaded
    require_all_loaded(report, folder)
    require_numbers(lm, stored)
    for name in not_finite(dict(lm.named_parameters()) | persistent_buffers(lm)):
        raise not_finite_error(str(stored[name].file if name in stored else folder), name, torch.float32)
    return lm


def _downloaded(path: str | Path) -> Path:
    """The folder itself, or the folder into which a model of the hub is downloaded."""
    from transformers.utils import cached_file

    if Path(path).is_dir():
        return Path(path)
    folder = _from_hub(path, "config.json").parent
    cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False) is None:
        places = read_json(_from_hub(path, INDEX))["weight_map"]
        for name in sorted({Path(name).name for name in places.values()}):  # check_folder refuses any other path
            cached_file(path, name)
    return folder


def _from_hub(path: str | Path, name: str) -> Path:
    """Raises: OSError, with Transformers' text, when the model of the hub has no such file."""
    from transformers.utils import cached_file

    file = cached_file(path, name)
    assert file is not None
    return Path(file)


def meta_copy(lm: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same buffers and ties, its parameters on the meta device; `lm` itself is not copied."""
    shapes = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in lm.parameters()}
    return copy.deepcopy(lm, shapes)


def materialize(root: torch.nn.Module, device: torch.device) -> None:
    """Memory on `device`, without values yet, for parameters on the meta device, sharded or not.

    `to_empty` alone would lose the values of buffers, and make two tensors of a tied one.
    """
    tied = tied_names(root)
    buffers = [(module, dict(module._buffers)) for module in root.modules()]
    root.to_empty(device=device)
    for module, saved in buffers:
        module._buffers.update({name: b if b is None else b.to(device) for name, b in saved.items()})
    for alias, name in tied.items():
        owner, _, leaf = alias.rpartition(".")
        setattr(root.get_submodule(owner), leaf, root.get_parameter(name))


def _disable_dropout(model: torch.nn.Module) -> None:
    """Scores must be repeatable: old and new logprobs, sampler and trainer, need the same network."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(module, name, 0.0)


class _Compared(NamedTuple):
    """Largest differences of a token's logprobs, in nats, between our forward and Transformers' own: of a row alone and
    of packed rows. layers: the layer of each call of our attention for the row alone."""

    alone: torch.Tensor
    packed: torch.Tensor
    layers: list[int]


class _RecordedAttention(attention.PackedAttention):
    """A single row; records the layer of each call."""

    def __init__(self, num_tokens: int, device: torch.device):
        super().__init__([0, num_tokens], device)
        self.layers: list[int] = []

    def attend(self, layer: int, *args: Any) -> torch.Tensor:
        self.layers.append(layer)
        return super().attend(layer, *args)


class _Comparison(torch.nn.Module):
    """FSDP's root for both forwards, so that both see a sharded model's embedding and head as full tensors."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.model = CausalModel(lm.eval())

    @torch.no_grad()
    def forward(self) -> _Compared:
        model, lm = self.model, self.model.lm
        device = model.head().weight.device
        rows = [(torch.arange(n) * 7 % (model.vocab_size - 1) + 1).to(device) for n in (13, 6)]
        tokens, positions = torch.cat(rows), torch.cat([torch.arange(len(r), device=device) for r in rows])
        packed = attention.PackedAttention([0, len(rows[0]), len(tokens)], device)
        single = _RecordedAttention(len(rows[0]), device)
        ours = self._logprobs(tokens, positions, packed)
        alone = self._logprobs(rows[0], positions[: len(rows[0])], single)
        lm.config._attn_implementation = "eager"  # implemented in every model's own file
        theirs = torch.cat([torch.log_softmax(lm(row[None]).logits[0].float(), dim=-1) for row in rows])
        lm.config._attn_implementation = attention.NAME
        return _Compared((alone - theirs[: len(alone)]).abs().max(), (ours - theirs).abs().max(), single.layers)

    def _logprobs(
        self, tokens: torch.Tensor, positions: torch.Tensor, context: attention.PackedAttention
    ) -> torch.Tensor:
        return torch.log_softmax(self.model.head().logits(self.model.hidden(tokens, positions, context)), dim=-1)


def _require_same(compared: _Compared, lm: PreTrainedModel, path: str | Path) -> None:
    name, alone, packed = f"{type(lm).__name__} of {str(path)!r}", float(compared.alone), float(compared.packed)
    if math.isnan(alone) or math.isnan(packed):
        raise ConfigError(
            f"{name} computes logprobs that are not finite, although its values are: "
            "they are so large that its forward overflows. The run that wrote it may have diverged. Give another model"
        )
    if repeated := sorted({layer for layer in compared.layers if compared.layers.count(layer) > 1}):
        raise ConfigError(
            f"{name} computes attention {compared.layers.count(repeated[0])} times in layer {repeated[0]} for the same "
            "tokens, but a KV cache of meshrl has one key and value of each token in a layer. Choose another model"
        )
    if not alone <= TOLERANCE_NATS:
        raise ConfigError(
            f"{name} gives a single row logprobs that differ by {alone:.2g} nats from Transformers' own forward "
            f"(allowed: {TOLERANCE_NATS:g}): its attention or its head computes something that meshrl does not, such "
            "as attention to later tokens or a position bias. Choose another model"
        )
    if not packed <= TOLERANCE_NATS:
        raise ConfigError(
            f"{name} gives packed rows logprobs that differ by {packed:.2g} nats from Transformers' own forward "
            f"(allowed: {TOLERANCE_NATS:g}), but not a single row: its rows affect each other, or it counts positions "
            "by itself. Choose another model"
        )


def _require_attention_interface(config: Any, path: str | Path) -> None:
    """Raises: ConfigError for a model that computes attention without Transformers' table of attention functions."""
    from transformers import AutoModelForCausalLM

    known, text = AutoModelForCausalLM._model_mapping, type(config.get_text_config())
    code = known[text if text in known else type(config)].__module__  # a model of images has a text model inside
    if not hasattr(sys.modules[code], "ALL_ATTENTION_FUNCTIONS"):
        raise ConfigError(
            f"model.path {str(path)!r} is a {config.model_type}: {code} computes attention by itself (in some models "
            "with a position bias, such as ALiBi), and not through Transformers' attention interface, which meshrl "
            "needs for packed rows and its KV cache. Choose another model"
        )


def _require_plain_attention(config: Any, path: str | Path) -> None:
    """Refuse convolutions and linear attention: packed rows and our KV cache would mix up their states.

    Raises: ConfigError naming the kinds of layers.
    """
    rope = str(getattr(config, "rope_parameters", None) or "")
    for kind in ("dynamic", "longrope"):
        if f"'rope_type': '{kind}'" in rope:
            raise ConfigError(
                f"model.path {str(path)!r} has rope_type {kind}: its positions depend on the longest row of a pack, so "
                "a row's score would depend on its neighbours. Choose a model with another rope_type"
            )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if odd:
        raise ConfigError(
            f"model.path {str(path)!r} is a {config.model_type} with layers of kind {', '.join(odd)}; this version "
            "computes softmax attention only (full_attention, sliding_attention). Choose a model without them"
        )


def cast_parameters(model: M, dtype: torch.dtype) -> M:
    """Cast parameters only: rotary buffers rounded to bf16 are 9.5 rad off at position 8192. Ties are kept."""
    for p in model.parameters():  # yields a tied tensor once
        p.data = p.data.to(dtype)
    return model
