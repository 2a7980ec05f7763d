"""LoRA adapters, which peft creates and computes: the trained parameters, their names, and the merged weights.

A layer's x W^T becomes x W^T + s (x A^T) B^T. W is frozen, in the compute dtype; A and B are trained. In
weight transfers, checkpoints and digests their names are q_proj.weight, q_proj.lora_A.weight and q_proj.lora_B.weight.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshrl.config.model import LoraConfig
from meshrl.core.errors import ConfigError
from meshrl.model.weight_files import write_tensors
from meshrl.parallel.boxes import LocalBox, boxes, index_of
from meshrl.parallel.fsdp import full_tensor, local_shard

ADAPTER_FOLDER = "adapter"  # below an exported model, which has merged weights
_ADAPTER = "default"  # peft's name of the one adapter
_WIRE_A, _WIRE_B = ".lora_A.weight", ".lora_B.weight"


def add_adapters(lm: torch.nn.Module, cfg: LoraConfig, dtype: torch.dtype, path: str | Path) -> None:
    """Give the target layers an A and a B in `dtype`, on the layer's device. Only these require a gradient afterwards.
    Their values are set later, by `init_adapters`, a checkpoint or a sync.

    Raises: ConfigError when a target is no linear layer of the model, or is its head.
    """
    from peft import inject_adapter_in_model

    on_meta = next(lm.parameters()).is_meta
    config = _peft_config(cfg, [f"lm.{name}" for name in _target_names(lm, cfg, path)], str(path))
    # Called with a mixture of experts itself, peft would replace targets gate_proj, up_proj, down_proj by the experts.
    container = torch.nn.ModuleDict({"lm": lm})
    inject_adapter_in_model(config, container, _ADAPTER, low_cpu_mem_usage=on_meta)
    for name, p in named_weights(lm):
        p.requires_grad_(is_adapter(name))
        if is_adapter(name):
            p.data = p.data.to(dtype)


@torch.no_grad()
def init_adapters(lm: torch.nn.Module) -> None:
    """Set A with peft's distribution, with one generator for each layer, so that the values depend only on the layer's
    name. Set B = 0, so that the adapters change nothing at first."""
    for name, p in named_weights(lm):
        if name.endswith(_WIRE_A):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(p.shape[1])
            drawn = torch.empty(p.shape).uniform_(-bound, bound, generator=generator)
            for local in boxes(p):
                local.tensor.copy_(drawn[index_of(local.box)])
        elif name.endswith(_WIRE_B):
            local_shard(p).zero_()


@torch.no_grad()
def randomize_adapters(lm: torch.nn.Module) -> None:
    """Give A and B random values of about a layer's own size: with B = 0 a comparison would not test the adapters."""
    for name, p in named_weights(lm):
        if is_adapter(name):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / math.sqrt(p.shape[1]))


def named_weights(lm: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters by their wire names: those of the model's files, and lora_A and lora_B."""
    for name, p in lm.named_parameters(remove_duplicate=remove_duplicate):
        yield wire_name(name), p


def wire_name(name: str) -> str:
    """A parameter's name without peft's wrapper modules."""
    for letter in "AB":
        name = name.replace(f".lora_{letter}.{_ADAPTER}.", f".lora_{letter}.")
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """name: the wire name."""
    return name.endswith((_WIRE_A, _WIRE_B))


def adapter_names(name: str) -> tuple[str, str]:
    """Wire names of A and B of a weight. name: the weight's wire name."""
    layer = name.removesuffix(".weight")
    return layer + _WIRE_A, layer + _WIRE_B


def weight_name(name: str) -> str:
    """Wire name of the weight that an adapter's tensor belongs to. name: the tensor's wire name."""
    return name.removesuffix(_WIRE_A).removesuffix(_WIRE_B) + ".weight"


def trained_weights(lm: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By wire name, the parameters that an optimizer updates and a checkpoint holds. Without adapters, all of them."""
    weights = dict(named_weights(lm))
    return {name: p for name, p in weights.items() if is_adapter(name)} or weights


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one weight: adds scale * B @ A, with A [R, in] and B [out, R]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def adapters_of(lm: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters by the wire name of their weight."""
    return {f"{name}.weight": _adapter(layer) for name, layer in _layers(lm)}


def adapter_of(layer: torch.nn.Module) -> Adapter | None:
    return _adapter(layer) if _has_adapter(layer) else None


def base_layer_of(layer: Any) -> Any:
    """Transformers' own layer, inside peft's wrapper if there is one."""
    return layer.base_layer if _has_adapter(layer) else layer


def merged_rows(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> Callable[[int, int], torch.Tensor]:
    """A function that computes the rows [first, end) of a block of the merged weight W + s B A, in fp32.

    weight: [out, in], a block of W; a: [R, in], its columns of A; b: [out, R], its rows of B.
    """
    a = a.float()
    return lambda first, end: torch.addmm(weight[first:end].float(), b[first:end].float(), a, alpha=scale)


def merged(adapter: Adapter) -> Callable[[LocalBox], Callable[[int, int], torch.Tensor]]:
    """A function from a box of the adapter's weight to `merged_rows` of that box (a collective if the model is sharded:
    each rank needs the full A and B, which are small)."""
    a, b = full_tensor(adapter.a.detach()).float(), full_tensor(adapter.b.detach()).float()

    def rows_of(local: LocalBox) -> Callable[[int, int], torch.Tensor]:
        rows, columns = index_of(local.box)
        return merged_rows(local.tensor, a[:, columns], b[rows], adapter.scale)

    return rows_of


@contextmanager
def without_adapters(lm: torch.nn.Module) -> Iterator[None]:
    """The model without its adapters, which is the reference model of a LoRA run."""
    layers = [layer for _, layer in _layers(lm)]
    for layer in layers:
        layer._disable_adapters = True  # its setter would also change requires_grad, which FSDP has recorded
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(tensors: dict[str, torch.Tensor], cfg: LoraConfig, path: str, folder: Path) -> None:
    """Write a folder for peft's `PeftModel.from_pretrained`, over the model of `path`. tensors: full, by wire name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _peft_config(cfg, [name.removesuffix(_WIRE_A) for name in tensors if name.endswith(_WIRE_A)], path)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    named = {f"base_model.model.{name}": t.cpu() for name, t in tensors.items()}
    write_tensors(named, folder / "adapter_model.safetensors")


def _target_names(lm: Any, cfg: LoraConfig, path: str | Path) -> list[str]:
    """Full names of the layers that get adapters. peft itself would accept targets that are no linear layer, and ignore
    targets that do not exist. Routers and experts of a mixture are not torch.nn.Linear modules and get no adapter."""
    head = lm.get_output_embeddings()
    linear = [name for name, m in lm.named_modules() if type(m) is torch.nn.Linear and m is not head]
    if not linear:
        raise ConfigError(
            f"model.lora.enabled is true, but {str(path)!r} has no linear layers (torch.nn.Linear) except its head. "
            "Set it to false"
        )
    if cfg.targets == ["all-linear"]:
        return linear
    meant = {target: [n for n in linear if n == target or n.endswith(f".{target}")] for target in cfg.targets}
    unused = [target for target, names in meant.items() if not names]
    if unused or not meant:
        linear_names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        has_experts = any(p.ndim == 3 for p in lm.parameters())
        experts = "; its experts are joint tensors of three dims, which get no adapters" if has_experts else ""
        raise ConfigError(
            f"model.lora.targets has {', '.join(unused) or 'no name'}, but the linear layers of {str(path)!r}, except "
            f"its head, are {linear_names}{experts}. Give some of these names, or only all-linear"
        )
    return [name for name in linear if any(name in names for names in meant.values())]


def _peft_config(cfg: LoraConfig, names: list[str], path: str) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,  # type: ignore[arg-type]  # peft computes with fractions, too
        target_modules=names,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )


def _layers(lm: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in lm.named_modules():
        if _has_adapter(module):
            yield name, module


def _has_adapter(module: torch.nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _adapter(layer: Any) -> Adapter:
    a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    return Adapter(a, b, float(layer.scaling[_ADAPTER]))
