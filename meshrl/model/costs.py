"""What a model costs by formula: FLOPs of training, with the peak of a device (their quotient is the model FLOPs
utilization, MFU), and bytes of its tensors in a run, from its config.json alone.

Convention: a product of a weight with a token's vector costs 2 FLOPs for each element of the weight, and the backward
pass twice that; once for a weight that is not trained (LoRA). Of experts, only those that compute a token count. The
head counts for tokens with a logprob. Attention counts the pairs of query and key that the mask allows: causal, within
the window. Norms, activations, softmax and vision towers are left out, and so is what is computed twice or saved:
activation checkpointing does not count, nor do the merged experts of LoRA and their gradient, and a prompt that rows
share counts in each row. Of a row without a gradient the forward pass counts alone, as it is computed. So the number
depends on the rows only.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import ceil
from typing import Any

import torch

from meshrl.config.model import ModelConfig
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.train import TrainConfig
from meshrl.core.device import device_name
from meshrl.core.errors import ConfigError
from meshrl.core.terminal import counted
from meshrl.core.types import REFERENCE
from meshrl.model.activations import trace
from meshrl.model.causal import CausalModel
from meshrl.model.facts import as_config_error, without_values
from meshrl.model.limits import full_config, model_numbers
from meshrl.model.lora import EXPERTS_SUFFIX, add_adapters
from meshrl.model.recipe import DTYPES, cast_parameters, freeze_vision
from meshrl.model.state_layers import StateLayer
from meshrl.model.tensor_parallel import cut_model
from meshrl.parallel.exchange import Axis
from meshrl.parallel.tp import TensorParallel
from meshrl.plan.decisions import Machine, moment_bytes
from meshrl.plan.disk_use import size_text
from meshrl.plan.memory import ModelMemory, PlannedRun, RankMemory, rank_memory
from meshrl.plan.run_plan import make_plan
from meshrl.plan.sizes import micro_batch_tokens
from meshrl.plan.traffic import Shape

# Dense bf16 FLOP/s by a part of the product name, the more special names first. From NVIDIA's and AMD's data sheets;
# those of NVIDIA print the double for sparse matrices. For consumer cards: with accumulation in fp32.
_PEAKS = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,  # AWS: half of an A10
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 155e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI355X": 2.5e15,
    "MI350X": 2.3e15,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 192e12,  # of one of its two dies, each of which is a device
}
_PRODUCT = 256  # side of the matrices whose product is timed on a CPU
_MEASURE_S = 0.05


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Of a model's forward pass. token: of the blocks' weights for one token. scored: of the head for a token with a
    logprob. pair: by window (None = all earlier tokens), of attention for a pair of query and key. passes: the products
    of a training step for each of these of the forward pass, in the order of the fields."""

    token: float
    scored: float
    pair: dict[int | None, float]
    passes: tuple[float, float, float]

    def of_row(self, length: int, num_scored: int, trains: bool) -> float:
        """length, num_scored: tokens of the row, and those with a logprob. trains: False for a forward pass alone."""
        pairs = sum(cost * _pairs(length, window) for window, cost in self.pair.items())
        parts = self.token * length, self.scored * num_scored, pairs
        return sum(part * (n if trains else 1) for part, n in zip(parts, self.passes, strict=True))


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def model_flops(lm: Any) -> ModelFlops | None:
    """From the parameters and the attention modules of a Transformers causal LM, which may be sharded or on the meta
    device. None for a model whose blocks have other mixers than softmax attention, or unknown head sizes."""
    model, text = CausalModel(lm), lm.config.get_text_config()
    if model.has_states:
        return None
    blocks = model.layers
    costs = [(2 * p.numel() * _share(name, p, text), _passes(p)) for name, p in blocks.named_parameters()]
    token = sum(cost for cost, _ in costs)
    head, num_heads = lm.get_output_embeddings().weight, getattr(text, "num_attention_heads", None)
    pair: Counter[int | None] = Counter()
    types = getattr(text, "layer_types", None) or ()
    for index, block in enumerate(blocks):
        own = attention_module(block)
        if own is None or num_heads is None or math.isnan(token) or not all("attention" in kind for kind in types):
            return None
        keys, values = head_sizes(own)
        window = getattr(own, "sliding_window", None if types else getattr(text, "sliding_window", None))
        if index < len(types) and types[index] == "full_attention":  # Exaone 4's modules have the window all the same
            window = None
        pair[window] += 2 * num_heads * (keys + values)
    passes = sum(cost * n for cost, n in costs) / token, float(_passes(head)), 3.0
    return ModelFlops(token, 2 * head.numel(), dict(pair), passes)


_HEAD_SIZES = ("qk_head_dim", "head_dim", "head_size")


def attention_module(block: torch.nn.Module) -> torch.nn.Module | None:
    """The module that passes its own head sizes and window to the attention function."""
    modules = (m for m in block.modules() if not isinstance(m, StateLayer))
    return next((m for m in modules if vars(m).keys() & set(_HEAD_SIZES)), None)


def head_sizes(attention: torch.nn.Module) -> tuple[int, int]:
    """The sizes of a head's key and value."""
    keys = next(size for name in _HEAD_SIZES if (size := getattr(attention, name, None)))
    return keys, getattr(attention, "v_head_dim", None) or keys


def _passes(p: torch.nn.Parameter) -> int:
    """Products of this size in a forward and a backward pass: with the input, and for the gradients of input and
    weight."""
    return 3 if p.requires_grad else 2


def _share(name: str, p: torch.nn.Parameter, text: Any) -> float:
    """The share of tokens that a block's parameter multiplies: 0 for biases and norms. An expert is a layer of its own,
    or a part of a tensor with all experts. NaN if the config does not state how many experts a token has."""
    if p.ndim < 2 or name.endswith("bias"):
        return 0.0
    if p.ndim == 2 and not re.search(rf"experts\.(\d+|\w+{EXPERTS_SUFFIX})\.", name):
        return 1.0
    count = next((number for key in _EXPERTS if (number := getattr(text, key, None))), math.nan)
    return (getattr(text, "num_experts_per_tok", None) or math.nan) / count


_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense matrix products: of an accelerator in bf16, by its name; None for one that is not in the table.
    Of a CPU with this process's threads, measured in `dtype`: the fastest of several products, in 50 ms."""
    if device.type == "cpu":
        return _measured(dtype, torch.get_num_threads())
    name = device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


@cache  # a process may have several runs
def _measured(dtype: torch.dtype, num_threads: int) -> float:
    a = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype)
    a @ a  # the first one also loads the kernel
    fastest, end = float("inf"), time.perf_counter() + _MEASURE_S
    while True:
        start = time.perf_counter()
        a @ a
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now > end:
            return 2.0 * _PRODUCT**3 / fastest


def run_memory(
    cfg: RunConfig | SftRunConfig, device: str | None, device_bytes: int | None = None
) -> tuple[PlannedRun, tuple[RankMemory, ...]]:
    """What each kind of rank of a run has in its memory. device: a type; None = an accelerator.

    Raises: ConfigError."""
    numbers, num_ranks = model_numbers(cfg.model.path), cfg.cluster.num_train_ranks
    run_plan = make_plan(cfg, numbers, Machine(device))
    config = run_plan.config
    tokens, longest, is_single = micro_batch_tokens(config, num_ranks)
    memory = model_memory(config.model, config.train, num_ranks, (tokens, longest), has_kernel=device != "cpu")
    job = PlannedRun(
        config=config,
        model=numbers,
        memory=memory,
        num_train_ranks=num_ranks,
        tokens=tokens,
        is_single=is_single,
        has_reference=REFERENCE in run_plan.roles,
        device=device,
        device_bytes=device_bytes,
    )
    return job, rank_memory(job)


def model_memory(
    cfg: ModelConfig,
    train: TrainConfig,
    num_train_ranks: int,
    pack: tuple[int, int] | None = None,
    has_kernel: bool = False,
) -> ModelMemory:
    """pack: tokens of a micro-batch and of its rows; None = without activations. has_kernel: as in `activations.trace`.

    Raises: ConfigError."""
    config, compute, masters = full_config(cfg.path), DTYPES[cfg.dtype], DTYPES[train.master_dtype]
    with torch.device("meta"):
        model = _without_values(cfg, config)
    num_replicas, num_shards, num_ulysses, num_tp = train.mesh_shape(num_train_ranks)
    num_shards *= num_ulysses
    weights, token = _num_bytes(model.parameters(), 1), token_bytes(model, compute)
    _train_only(model, cfg, train)
    if not cfg.lora.enabled:
        cast_parameters(model.lm, masters)
    trained = _num_bytes((p for p in model.parameters() if p.requires_grad), 1)
    flops = None if pack is None else model_flops(model.lm)
    if num_tp > 1:
        cut_model(model, TensorParallel(Axis(num_tp, 0, None)))
    shards = [((ceil(p.shape[0] / num_shards), *p.shape[1:]), p.numel()) for p in model.parameters() if p.requires_grad]
    is_8bit = train.optimizer.kind == "adamw_8bit"
    own = sum(ceil(p.shape[0] / num_shards) * p[0].numel() for p in model.parameters())
    is_sharded = num_replicas * num_shards > 1
    groups = model.fsdp_groups(train.fsdp_group_bytes, compute.itemsize) if is_sharded else [[b] for b in model.blocks]
    sizes = {id(group[0]): compute.itemsize * sum(p.numel() for m in group for p in m.parameters()) for group in groups}
    ends = model.lm.get_input_embeddings(), model.lm.get_output_embeddings()
    own_embedding, own_head = (sizes.pop(id(end), 0) for end in ends)
    blocks = sum(sizes.values())
    total, activations, untraced = sum(p.numel() for p in model.parameters()), None, ""
    if pack is not None:
        with torch.device("meta"):
            traced = _train_only(_without_values(cfg, config), cfg, train)
        try:
            activations = trace(traced, *pack, has_kernel, train.activation_checkpointing)
        except ConfigError as cause:
            untraced = str(cause)
    return ModelMemory(
        weights=weights,
        trained=trained,
        masters=_num_bytes(model.parameters(), num_shards),
        gradients=_num_bytes((p for p in model.parameters() if p.requires_grad), num_shards),
        moments=sum(moment_bytes(*shard, masters.itemsize, is_8bit) for shard in shards),
        reference=0 if cfg.lora.enabled else own * compute.itemsize,  # with LoRA, the policy without adapters
        blocks=blocks,
        block=max(sizes.values()),
        root=total * compute.itemsize - blocks - own_embedding - own_head,
        own_embedding=own_embedding,
        own_head=own_head,
        groups=_groups_text(groups, own_embedding, own_head, sizes) if is_sharded else "",
        head=model.head().weight.numel() * compute.itemsize,
        token=token,
        flops=None if flops is None or pack is None else flops.of_row(pack[1], pack[1], trains=True) / pack[1],
        activations=activations,
        untraced=untraced,
        shape=None if cfg.lora.enabled else _shape(model),
    )


def _groups_text(groups: Sequence[Sequence[torch.nn.Module]], embedding: int, head: int, sizes: dict[int, int]) -> str:
    """Such as `embedding 1.1 GB, 28 x 1 block 466.1 MB, head 1.1 GB`."""
    blocks = [(counted(len(group), "block"), sizes[id(group[0])]) for group in groups if id(group[0]) in sizes]
    same = ((key, len(list(each))) for key, each in groupby(blocks))
    texts = [f"{number} x {text} {size_text(size)}" for (text, size), number in same]
    ends = [f"{name} {size_text(size)}" if size else "" for name, size in (("embedding", embedding), ("head", head))]
    return "gathered by FSDP2 in groups: " + ", ".join(filter(None, [ends[0], *texts, ends[1]]))


def _shape(model: CausalModel) -> Shape:
    """Of a model that tp has cut."""
    text, own = model.lm.config.get_text_config(), attention_module(model.layers[0])
    in_blocks = {id(p) for block in model.blocks for p in block.parameters()}
    heads = 0 if model.routing is not None or own is None or model.has_states else text.num_attention_heads
    return Shape(
        num_layers=len(model.layers),
        hidden=text.hidden_size,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=0 if own is None else head_sizes(own)[0],
        blocks=[tuple(p.shape) for p in model.parameters() if id(p) in in_blocks],
        root=[tuple(p.shape) for p in model.parameters() if id(p) not in in_blocks],
        replicated=[tuple(p.shape) for name, p in model.named_parameters() if "norm" in name],
    )


def _without_values(cfg: ModelConfig, config: Any) -> CausalModel:
    with as_config_error(cfg.path, ImportError):
        return CausalModel(without_values(config, cfg.attn_implementation, DTYPES[cfg.dtype]))


def _train_only(model: CausalModel, cfg: ModelConfig, train: TrainConfig) -> CausalModel:
    """The model, of which that is trained which a run of this config trains."""
    if cfg.lora.enabled:
        add_adapters(model.lm, cfg.lora, DTYPES[train.master_dtype], cfg.path)
    else:
        freeze_vision(model, cfg.vision == "freeze")
    return model


def _num_bytes(parameters: Iterable[torch.nn.Parameter], num_shards: int) -> int:
    """Of the largest shards: FSDP2 cuts the first dim into equal parts, of which the last ones may be smaller."""
    return sum(ceil(p.shape[0] / num_shards) * p[0].numel() * p.element_size() for p in parameters)


def token_bytes(model: CausalModel, dtype: torch.dtype) -> int | None:
    """Bytes of the keys and values of a token in all layers; None if they are not those of softmax attention."""
    text, sizes = model.lm.config.get_text_config(), []
    for block in model.layers:
        own = attention_module(block)
        if own is None or model.has_states:
            return None
        groups = getattr(own, "num_key_value_groups", None)  # those of a layer may be others than the config's
        heads = None if groups else getattr(text, "num_key_value_heads", None)
        sizes.append((heads or text.num_attention_heads // (groups or 1)) * sum(head_sizes(own)))
    return sum(sizes) * dtype.itemsize
