"""How tensor parallelism cuts a model's parameters: by Transformers' own plan of the family, or by ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.model.causal import CausalModel
from meshrl.model.lora import ExpertsAdapter, wire_name
from meshrl.model.ulysses import needs_all_tokens
from meshrl.parallel.mesh import sizes_for
from meshrl.parallel.tp import EACH, Cut, TensorParallel

# Which layers are cut by their outputs (columns of x W^T), and which by their inputs, after which parts are summed.
LLAMA = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
}
GATHERED = {  # of families that need all heads at once
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output"),
    "o_proj": "rowwise_split_input",
}
LATENT = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
EXPERTS = {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"}
for _name in ("shared_expert", "shared_experts", "shared_mlp"):
    EXPERTS |= {f"{_name}.{leaf}": LLAMA[leaf] for leaf in ("gate_proj", "up_proj", "down_proj")}
TRANSPOSED = {  # [experts, in, out], gate and up of a feature side by side
    "experts.gate_up_proj": "rowwise",
    "experts.gate_up_proj_bias": "colwise",
    "experts.down_proj": "colwise",
    "experts.down_proj_bias": "rowwise",
}
PLANS: dict[str, dict[str, str]] = {  # of families without a plan of Transformers, or one that differs in these layers
    "axk1": {**LATENT, **dict.fromkeys(EXPERTS, "")},  # each rank computes all experts: a norm needs their sum
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {**TRANSPOSED, **LLAMA, "self_attn.sinks": "colwise"},
    "hunyuan_v1_dense": LLAMA,
    "minimax_m3_vl_text": {
        "shared_experts.gate_up_proj": "colwise_gather_output",
        "shared_experts.down_proj": "rowwise_split_input",
    },
    "nemotron": LLAMA,
    "stablelm": {**LLAMA, **GATHERED},
    "youtu": LATENT,
}
_OUTPUTS = {"colwise": 1, "colwise_gather_output": 1, "packed_colwise": 2}  # the parts of a fused tensor
_INPUTS = {"rowwise": 1, "rowwise_split_input": 1, "packed_rowwise": 2}


def cut_model(model: CausalModel, tp: TensorParallel) -> None:
    """Cut all parameters of a model, before checkpointing and FSDP2 change its blocks."""
    lm: Any = model.lm
    if model.has_states:
        raise needs_all_tokens("tp", tp.axis.size)
    if any(isinstance(module, ExpertsAdapter) for module in lm.modules()):
        raise ConfigError(
            f"train.mesh.tp is {tp.axis.size}, but model.lora.targets has experts, whose adapters are not cut. Use "
            "train.mesh.tp=1, and train.mesh.dp_shard for less memory, or leave experts out"
        )
    styles = _styles(lm)
    placed: dict[int, torch.nn.Parameter] = {}
    blocks = list(model.layers)
    num_cut = 0
    for block in blocks:
        for name, child in block.named_children():
            cuts = _cuts_of_child(lm, name, child, styles, tp)
            num_cut += cuts is not None
            for layer, leaf, _ in _parameters(child):
                tp.cut(layer, leaf, (cuts or {}).get((id(layer), leaf), EACH), placed)
            if any(p.ndim > 1 for p in child.parameters()):
                tp.bound(child, cuts is not None)
                for path, layer in child.named_modules() if cuts else ():
                    style = _style_of(f"{name}.{path}", styles)
                    if style == "colwise_gather_output":
                        tp.gather_output(layer)
                    elif style == "rowwise_split_input":
                        tp.cut_input(layer)
        for leaf in [leaf for leaf, p in block._parameters.items() if p is not None]:
            tp.cut(block, leaf, EACH, placed)
        tp.use_local(block, list(block.modules()))
    if num_cut == 0:
        raise ConfigError(
            f"train.mesh.tp is {tp.axis.size}, but meshrl has no plan to cut the layers of {type(lm).__name__}. Use "
            "train.mesh.tp=1, and train.mesh.ulysses to split long rows"
        )
    _cut_root(model, tp, blocks, placed)


def _cut_root(
    model: CausalModel, tp: TensorParallel, blocks: list[torch.nn.Module], placed: dict[int, torch.nn.Parameter]
) -> None:
    """Embedding and head over the vocabulary; norms see a slice of the tokens."""
    lm: Any = model.lm
    inside = {id(module) for block in blocks for module in block.modules()}
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    for name, module in lm.named_modules():
        own = [leaf for leaf, p in module._parameters.items() if p is not None]
        if id(module) in inside or not own:
            continue
        vocabulary = EACH
        if module is embedding or module is head:
            size, n = module.weight.shape[0], tp.axis.size
            step = -(-size // n)
            first = min(size, step * tp.axis.index)
            rows = first, min(size, first + step)
            vocabulary = Cut(dim=0) if size % n == 0 else Cut(rows=rows)
            if module is embedding:
                tp.embed(module, rows)
            else:
                model.vocab_start = rows[0]
        elif any(p is not None and p.ndim > 1 for p in module._parameters.values()):
            raise ConfigError(
                f"train.mesh.tp is {tp.axis.size}, but {type(lm).__name__} has a matrix outside of its blocks, {name}, "
                "which meshrl does not cut. Use train.mesh.tp=1"
            )
        for leaf in own:
            tp.cut(module, leaf, vocabulary, placed)
        tp.use_local(module, [module])


def uncut_layers(model: CausalModel, tp: TensorParallel) -> list[str]:
    """The layers with a matrix that no plan cuts; * = the number of a block or an expert."""
    named = [
        (name, module)
        for name, module in model.lm.named_modules()
        for leaf, p in module._parameters.items()
        if p is not None and p.ndim > 1 and "lora_" not in name and tp.is_uncut(module, leaf)
    ]
    return sorted({re.sub(r"\.\d+\b", ".*", name) for name, _ in named})


def _style_of(path: str, styles: dict[str, str]) -> str | None:
    """path: of a layer in its block, or of a parameter that belongs to no layer of its own."""
    return next((style for end, style in styles.items() if path == end or path.endswith(f".{end}")), None)


def _styles(lm: Any) -> dict[str, str]:
    """By the end of a layer's path in its block, of which the first one that fits counts."""
    config = lm.config.get_text_config()
    theirs = getattr(config, "base_model_tp_plan", None) or {}
    styles = _OUTPUTS.keys() | _INPUTS.keys()
    own = {re.sub(r"^.*layers\.\*\.", "", path): style for path, style in theirs.items() if style in styles}
    ours = PLANS.get(config.model_type, {})
    return ours | {end: style for end, style in {**own, **EXPERTS}.items() if end not in ours}


def _parameters(child: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str]]:
    """(layer, name in it, wire path in the child)"""
    for path, layer in child.named_modules():
        for leaf, p in layer._parameters.items():
            if p is not None:
                yield layer, leaf, wire_name(f"{path}.{leaf}" if path else leaf)


def _cuts_of_child(
    lm: Any, name: str, child: torch.nn.Module, styles: dict[str, str], tp: TensorParallel
) -> dict[tuple[int, str], Cut] | None:
    """By layer and name, the cuts of a module's parameters; None = each rank computes all of it."""
    cuts, used = {}, set()
    for layer, leaf, path in _parameters(child):
        owner = re.sub(r"(\.lora_[AB])?\.(weight|bias)$", "", f"{name}.{path}")
        if not (style := _style_of(owner, styles)):
            continue
        p = layer._parameters[leaf]
        assert p is not None
        cut = _cut(style, path, p)
        if style == "colwise" and ("attn" in name or "attention" in name):
            cut = _cut_of_heads(lm, owner, p, cut, tp)
        if cut.dim is not None and p.shape[cut.dim] % (cut.parts * tp.axis.size):
            return None
        cuts[id(layer), leaf] = cut
        used.add(style)
    return cuts if used & _OUTPUTS.keys() and used & _INPUTS.keys() else None


def _cut(style: str, path: str, p: torch.Tensor) -> Cut:
    if style in _OUTPUTS:
        if ".lora_A." in path:
            return EACH
        return Cut(dim=p.ndim - 1 if path.endswith("bias") else max(p.ndim - 2, 0), parts=_OUTPUTS[style])
    if ".lora_B." in path:
        return EACH
    return Cut(is_shared=True) if path.endswith("bias") else Cut(dim=p.ndim - 1, parts=_INPUTS[style])


def _cut_of_heads(lm: Any, owner: str, p: torch.Tensor, cut: Cut, tp: TensorParallel) -> Cut:
    """Ranks have complete heads. Where several ranks need the same key head, each holds all of them, and computes with
    the one of its query heads."""
    config, n = lm.config.get_text_config(), tp.axis.size
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if n not in (legal := sizes_for(heads, shared)):
        raise ConfigError(
            f"train.mesh.tp is {n}, but {type(lm).__name__} has {heads} attention heads and {shared} key heads. "
            f"Use one of {', '.join(map(str, legal))}"
        )
    if cut.dim is None or shared % n == 0 or not owner.endswith(("k_proj", "v_proj")):
        return cut
    head, size = tp.axis.index * shared // n, p.shape[0] // shared
    return Cut(rows=(head * size, (head + 1) * size))
