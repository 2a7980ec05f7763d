"""Low-rank adapters, made and computed by peft: which parameters train, what they are called, what they add up to.

A layer's x W^T becomes x W^T + s (x A^T) B^T. W stays as the folder has it and in the compute dtype; A and B are
trained. On the wire, in checkpoints and in digests q_proj.weight is W, q_proj.lora_A.weight A, q_proj.lora_B.weight B.
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
from meshrl.parallel.fsdp import local_shard, whole

ADAPTER_FOLDER = "adapter"  # below an exported model, whose own weights have it added
_ADAPTER = "default"  # peft's name of the only one
_WIRE_A, _WIRE_B = ".lora_A.weight", ".lora_B.weight"


def add_adapters(lm: torch.nn.Module, cfg: LoraConfig, dtype: torch.dtype, path: str | Path) -> None:
    """Give the target layers their A and B, in `dtype`, on the layer's device; nothing else requires a gradient then.
    Their values are to be set: by `init_adapters`, a checkpoint or a sync.

    Raises: ConfigError when a target is no linear layer of the model, or is its head.
    """
    from peft import inject_adapter_in_model

    on_meta = next(lm.parameters()).is_meta
    config = _peft_config(cfg, [f"lm.{name}" for name in _target_names(lm, cfg, path)], str(path))
    # In a mixture's own class peft would turn every target called gate_proj, up_proj or down_proj into the experts.
    container = torch.nn.ModuleDict({"lm": lm})
    inject_adapter_in_model(config, container, _ADAPTER, low_cpu_mem_usage=on_meta)
    for name, p in named_weights(lm):
        p.requires_grad_(is_adapter(name))
        if is_adapter(name):
            p.data = p.data.to(dtype)


@torch.no_grad()
def init_adapters(lm: torch.nn.Module) -> None:
    """A as peft draws it, by a generator of its own for each layer, so that the values depend on the layer's name
    alone; B = 0, so that the adapted model is the one it began as."""
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
def scatter_adapters(lm: torch.nn.Module) -> None:
    """Any values of about a layer's own size, for a comparison that zeros in B would make empty."""
    for name, p in named_weights(lm):
        if is_adapter(name):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / math.sqrt(p.shape[1]))


def named_weights(lm: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters by their wire names: those of the model's files, and lora_A and lora_B."""
    for name, p in lm.named_parameters(remove_duplicate=remove_duplicate):
        yield wire_name(name), p


def wire_name(name: str) -> str:
    """Without the modules that peft puts in between."""
    for letter in "AB":
        name = name.replace(f".lora_{letter}.{_ADAPTER}.", f".lora_{letter}.")
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """name: on the wire."""
    return name.endswith((_WIRE_A, _WIRE_B))


def adapter_names(name: str) -> tuple[str, str]:
    """What A and B of a weight are called. name: on the wire."""
    layer = name.removesuffix(".weight")
    return layer + _WIRE_A, layer + _WIRE_B


def weight_name(name: str) -> str:
    """The weight that an adapter's tensor belongs to. Both names: on the wire."""
    return name.removesuffix(_WIRE_A).removesuffix(_WIRE_B) + ".weight"


def trained_weights(lm: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By wire name: what an optimizer moves, and so what a checkpoint has to hold. All, in a model without adapters."""
    weights = dict(named_weights(lm))
    return {name: p for name, p in weights.items() if is_adapter(name)} or weights


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is added to one weight: scale * B @ A, with A [R, in] and B [out, R]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def adapters_of(lm: torch.nn.Module) -> dict[str, Adapter]:
    """By the wire name of the weight that each is added to."""
    return {f"{name}.weight": _adapter(layer) for name, layer in _layers(lm)}


def adapter_of(layer: torch.nn.Module) -> Adapter | None:
    return _adapter(layer) if _is_adapted(layer) else None


def unadapted(layer: Any) -> Any:
    """The layer of Transformers itself."""
    return layer.base_layer if _is_adapted(layer) else layer


class MergedElements:
    """The elements of a block of W + s B A in order, computed where they are read: in fp32, and never all at once."""

    def __init__(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float):
        """weight: [out, in], a block of W; a: [R, in], its columns of A; b: [out, R], its rows of B."""
        self._weight, self._a, self._b, self._scale = weight, a.float(), b, scale
        self.device = weight.device

    def numel(self) -> int:
        return self._weight.numel()

    def __getitem__(self, part: slice) -> torch.Tensor:
        low, high, _ = part.indices(self.numel())
        columns = self._weight.shape[1]
        first, end = low // columns, -(-high // columns)
        rows = torch.addmm(self._weight[first:end].float(), self._b[first:end].float(), self._a, alpha=self._scale)
        return rows.view(-1)[low - first * columns : high - first * columns]


def merged(adapter: Adapter) -> Callable[[LocalBox], MergedElements]:
    """A function from a box of the adapter's weight to W + s B A there (a collective where the model is sharded: each
    rank needs the full A and B, which are small)."""
    a, b = whole(adapter.a.detach()).float(), whole(adapter.b.detach()).float()

    def elements(local: LocalBox) -> MergedElements:
        rows, columns = index_of(local.box)
        return MergedElements(local.tensor, a[:, columns], b[rows], adapter.scale)

    return elements


@contextmanager
def without_adapters(lm: torch.nn.Module) -> Iterator[None]:
    """The model as it was before it was adapted, which is LoRA's reference model."""
    layers = [layer for _, layer in _layers(lm)]
    for layer in layers:
        layer._disable_adapters = True  # its own method would also change requires_grad, which FSDP has taken note of
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(tensors: dict[str, torch.Tensor], cfg: LoraConfig, path: str, folder: Path) -> None:
    """A folder that peft's `PeftModel.from_pretrained` adds to the model of `path`. tensors: whole, by wire name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _peft_config(cfg, [name.removesuffix(_WIRE_A) for name in tensors if name.endswith(_WIRE_A)], path)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    named = {f"base_model.model.{name}": t.cpu() for name, t in tensors.items()}
    write_tensors(named, folder / "adapter_model.safetensors")


def _target_names(lm: Any, cfg: LoraConfig, path: str | Path) -> list[str]:
    """Whole names of the layers to adapt: peft would take targets that are no linear layer, and overlook those that are
    nothing. Routers and experts of a mixture are no torch.nn.Linear, and stay as they are."""
    head = lm.get_output_embeddings()
    linear = [name for name, m in lm.named_modules() if type(m) is torch.nn.Linear and m is not head]
    if cfg.targets == ["all-linear"]:
        return linear
    meant = {target: [n for n in linear if n == target or n.endswith(f".{target}")] for target in cfg.targets}
    unused = [target for target, names in meant.items() if not names]
    if unused or not meant:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"model.lora.targets are {cfg.targets}, but no linear layer of {str(path)!r} below its head is called "
            f"{', '.join(unused) or 'nothing'}. There are {known}; or give all-linear, alone"
        )
    return [name for name in linear if any(name in names for names in meant.values())]


def _peft_config(cfg: LoraConfig, names: list[str], path: str) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, target_modules=names, task_type="CAUSAL_LM", base_model_name_or_path=path
    )


def _layers(lm: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in lm.named_modules():
        if _is_adapted(module):
            yield name, module


def _is_adapted(module: torch.nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _adapter(layer: Any) -> Adapter:
    a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    return Adapter(a, b, float(layer.scaling[_ADAPTER]))
