"""How every model is built, trained or not, sharded or not: the steps of `build_model`, in this order.

skeleton      modules of Transformers' class; buffers ready, parameters on the meta device
adapt         LoRA adapters; which parameters are trained
parallelize   torch.compile, tensor parallelism, activation checkpointing, then FSDP2, or for
              one rank copies in the compute dtype
materialize   memory for what this rank holds
fill          its values, from the files or another engine; random ones if a sync brings them
verify        our forward equals Transformers' own
"""

from __future__ import annotations

import gc
import importlib.util
import sysconfig
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshrl.config.model import LoraConfig
from meshrl.core.errors import ConfigError
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.facts import ModelFacts, as_config_error, meta_copy, model_facts
from meshrl.model.hub_names import tied_names
from meshrl.model.lora import add_adapters, init_adapters
from meshrl.model.parts import is_vision
from meshrl.model.routing import require_routing
from meshrl.model.tensor_parallel import cut_model, uncut_layers
from meshrl.model.verify import ComparedModel, in_fp32, require_same
from meshrl.parallel.checkpointing import checkpoint_blocks
from meshrl.parallel.compute_dtype import compute_in
from meshrl.parallel.fsdp import is_sharded, reshard, shard_model
from meshrl.parallel.mesh import Peers, fsdp_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound=torch.nn.Module)

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the steps need to know. By default a full model in fp32 on the CPU that is not trained.

    dtype: of the parameters, except adapters, which have adapter_dtype. mesh: None = not sharded, and then no
    checkpointing; with one, the forward computes in compute_dtype. keep_unsharded: after the forward, for the backward
    pass. group_bytes, prefetch: as train.fsdp_group_bytes, fsdp_prefetch.
    attention: one of attention.NAMES. freezes_vision: a tower and its projector are not trained.
    router_dtype: in which routers compute at least; None = as Transformers does.
    synced: the values come by a weight sync from train ranks, which verify them; until then they are random.
    base: a model of the same folder and adapters, whose frozen parameters are used as they are: the same objects.
    """

    dtype: torch.dtype = torch.float32
    lora: LoraConfig | None = None
    adapter_dtype: torch.dtype = torch.float32
    trains: bool = False
    mesh: DeviceMesh | None = None
    compute_dtype: torch.dtype = torch.float32
    activation_checkpointing: bool | str = False
    keep_unsharded: bool = False
    group_bytes: int = 0
    prefetch: int = 1
    torch_compile: bool = False
    synced: bool = False
    device: torch.device = CPU
    attention: str = "auto"
    router_dtype: torch.dtype | None = None
    freezes_vision: bool = False
    base: torch.nn.Module | None = None


def build_model(path: str | Path, recipe: Recipe, facts: ModelFacts | None = None) -> CausalModel:
    """The model of a folder, in eval mode. Extra memory: a bucket on the host; on the device, for the comparison of a
    model that is not sharded, one block in fp32. facts: of this folder, if they are known."""
    facts = facts or model_facts(path, recipe.attention)
    model = skeleton(facts, recipe)
    adapt(model, facts, recipe)
    parallelize(model, recipe)
    if recipe.base is not None:
        model.lm.load_state_dict(frozen_parameters(recipe.base), strict=False, assign=True)
    materialize(model, recipe.device)
    if recipe.synced:
        if recipe.base is None:
            randomize(model)
        return model
    fill(model, facts)
    verify(model, facts, recipe)
    return model


def load_causal_lm(path: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A full Transformers causal LM on the CPU with attention "meshrl", parameters in `dtype` and trained, buffers
    untouched."""
    return build_model(path, Recipe(trains=True, dtype=dtype)).lm


def skeleton(facts: ModelFacts, recipe: Recipe) -> CausalModel:
    """The modules in eval mode; for training too, since in train mode some families sample experts, jitter routers or
    skip layers."""
    lm = cast_parameters(meta_copy(facts.lm), recipe.dtype)
    model = CausalModel(lm.eval(), facts.parts)
    if recipe.router_dtype is not None:
        require_routing(model.routing, facts.path, "model.router_dtype=auto").dtype = recipe.router_dtype
    return model


def adapt(model: CausalModel, facts: ModelFacts, recipe: Recipe) -> None:
    if recipe.lora is not None:
        add_adapters(model.lm, recipe.lora, recipe.adapter_dtype, facts.path)
    else:
        model.lm.requires_grad_(recipe.trains)
    freeze_vision(model, recipe.freezes_vision)


def freeze_vision(model: CausalModel, is_frozen: bool) -> None:
    for name, p in model.lm.named_parameters():
        p.requires_grad_(p.requires_grad and not (is_frozen and is_vision(name, model.parts)))


def parallelize(model: CausalModel, recipe: Recipe) -> None:
    """Change the blocks and shard them, with or without values. Without a mesh there is nothing to do."""
    if recipe.mesh is None:
        return
    blocks, mesh = model.blocks, fsdp_mesh(recipe.mesh)
    model.peers, model.compute_dtype = Peers.of(recipe.mesh), recipe.compute_dtype
    tp = None if model.peers is None else model.peers.tp
    if recipe.torch_compile:
        compile_blocks(model, recipe.device, by_module=tp is not None)
    if not is_sharded(mesh):
        compute_in(recipe.compute_dtype, model, blocks)
    if tp is not None:
        cut_model(model, tp)
    checkpoint_blocks(blocks, recipe.activation_checkpointing)
    if is_sharded(mesh):
        shard_model(
            model,
            model.fsdp_groups(recipe.group_bytes, recipe.compute_dtype.itemsize),
            mesh,
            compute_dtype=recipe.compute_dtype,
            reshard_after_forward=not recipe.keep_unsharded,
            prefetch=recipe.prefetch,
        )


def frozen_parameters(lm: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By the name in its module; a tied one under each of its names."""
    return {name: p for name, p in lm.named_parameters(remove_duplicate=False) if not p.requires_grad}


def materialize(root: torch.nn.Module, device: torch.device) -> None:
    """Memory on `device`, without values yet, for parameters on the meta device, sharded or not.

    `to_empty` would lose the values of buffers and of a base, and make two tensors of a tied one.
    """
    tied = tied_names(root)
    buffers = [(module, dict(module._buffers)) for module in root.modules()]
    root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for module, saved in buffers:
        module._buffers.update({name: b if b is None else b.to(device) for name, b in saved.items()})
    _tie(root, tied)


def _tie(root: torch.nn.Module, tied: Mapping[str, str]) -> None:
    """Make each alias the parameter of this name."""
    for alias, name in tied.items():
        owner, _, leaf = alias.rpartition(".")
        setattr(root.get_submodule(owner), leaf, root.get_parameter(name))


def fill(model: CausalModel, facts: ModelFacts) -> None:
    facts.weights.fill(model.lm)
    init_adapters(model.lm)


@torch.no_grad()
def randomize(model: CausalModel) -> None:
    """Random values of the size of a model's, for comparisons. Their number is prime, so that rows differ."""
    values = 0.02 * torch.randn(1_048_573, generator=torch.Generator().manual_seed(1))
    for p in model.parameters():
        some = values[: p.numel()]
        own = (some if p.dim() > 1 else 1 + 10 * some).to(p)
        for part in p.view(-1).split(len(own)):
            part.copy_(own[: len(part)])


def verify(model: CausalModel, facts: ModelFacts, recipe: Recipe) -> None:
    """Compare our forward with Transformers' own (a collective if the model is sharded), in fp32 whatever dtype the
    model computes in: a second skeleton, sharded for fp32, gets the tensors of the model, without a copy."""
    plain = replace(recipe, torch_compile=False, activation_checkpointing=False, keep_unsharded=False)
    wide = replace(plain, compute_dtype=torch.float32)
    compared = ComparedModel(skeleton(facts, wide).lm, facts.parts)
    adapt(compared, facts, wide)
    parallelize(compared, wide)
    compared.lm.load_state_dict(model.lm.state_dict(), assign=True)
    _tie(compared.lm, tied_names(model.lm))  # a state dict has a tied tensor twice, and each would be cast
    for module, same in zip(compared.lm.modules(), model.lm.modules(), strict=True):
        module._buffers.update(same._buffers)
    with as_config_error(facts.path), in_fp32(compared) if recipe.mesh is None else nullcontext():
        differences = compared((13, 6))
    peers = compared.peers
    uncut = None if peers is None or peers.tp is None else uncut_layers(compared, peers.tp)
    reshard(compared)
    name = type(model.lm).__name__
    del compared
    gc.collect()  # sharded modules are reference cycles: their padded shards would stay in memory
    require_same(differences, name, facts.path, uncut)


def cast_parameters(model: M, dtype: torch.dtype) -> M:
    """Cast parameters only: rotary buffers rounded to bf16 are 9.5 rad off at position 8192. Ties are kept."""
    for p in model.parameters():  # yields a tied tensor once
        p.data = p.data.to(dtype)
    return model


def compile_blocks(model: CausalModel, device: torch.device, by_module: bool) -> None:
    """Call it before the blocks are cut, checkpointed and sharded, so that none of this is traced. by_module: compile
    the modules of a block each by itself, since the ranks of tp exchange tokens between them."""
    problem = no_compiler(device)
    if model.routing is not None or model.has_states:
        part = "routers of experts" if model.routing is not None else "layers with a state"
        problem = f"{type(model.lm).__name__} has {part}, which would be compiled again for each pack"
    if problem:
        raise ConfigError(f"train.torch_compile is true, but {problem}. Set train.torch_compile=false")
    attention.register(outside_graphs=True)
    for block in model.layers:
        for module in block.children() if by_module else [block]:
            module.forward = torch.compile(module.forward, dynamic=True)


def no_compiler(device: torch.device) -> str:
    """Why torch.compile can't run on this device; "" if it can."""
    if device.type != "cpu":
        return "" if importlib.util.find_spec("triton") else "Triton, its compiler for accelerators, is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports the compiler, which no other run needs
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++, or the one that CXX names)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"Python's headers, which its C++ code includes, are not installed: no {header}"
