"""LoRA adapters: the trained parameters, their names, and the merged weights. peft creates and computes those of
linear layers.

A layer's x W^T becomes x W^T + s (x A^T) B^T. W is frozen, in the compute dtype; A and B are trained. In
weight transfers, checkpoints and digests their names are q_proj.weight, q_proj.lora_A.weight and q_proj.lora_B.weight.

The experts of a mixture are joint tensors, experts.gate_up_proj [E, out, in], which Transformers' code computes with in
several ways. Here each forward of the experts gets the sum W + s B A instead of W; A is [E * R, in] and B is
[out, R * E], as in peft. A sampler gets merged weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshrl.config.model import EXPERTS, VISION, LoraConfig
from meshrl.core.errors import ConfigError
from meshrl.model.folder import write_tensors
from meshrl.model.parts import TEXT, is_vision, part_of, parts_of
from meshrl.parallel.boxes import Box, boxes, index_of
from meshrl.parallel.fsdp import full_tensor, local_shard

ADAPTER_FOLDER = "adapter"  # below an exported model, which has merged weights
ALL_LINEAR = "all-linear"
_ADAPTER = "default"  # peft's name of the one adapter
_WIRE_A, _WIRE_B = ".lora_A.weight", ".lora_B.weight"
_NAMES_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
LEAST_MERGED = 0.95  # a lower share of the adapters' change in merged weights has a note
_MEASURED = 1 << 22  # elements of merged weights that are measured at once
EXPERTS_SUFFIX = "_adapter"  # of an adapter's module in the experts, after the name of the joint tensor


def add_adapters(lm: torch.nn.Module, cfg: LoraConfig, dtype: torch.dtype, path: str | Path) -> None:
    """Give the target layers an A and a B in `dtype`, on the layer's device. Only these require a gradient afterwards.
    Their values are set later, by `init_adapters`, a checkpoint or a sync."""
    from peft import inject_adapter_in_model

    on_meta = next(lm.parameters()).is_meta
    linear, joint = _target_names(lm, cfg, path)
    if linear:
        config = _peft_config(cfg, [f"lm.{name}" for name in linear], [], str(path))
        # Called with a mixture itself, peft would replace targets gate_proj, up_proj, down_proj by the experts.
        container = torch.nn.ModuleDict({"lm": lm})
        inject_adapter_in_model(config, container, _ADAPTER, low_cpu_mem_usage=on_meta)
    for name in joint:
        owner, _, leaf = name.rpartition(".")
        _add_to_experts(lm.get_submodule(owner), leaf, cfg)
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
    if "lora_" not in name and ".base_layer." not in name:
        return name
    for letter in "AB":
        name = name.replace(f".lora_{letter}.{_ADAPTER}.", f".lora_{letter}.")
        name = name.replace(f"{EXPERTS_SUFFIX}.lora_{letter}.", f".lora_{letter}.")
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
    """The adapter of one weight: adds scale * B @ A, with A [R, in] and B [out, R]; to a joint tensor of experts,
    scale times the product of the two factors that `_factors` returns."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    num_experts: int = 0
    is_transposed: bool = False  # the experts are [E, in, out]


def adapters_of(lm: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters by the wire name of their weight."""
    return {
        name.removesuffix(EXPERTS_SUFFIX) if isinstance(layer, ExpertsAdapter) else f"{name}.weight": _adapter(layer)
        for name, layer in _layers(lm)
    }


def adapter_of(layer: torch.nn.Module) -> Adapter | None:
    return _adapter(layer) if _has_adapter(layer) else None


def base_layer_of(layer: Any) -> Any:
    """Transformers' own layer, inside peft's wrapper if there is one."""
    return layer.base_layer if _has_adapter(layer) else layer


Rows = Callable[[int, int], torch.Tensor]


def merged_rows(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> Rows:
    """A function that computes the rows [first, end) of a block of the merged weight W + s B A, in fp32.

    weight: [out, in], a block of W; a: [R, in], its columns of A; b: [out, R], its rows of B.
    """
    a = a.float()
    return lambda first, end: torch.addmm(weight[first:end].float(), b[first:end].float(), a, alpha=scale)


class RoundedChange:
    """Measures what rounding merged weights to `dtype` leaves of the adapters' change: the projection of the rounded
    change on the change, <round(W + s B A) - W, s B A> / <s B A, s B A>. 1 = all of it. A change below half a step of
    bf16, about 1/512 of a weight, leaves nothing."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._sums: list[torch.Tensor] = []  # [2] for each block; threads append

    def measured(self, block: torch.Tensor, rows: Rows) -> Rows:
        """The same rows of the merged `block`, which are measured when they are computed. float32 rounds nothing."""
        if self.dtype == torch.float32:
            return rows

        def of_rows(first: int, end: int) -> torch.Tensor:
            values, before = rows(first, end), block[first:end]
            step = max(1, _MEASURED * len(values) // max(1, values.numel()))  # rows whose copies in fp32 are small
            for after, weight in zip(values.split(step), before.split(step), strict=True):
                change = after.float() - weight
                left = after.to(self.dtype).float().sub_(weight).mul_(change)
                self._sums.append(torch.stack([left.sum(), change.square_().sum()]))
            return values

        return of_rows

    def sums(self) -> tuple[float, float]:
        """(projection, square) since the last call; those of all ranks are added before the division."""
        taken, self._sums = self._sums, []
        return tuple(torch.stack(taken).double().sum(0).tolist()) if taken else (0.0, 0.0)


def merged(
    adapter: Adapter, rounded: RoundedChange | None = None
) -> Callable[[torch.Tensor, Box, Sequence[int | None]], Rows]:
    """A function from a block of the adapter's weight to a function that computes its rows as `merged_rows` does (a
    collective if the model is sharded: each rank needs the full A and B, which are small).

    Its arguments: the block; the box of the weight that it is; the weight's dim for each dim of the block, None for a
    dim of size 1 that the weight does not have. rounded: measures the rows.
    """
    measured = (lambda block, rows: rows) if rounded is None else rounded.measured
    a, b = full_tensor(adapter.a.detach()).float(), full_tensor(adapter.b.detach()).float()
    if not adapter.num_experts:

        def rows_of(block: torch.Tensor, box: Box, dims: Sequence[int | None]) -> Rows:
            rows, columns = index_of(box)
            return measured(block, merged_rows(block, a[:, columns], b[rows], adapter.scale))

        return rows_of
    left, right = _factors(a, b, adapter.num_experts, adapter.is_transposed)

    def rows_of_experts(block: torch.Tensor, box: Box, dims: Sequence[int | None]) -> Rows:
        experts, rows, columns = index_of(box)
        own = left[experts, rows].clone(), right[experts, :, columns].clone()  # the rest of A and B is freed
        return measured(block, partial(_merged_rows_of_experts, block, *own, adapter.scale, dims))

    return rows_of_experts


def _merged_rows_of_experts(
    block: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    scale: float,
    dims: Sequence[int | None],
    first: int,
    end: int,
) -> torch.Tensor:
    """The rows [first, end) of a block of the merged experts. left [e, i, R], right [e, R, j]: of the block's box."""
    part = slice(first, end)
    if dims[0] == 0:
        left, right = left[part], right[part]
    elif dims[0] == 1:
        left = left[:, part]
    elif dims[0] == 2:
        right = right[..., part]
    order = [dim for dim in dims if dim is not None]
    order += [dim for dim in range(3) if dim not in order]  # of size 1
    values = block[part]
    return torch.add(values, torch.bmm(left, right).permute(order).reshape(values.shape), alpha=scale)


def _factors(
    a: torch.Tensor, b: torch.Tensor, num_experts: int, is_transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of each expert's change: [E, out, R] and [E, R, in], or transposed [E, in, R] and [E, R, out]."""
    a = a.view(num_experts, -1, a.shape[1])
    b = b.view(b.shape[0], -1, num_experts).permute(2, 0, 1)
    return (a.mT, b.mT) if is_transposed else (b, a)


class ExpertsAdapter(torch.nn.Module):
    """A and B of one joint tensor of experts, in the order of peft."""

    def __init__(self, weight: torch.Tensor, is_transposed: bool, cfg: LoraConfig):
        super().__init__()
        self.num_experts, rows, columns = weight.shape
        out_size, in_size = (columns, rows) if is_transposed else (rows, columns)
        self.is_transposed, self.scale = is_transposed, cfg.scale
        linear = partial(torch.nn.Linear, bias=False, device=weight.device, dtype=weight.dtype)
        self.lora_A = linear(in_size, cfg.rank * self.num_experts)
        self.lora_B = linear(cfg.rank * self.num_experts, out_size)
        self._disable_adapters = False
        self.frozen: tuple[torch.nn.Parameter, ...] = ()  # the weight, while the experts compute with the merged one

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        factors = _factors(self.lora_A.weight, self.lora_B.weight, self.num_experts, self.is_transposed)
        return torch.baddbmm(weight, *(f.to(weight.dtype) for f in factors), alpha=self.scale)


def _add_to_experts(experts: Any, name: str, cfg: LoraConfig) -> None:
    if not any(isinstance(child, ExpertsAdapter) for child in experts.children()):
        experts.register_forward_pre_hook(_merge)
        experts.register_forward_hook(_restore, always_call=True)
    adapter = ExpertsAdapter(getattr(experts, name), getattr(experts, "is_transposed", False), cfg)
    experts.add_module(name + EXPERTS_SUFFIX, adapter)


def _of_experts(experts: torch.nn.Module) -> Iterator[tuple[str, ExpertsAdapter]]:
    for name, child in experts.named_children():
        if isinstance(child, ExpertsAdapter):
            yield name.removesuffix(EXPERTS_SUFFIX), child


def _merge(experts: torch.nn.Module, args: Any) -> None:
    for name, adapter in _of_experts(experts):
        weight = experts._parameters[name]
        assert weight is not None
        if not adapter._disable_adapters:
            adapter.frozen = (weight,)
            experts._parameters[name] = adapter.merged(weight)  # type: ignore[assignment]


def _restore(experts: torch.nn.Module, args: Any, output: Any) -> None:
    """Also when the forward has raised: activation checkpointing ends a second forward early in this way."""
    for name, adapter in _of_experts(experts):
        if adapter.frozen:
            (experts._parameters[name],), adapter.frozen = adapter.frozen, ()


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


def save_adapter(
    tensors: Mapping[str, torch.Tensor], cfg: LoraConfig, path: str, folder: Path, is_mixture: bool
) -> None:
    """Write a folder for peft's `PeftModel.from_pretrained`, over the model of `path`. tensors: full, by wire name.
    is_mixture: the model has joint experts."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name.removesuffix(_WIRE_A) for name in tensors if name.endswith(_WIRE_A)]
    joint = [name for name in names if _is_joint(name)]
    linear = [name for name in names if name not in joint]
    # Of a mixture, peft takes linear layers with these names for experts of older files, and renames them. A weight
    # that is named as a parameter has the same adapter, and keeps its name.
    renamed_by_peft = [name for name in linear if is_mixture and name.rpartition(".")[2] in _NAMES_OF_EXPERTS]
    parameters = joint + [f"{name}.weight" for name in renamed_by_peft]
    config = _peft_config(cfg, [name for name in linear if name not in renamed_by_peft], parameters, path)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    renamed = {name: _name_of_peft(name, joint) for name in names}
    named = {}
    for name, t in tensors.items():
        owner, _, end = name.rpartition(".lora_")
        named[f"base_model.model.{renamed[owner]}.lora_{end}"] = t.cpu()
    write_tensors(named, folder / "adapter_model.safetensors")


def _name_of_peft(name: str, joint: Sequence[str]) -> str:
    """peft wraps the experts once for each joint tensor, in their order in the module, the last one outside."""
    if name not in joint:
        return name
    owner = name.rpartition(".")[0]
    own = [other for other in joint if other.rpartition(".")[0] == owner]
    return owner + ".base_layer" * (len(own) - 1 - own.index(name))


def _is_joint(name: str) -> bool:
    """Whether this is the name of a joint tensor of experts, not of a linear layer."""
    return name.rpartition(".")[0].rpartition(".")[2] == EXPERTS


def joint_experts(lm: torch.nn.Module) -> list[str]:
    """The names of the joint tensors of experts."""
    return [name for name, p in lm.named_parameters() if p.ndim == 3 and _is_joint(name)]


def _target_names(lm: Any, cfg: LoraConfig, path: str | Path) -> tuple[list[str], list[str]]:
    """Full names of the layers, and of the joint tensors, that get adapters. peft itself would accept targets that are
    no linear layer, and ignore targets that do not exist. Routers get no adapter."""
    parts = parts_of(lm)
    every = [name for name, m in lm.named_modules() if type(m) is torch.nn.Linear]
    linear, of_vision = [n for n in every if part_of(n, parts) == TEXT], [n for n in every if is_vision(n, parts)]
    joint, targets = joint_experts(lm), [target for target in cfg.targets if target not in (EXPERTS, VISION)]
    for target, layers, kind in (
        (EXPERTS, joint, "joint tensors in modules named experts"),
        (VISION, of_vision, "linear layers in a vision tower"),
    ):
        if target in cfg.targets and not layers:
            more = f"; experts that are linear layers are among {ALL_LINEAR}" if target == EXPERTS else ""
            raise ConfigError(f"model.lora.targets has {target}, but {str(path)!r} has no {kind}. Leave it out{more}")
    joint, of_vision = joint if EXPERTS in cfg.targets else [], of_vision if VISION in cfg.targets else []
    if (joint or of_vision) and not targets:
        return of_vision, joint
    if not linear:
        raise ConfigError(
            f"model.lora.enabled is true, but {str(path)!r} has no linear layers (torch.nn.Linear) except its head. "
            "Set it to false"
        )
    if targets == [ALL_LINEAR]:
        return linear + of_vision, joint
    meant = {target: [n for n in linear if n == target or n.endswith(f".{target}")] for target in targets}
    unused = [target for target, names in meant.items() if not names]
    if unused or not meant:
        linear_names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        experts = f"; its joint experts are named by {EXPERTS}" if joint_experts(lm) else ""
        raise ConfigError(
            f"model.lora.targets has {', '.join(unused) or 'no name'}, but the linear layers of {str(path)!r}, except "
            f"its head, are {linear_names}{experts}. Give some of these names, or {ALL_LINEAR} instead of them"
        )
    return [name for name in linear if any(name in names for names in meant.values())] + of_vision, joint


def _peft_config(cfg: LoraConfig, layers: list[str], parameters: list[str], path: str) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,  # type: ignore[arg-type]  # peft computes with fractions, too
        target_modules=layers,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )


def _layers(lm: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in lm.named_modules():
        if _has_adapter(module) or isinstance(module, ExpertsAdapter):
            yield name, module


def _has_adapter(module: torch.nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _adapter(layer: Any) -> Adapter:
    if isinstance(layer, ExpertsAdapter):
        a, b = layer.lora_A.weight, layer.lora_B.weight
        return Adapter(a, b, layer.scale, layer.num_experts, layer.is_transposed)
    a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    return Adapter(a, b, float(layer.scaling[_ADAPTER]))
