"""The families of causal language models, one entry of data for each. tests/contract/test_model_families.py proves the
entries, and scripts/make_docs.py writes them into docs/models.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshrl.model import images


@dataclass(frozen=True, slots=True)
class Family:
    """config: fields of its config, in addition to COMMON. without: for each check that it does not pass, the reason.
    vllm: the reason why vLLM does not load its names; "" if it does. refused: the reason why meshrl does not load it,
    a part of the error."""

    config: dict[str, Any]
    without: dict[str, str] = field(default_factory=dict)
    vllm: str = ""
    refused: str = ""


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS_OF_8 = {"head_dim": 8}
WINDOW = {"sliding_window": 6}
BOTH_WINDOWS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 1024}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
BIASED = {
    **ROUTED,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}
LATENT = {  # latent attention
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {  # gated delta rule
    **HEADS_OF_8,
    **LINEAR_FIRST,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-3,  # it normalizes small outputs of heads: with 1e-6 it amplifies rounding up to 1000 times
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
DT_PROJ = {"LoRA": "its dt_proj is not called: its weight is read"}

FAMILIES: dict[
    str, Family
] = {  # by model type; some fields are in published configs for vLLM, and Transformers ignores them
    # dense models
    "llama": Family({}),
    "qwen2": Family({}),
    "qwen3": Family(HEADS_OF_8),
    "mistral": Family(WINDOW),
    "ministral": Family({**HEADS_OF_8, **BOTH_WINDOWS}),
    "ministral3": Family(HEADS_OF_8),
    "gemma": Family(HEADS_OF_8),
    "gemma2": Family(
        {
            **HEADS_OF_8,
            **WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        }
    ),
    "gemma3_text": Family({**HEADS_OF_8, **BOTH_WINDOWS, "query_pre_attn_scalar": 8}),
    "gemma4_text": Family(
        {"head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    ),
    "vaultgemma": Family({**HEADS_OF_8, **BOTH_WINDOWS, "query_pre_attn_scalar": 8}),
    "phi": Family({}, vllm="lm_head.bias can't be traced"),
    "phi3": Family({}),
    "glm": Family(HEADS_OF_8),
    "glm4": Family(HEADS_OF_8),
    "olmo": Family({}),
    "olmo2": Family({}),
    "olmo3": Family(BOTH_WINDOWS),
    "granite": Family({"logits_scaling": 4.0, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}),
    "starcoder2": Family(WINDOW),
    "cohere": Family({"logit_scale": 0.25}),
    "cohere2": Family({**BOTH_WINDOWS, "logit_scale": 0.25}),
    "smollm3": Family({"no_rope_layers": [1, 0]}),
    "ernie4_5": Family(HEADS_OF_8),
    "exaone4": Family(BOTH_WINDOWS),
    "seed_oss": Family(HEADS_OF_8),
    "hunyuan_v1_dense": Family(HEADS_OF_8),
    "hyperclovax": Family({}),
    "helium": Family(HEADS_OF_8),
    "arcee": Family({}),
    "apertus": Family({}),
    "bitnet": Family({}),
    "cwm": Family({**HEADS_OF_8, **BOTH_WINDOWS}),
    "nanochat": Family({}),
    "minicpm3": Family({**LATENT, "dim_model_base": 16}),
    "jais2": Family(HEADS_OF_8),
    "youtu": Family({**LATENT, "pad_token_id": None}),
    "persimmon": Family({}),
    "gpt2": Family(
        GPT2,
        {"LoRA": "its layers are Conv1D, not Linear"},
        vllm="vLLM transposes its weights, so they are not read back",
    ),
    "gpt_neox": Family({}),
    "gpt_bigcode": Family(GPT2),
    "biogpt": Family({}),
    "opt": Family({"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5}),
    # mixtures of experts
    "mixtral": Family({"num_local_experts": 4, "router_jitter_noise": 0.1}),
    "qwen2_moe": Family({**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": Family({**ROUTED, **HEADS_OF_8, "num_experts": 8}),
    "olmoe": Family({"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": Family({"num_local_experts": 4}),
    "granitemoe": Family({"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": Family({"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}),
    "glm4_moe": Family({**BIASED, **HEADS_OF_8}),
    "glm4_moe_lite": Family({**BIASED, **LATENT, "mlp_layer_types": ["dense", "sparse"]}),
    "ernie4_5_moe": Family({**ROUTED, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    "minimax_m2": Family(
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "rotary_dim": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        }
    ),
    "dots1": Family({**BIASED, **HEADS_OF_8, "n_shared_experts": 1}),
    "deepseek_v2": Family({**BIASED, **LATENT, "topk_method": "greedy"}),
    "deepseek_v3": Family({**BIASED, **LATENT, "n_group": 2}),
    "exaone_moe": Family(
        {
            **ROUTED,
            **BOTH_WINDOWS,
            **HEADS_OF_8,
            "num_experts": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        }
    ),
    "hunyuan_v1_moe": Family({**HEADS_OF_8, "num_experts": 4, "moe_topk": 2}),
    "flex_olmo": Family({"num_experts": 4, "num_experts_per_tok": 2}),
    "solar_open": Family({**BIASED, **HEADS_OF_8}),
    "longcat_flash": Family(
        {
            **LATENT,
            "head_dim": 8,
            "num_layers": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "zero_expert_type": "identity",
            "moe_topk": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
        },
        {"LoRA": "its router reads the weight of a linear layer without calling the layer"},
        vllm="it has no names for experts that return their input",
    ),
    "afmoe": Family(
        {
            **ROUTED,
            **HEADS_OF_8,
            "num_dense_layers": 1,
            "num_experts": 4,
            "score_func": "sigmoid",
            "route_norm": True,
            "route_scale": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 6,
        }
    ),
    "jetmoe": Family({"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    "hy_v3": Family(
        {
            **ROUTED,
            **HEADS_OF_8,
            "num_experts": 4,
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 16,
            "route_norm": True,
            "qk_norm": True,
        }
    ),
    "laguna": Family(
        {**ROUTED, **HEADS_OF_8, "num_experts": 4}, vllm="it has another name for e_score_correction_bias"
    ),
    "mellum": Family({}),
    "cohere2_moe": Family({**HEADS_OF_8, "num_experts": 4, "num_experts_per_tok": 2}),
    "axk1": Family({**BIASED, **LATENT}, vllm="its dense layers have a norm that the files do not hold"),
    "minimax_m3_vl_text": Family({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    # hybrids: layers with a state
    "qwen3_next": Family({**ROUTED, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_5_text": Family(DELTA, vllm="its class needs torchvision, which requirements-vllm.txt does not have"),
    "qwen3_5_moe_text": Family(
        {**ROUTED, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16},
        vllm="its class needs torchvision, which requirements-vllm.txt does not have",
    ),
    "olmo_hybrid": Family(DELTA, vllm="its class needs Triton, which the CPU build does not have"),
    "kimi_linear": Family(
        {
            **LATENT,
            **LINEAR_FIRST,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 2,
        },
        vllm="vLLM refuses its config without prefix caching",
    ),
    "lfm2": Family({"full_attn_idxs": [1]}, vllm="it reads conv_dim, which Transformers' config does not write"),
    "lfm2_moe": Family({**ROUTED, "num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "minimax": Family(
        {**LINEAR_FIRST, **HEADS_OF_8, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
        vllm="vLLM has no class for it",
    ),
    "mamba": Family({"state_size": 8}, DT_PROJ, vllm="it stores A instead of A_log, which is not read back"),
    "falcon_mamba": Family({"state_size": 8}, DT_PROJ, vllm="it stores A instead of A_log, which is not read back"),
    "mamba2": Family({"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}),
    "bamba": Family({**MAMBA, "attn_layer_indices": [1]}, vllm="vLLM has no class for it"),
    "granitemoehybrid": Family(
        {
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        }
    ),
    "falcon_h1": Family({**MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "jamba": Family(
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 4},
        DT_PROJ,
        vllm="it stores A instead of A_log, which is not read back",
    ),
    "nemotron_h": Family(
        {
            **ROUTED,
            **HEADS_OF_8,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 16,
        },
        vllm="its CPU build has no kernel for experts without a gate",
    ),
    # refused
    "gpt_neo": Family(
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
        },
        refused="computes attention by itself",
    ),
    "xglm": Family(
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, refused="computes attention by itself"
    ),
    "codegen": Family({**GPT2, "rotary_dim": 8}, refused="computes attention by itself"),
    "falcon": Family(
        {}, {"LoRA": "its layers are FalconLinear, not Linear"}, vllm="its joined query_key_value can't be read back"
    ),
    "gptj": Family({**GPT2, "rotary_dim": 8}),
    "bloom": Family({"n_layer": 2, "n_head": 4}, vllm="its joined query_key_value can't be read back"),
    "mpt": Family(
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024}, refused="computes attention by itself"
    ),
    "gpt_neox_japanese": Family({}, refused="computes attention by itself"),
    "openai-gpt": Family(
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}, refused="computes attention by itself"
    ),
    "roformer": Family({"is_decoder": True}, refused="computes attention by itself"),
    "rwkv": Family({}, refused="computes attention by itself"),
    "xlstm": Family({}, refused="computes attention by itself"),
    "stablelm": Family({}),
    "nemotron": Family({}),
    "diffllama": Family({}, refused="computes attention 2 times in layer 0"),
    "modernbert-decoder": Family(
        {"local_attention": 8, "num_hidden_layers": 3}, refused="gives a single row logprobs that differ"
    ),
    "bert": Family({"is_decoder": True}, refused="gives a single row logprobs that differ"),
    "doge": Family({"num_experts": 16}, refused="gives a single row logprobs that differ"),
    "recurrent_gemma": Family({}, refused="gives a single row logprobs that differ"),
    "bart": Family(
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        refused="it counts positions by itself",
    ),
    "granite_swa": Family({**BOTH_WINDOWS}),
    "gpt_oss": Family(
        {**BOTH_WINDOWS, **HEADS_OF_8, "num_local_experts": 4, "num_experts_per_tok": 2},
        vllm="its CPU build has no kernel for experts with biases in fp32",
    ),
    "mimo_v2_flash": Family(
        {**ROUTED, **BOTH_WINDOWS, **HEADS_OF_8, "n_routed_experts": 4},
        vllm="it reads hybrid_layer_pattern, which Transformers' config does not write",
    ),
    "granitemoe_swa": Family({**BOTH_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4_text": Family(
        {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 8},
        refused="with layers of kind chunked_attention",
    ),
    "deepseek_v32": Family({**BIASED, **LATENT}, refused="with layers of kind indexed_attention"),
    "glm_moe_dsa": Family({**BIASED, **LATENT}, refused="with layers of kind indexed_attention"),
    "axk2": Family({**BIASED, **LATENT}, refused="with layers of kind indexed_attention"),
    "hy_v4": Family({**ROUTED, **HEADS_OF_8, "num_experts": 4}, refused="with layers of kind indexed_attention"),
    "hrm_text": Family({}, refused="has no ModuleList of 16 blocks"),
    "inkling_text": Family({}, refused="with layers of kind hybrid_sliding"),
    "qwen4_exp_text": Family(
        {
            **DELTA,
            **ROUTED,
            "num_experts": 4,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
            "ple_layer_ids": [],
        },
        refused="with layers of kind indexed_attention",
    ),
    "zamba2": Family(
        {"layers_block_type": ["hybrid", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 8, "chunk_size": 8},
        refused="computes attention 2 times in layer -1",
    ),
    "deepseek_v4": Family({**BIASED, **LATENT}, refused="with layers of kind heavily_compressed_attention"),
}


# one of each mechanism; the other families are slow tests
SAMPLE = ("gemma2", "gpt2", "deepseek_v3", "diffllama", "lfm2", "mamba2", "bart")

PAGE = """\
# Models

Generated by `scripts/make_docs.py` from `tests/model_families.py`. Every entry of that file is a test case of
`tests/contract/test_model_families.py`, and of `tests/unit/rollout/test_vllm_names.py`.

meshrl trains and samples with Transformers' own classes, and a model whose code calls Transformers' attention interface
works. Three whose code does not (BLOOM, Falcon, GPT-J) get attention layers that do. Every model is compared with
Transformers when it is loaded, and refused if it differs. `meshrl model-check MODEL` proves of your model what this
page states of an architecture, and [add_a_model.md](add_a_model.md) shows what to do when it does not.

## {proven} architectures that train and sample

Each of them was compared with Transformers' own eager forward in fp32, on a tiny model in which also biases, norms and
router corrections have values that matter: logprobs and gradients differ by at most 1e-5 (of a gradient, relative to
its norm), or, where a change of the last bit of each weight alone changes Transformers' own results by more than that,
by twice that change (here Qwen3.5's two: at most 5e-5). This holds of each row alone, **packed** with other rows, after
**shared prompts**, and on **two FSDP2 ranks** with activation checkpointing. **Sampling**: greedy tokens of the
embedded engine and their logprobs equal `generate`'s. **Export**: Transformers loads what meshrl writes, with the same
logprobs. **LoRA**: each adapter gets a gradient, and exported merged weights have the logprobs of the adapted model.
**Names**: weights are sent to servers under the names of the model's files. **vLLM**: the vLLM of
`requirements-vllm.txt` loads all of these names, they fill its model, and the values can be read back; whether it
computes the same logprobs is measured in each run, before the first optimizer step.

Layers that pass a state from token to token (gated delta rule, lightning attention, Mamba, short convolutions) compute
each row of a pack after its own prompt, several rows of similar length at once; the embedded engine keeps their states
next to the keys and values of a row. `train.mesh.ulysses` and `train.mesh.tp` are refused for models with such layers.
Without the packages `flash-linear-attention`, `causal-conv1d` and `mamba-ssm` Transformers computes them in plain
PyTorch, which is slow for long rows.

Of **mixtures of experts**, routers are measured (`router/*` in [metrics.md](metrics.md)), balanced
(`train.router_aux_loss_coef`) and computed in fp32 (`model.router_dtype`), and the trainer can select the experts that
the embedded engine selected (`rollout.router_replay`). JetMoE and Jamba have none of these, because their routers do
not return logits, scores and selected experts; PhiMoE, and DeepSeek-V2 with `group_limited_greedy`, have no replay. The
start of a run refuses the keys there. `tests/unit/model/test_routing.py` proves this of every mixture below. Experts
get LoRA adapters if `model.lora.targets` has `experts`, in JetMoE not; the table's LoRA column includes them.

| architecture | model type | {columns} | vLLM |
| --- | --- | {rule} | --- |
{rows}

{notes}

## {with_images} architectures with a vision tower

They read text and images: `data.images` in [data.md](data.md) has the rows, and [the recipe](../examples/vlm/RECIPE.md)
of `make vlm` trains a tiny one. `tests/contract/test_vision_families.py` compares each with Transformers' own eager
forward in fp32, on a tiny model: rows of text and of images, several images in a row, images next to each other and of
different sizes in a pack, shared prompts, and two FSDP2 ranks of which one has text alone. Logprobs and gradients
differ by at most 1e-5, greedy answers of the embedded engine are those of `generate`, an export has the names and
values of the files, and LoRA adapts a tower only with `vision` in `model.lora.targets`. `model.vision: freeze` trains
the language model alone; without images in the rows, a tower is never computed, and exported as it is in the files. The
tokens that stand for images have no probability: sampler and trainer mask them. vLLM takes images of [three of
them](rollout_engines.md#images).

Refused are rows with images under `train.mesh.ulysses` or `train.mesh.tp`, and images that Gemma 3's processor cuts
into parts (`do_pan_and_scan`). Of several images in a prompt, LLaVA-OneVision's own processor makes no tiles; here each
image is processed by itself.

| architecture | model type | tokens of an image |
| --- | --- | --- |
{image_rows}

## Refused

A model of these architectures is refused when it is loaded, with the reason.

| architecture | model type | why |
| --- | --- | --- |
{refused}
"""
COLUMNS = {  # check -> its column; logprobs and gradients are proven of each model that is loaded
    "logprobs": "logprobs",
    "gradients": "gradients",
    "packed": "packed",
    "shared prompts": "shared prompts",
    "two FSDP2 ranks": "FSDP2",
    "embedded sampling": "sampling",
    "export": "export",
    "LoRA": "LoRA",
    "file names": "names",
}


def config_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family].config, **changes})


def page() -> str:
    """docs/models.md."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    proven, refused, notes = [], [], list[str]()
    for family, entry in sorted(FAMILIES.items(), key=lambda item: NAMES[item[0]].lower()):
        begin = f"| {NAMES[family]} | {family} |"
        if entry.refused:
            refused.append(f"{begin} {entry.refused} |")
            continue
        reasons = {**entry.without, "vLLM": entry.vllm} if entry.vllm else entry.without
        notes += [f"{NAMES[family]}, {column}: {reason}." for column, reason in reasons.items()]
        cells = ["no" if column in reasons else "yes" for column in (*COLUMNS, "vLLM")]
        proven.append(f"{begin} {' | '.join(cells)} |")
    return PAGE.format(
        proven=len(proven),
        columns=" | ".join(COLUMNS.values()),
        rule=" | ".join(["---"] * len(COLUMNS)),
        rows="\n".join(proven),
        notes="\n".join(f"- {note}" for note in notes),
        refused="\n".join(refused),
        with_images=len(images.FAMILIES),
        image_rows="\n".join(_image_row(family) for family in sorted(images.FAMILIES)),
    )


def _image_row(family: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    facts = images.FAMILIES[family]
    seen = {"": "see those before them", "image": "see each other", "window": "see each other in windows"}[facts.mutual]
    return f"| {NAMES[family]} | {family} | {seen}{', by place in the image' if facts.has_grid else ''} |"
