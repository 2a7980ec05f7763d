"""From a folder to a Transformers model that computes our attention. The only place that calls from_pretrained.

`open_causal_lm` gives the model without its values, and where these lie: a train rank shards it and then reads its
rows alone. `load_causal_lm` gives it whole. Both refuse what we would compute differently.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrl.core.errors import ConfigError
from meshrl.core.files import read_json
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.folder import check_folder, require_all_loaded, require_numbers, require_same_size
from meshrl.model.hub_names import HubNames, tied_names
from meshrl.model.names import match_names
from meshrl.model.stream import Weights
from meshrl.model.weight_files import INDEX, SINGLE, Stored
from meshrl.parallel.fsdp import reshard, shard_model

# Between rounding and faults. In fp32 other shapes of the same products move a logprob by up to 7e-5 nats (mixtures of
# experts with large logits). A leak from packed neighbours moves it by more than 1e-2, even in a model that has learned
# nothing and gives all tokens nearly the same probability; an unknown head by more than that.
SAME_NATS = 2e-3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_causal_lm(path: str | Path) -> tuple[torch.nn.Module, Weights | None]:
    """A Transformers causal LM with attention "meshrl", in fp32, and where its values lie. Its parameters are on the
    meta device, its buffers on the CPU and right: `materialize` and `Weights.fill` give it the rest.

    Where Transformers has to compute the values from what the files hold, the model comes whole on the CPU, with None.

    Raises: ConfigError when the folder holds no model that Transformers knows, or files that are not this model's.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # as many bars as ranks would tear the run's own display
    attention.register()
    folder = Path(path)
    if folder.is_absolute() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path is {str(path)!r}, but it holds no config.json; give a folder made by save_pretrained"
        )
    with _refusing(path, AssertionError, ImportError, MemoryError, OSError, RuntimeError):
        folder = _fetched(path)
        stored = check_folder(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _require_plain_attention(config.get_text_config(), path)
        lm = _skeleton(config, folder)
        quantised = getattr(config, "quantization_config", None) is not None
        names = HubNames(lm)
        found = "it is quantised" if quantised else match_names(lm, stored, names, path)
        if isinstance(found, str):
            if not quantised:  # its files hold fewer numbers, of more than one parameter each
                require_same_size(lm, stored, path)
            if not dist.is_initialized() or dist.get_rank() == 0:
                logging.getLogger(__name__).warning("model.path %r is loaded whole by every rank: %s", str(path), found)
            lm = _whole(stored, folder)
        lm.config.use_cache = False
        _silence_dropout(lm)
    return lm.eval(), None if isinstance(found, str) else Weights(found, names)


def load_causal_lm(path: str | Path, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A Transformers causal LM on the CPU with attention "meshrl", parameters in `dtype`, buffers untouched.

    Before it is cast, two short rows are scored packed by our forward and one by one by Transformers' own; a model
    whose rows leak, whose head we do not know, or that is built in a way we can't drive is refused here.

    Raises: ConfigError when the folder holds no model that Transformers can load, or one that we compute differently.
    """
    lm, weights = open_causal_lm(path)
    if weights is not None:
        materialize(lm, torch.device("cpu"))
        weights.fill(lm)
    with _refusing(path):
        difference = float(_Comparison(lm)())
    _require_same(difference, lm, path)
    return cast_parameters(lm, dtype)


def require_same_scores(twin: torch.nn.Module, lm: torch.nn.Module, dp_mesh: DeviceMesh, path: str | Path) -> None:
    """What `load_causal_lm` asks of a whole model, asked of a sharded one (a collective, in fp32 whatever `lm`
    computes in). twin: a `meta_copy` of `lm` from before it was sharded; it borrows the shards.

    Raises: ConfigError, as load_causal_lm.
    """
    comparison = _Comparison(twin.eval())
    shard_model(
        comparison,
        list(comparison.model.layers),
        dp_mesh,
        compute_dtype=torch.float32,
        reshard_after_forward=True,
    )
    twin.load_state_dict(lm.state_dict(), assign=True)
    for module, same in zip(twin.modules(), lm.modules(), strict=True):
        module._buffers.update(same._buffers)
    with _refusing(path):
        difference = float(comparison())
    reshard(comparison)
    _require_same(difference, lm, path)


@contextmanager
def _refusing(path: str | Path, *more: type[Exception]) -> Iterator[None]:
    """What Transformers raises for a folder that it, or we, can't make a model of."""
    from huggingface_hub.errors import StrictDataclassError

    known = (ArithmeticError, AttributeError, LookupError, StrictDataclassError, TypeError, ValueError)
    try:
        yield
    except (*known, *more) as cause:
        raise ConfigError(
            f"model.path {str(path)!r} can't be driven by meshrl: {type(cause).__name__}: {cause!s:.1000}"
        ) from cause


def _skeleton(config: Any, path: str | Path) -> torch.nn.Module:
    """The model with parameters on the meta device and buffers as `from_pretrained` makes them."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.NAME, dtype=torch.float32, trust_remote_code=False
        )
    for module in lm.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    for p in lm.parameters():
        p._is_hf_initialized = True  # or initialize_weights would draw random numbers for what is filled later
    lm.initialize_weights()
    try:
        lm.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:  # there is none: config.json may hold its keys
        lm.generation_config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True
        )
    return lm


def _whole(stored: dict[str, Stored], folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    lm, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention.NAME,
        output_loading_info=True,
        use_safetensors=True,
        trust_remote_code=False,
    )
    require_all_loaded(report, folder)
    require_numbers(lm, stored)
    return lm


def _fetched(path: str | Path) -> Path:
    """The folder itself, or that to which a model of the hub is downloaded."""
    from transformers.utils import cached_file

    if Path(path).is_dir():
        return Path(path)
    folder = Path(cached_file(path, "config.json")).parent
    cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False) is None:
        places = read_json(Path(cached_file(path, INDEX)))["weight_map"]
        for name in sorted({Path(name).name for name in places.values()}):  # anything else is refused afterwards
            cached_file(path, name)
    return folder


def meta_copy(lm: torch.nn.Module) -> torch.nn.Module:
    """A copy with the same buffers and ties, its parameters on the meta device; `lm` itself is not copied."""
    shapes = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in lm.parameters()}
    return copy.deepcopy(lm, shapes)


def materialize(root: torch.nn.Module, device: torch.device) -> None:
    """Memory on `device` for parameters on the meta device, sharded or not; their values are to be filled in.

    `to_empty` alone would take the values of buffers away (P10), and make two tensors of a tied one (P11).
    """
    tied = tied_names(root)
    buffers = [(module, dict(module._buffers)) for module in root.modules()]
    root.to_empty(device=device)
    for module, kept in buffers:
        module._buffers.update({name: b if b is None else b.to(device) for name, b in kept.items()})
    for alias, name in tied.items():
        module, _, leaf = alias.rpartition(".")
        setattr(root.get_submodule(module), leaf, root.get_parameter(name))


def _silence_dropout(model: torch.nn.Module) -> None:
    """Scores must be repeatable: old and new logprobs see the same network, and so do sampler and trainer."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(module, name, 0.0)


class _Comparison(torch.nn.Module):
    """A root of its own, so that a sharded model's embedding and head are whole in both of its forwards."""

    def __init__(self, lm: torch.nn.Module):
        super().__init__()
        self.model = CausalModel(lm.eval())

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Largest difference of a token's logprobs, in nats, between our packed forward and Transformers' own."""
        model, lm = self.model, self.model.lm
        device = model.head().weight.device
        rows = [(torch.arange(n) * 7 % (model.vocab_size - 1) + 1).to(device) for n in (13, 6)]
        tokens, places = torch.cat(rows), torch.cat([torch.arange(len(r), device=device) for r in rows])
        packed = attention.PackedAttention([0, len(rows[0]), len(tokens)], device)
        ours = torch.log_softmax(model.head().logits(model.hidden(tokens, places, packed)), dim=-1)
        lm.config._attn_implementation = "eager"  # spelled out in every model's own file
        theirs = torch.cat([torch.log_softmax(lm(row[None]).logits[0].float(), dim=-1) for row in rows])
        lm.config._attn_implementation = attention.NAME
        return (ours - theirs).abs().max()


def _require_same(difference: float, lm: torch.nn.Module, path: str | Path) -> None:
    if not difference <= SAME_NATS:
        raise ConfigError(
            f"{type(lm).__name__} of {str(path)!r} scores tokens {difference:.2g} nats away from Transformers' own "
            f"forward when packed (allowed: {SAME_NATS:g}): its rows see each other, or its head does something that "
            "meshrl does not know. Choose another model"
        )


def _require_plain_attention(config: Any, path: str | Path) -> None:
    """Convolutions and linear attention carry a state that neither packed rows nor our KV cache keep apart.

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


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast parameters only: rotary buffers rounded to bf16 are 9.5 rad off at position 8192 (P10). Ties survive."""
    for p in model.parameters():  # yields a tied tensor once
        p.data = p.data.to(dtype)
    return model
