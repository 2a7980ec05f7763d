"""GGUF files, as llama.cpp and Ollama use them: read as a model folder by Transformers' reader, and written by the
package gguf."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.files import output_errors, replacing
from meshrl.model.folder import not_finite
from meshrl.model.save import save_pretrained

MAGIC = b"GGUF"
GGUF_TYPES = ("f16", "q8_0", "bf16", "f32")
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by model_type
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES = {  # how a tokenizer splits a text before its merges -> llama.cpp's name of the rule
    (_WORDS.format(r"\p{N}"),): "qwen2",
    (_WORDS.format(r"\p{N}{1,3}"),): "llama-bpe",
    ("words of GPT-2",): "gpt-2",
    ("digits", "words of GPT-2"): "smollm",
}
_OTHER_WAY = "export the model by --to hf, and convert that by llama.cpp's convert_hf_to_gguf.py"
_STOPS = ("eos", "eot", "eom")  # the keys for ids that end an answer


def is_gguf(path: Path) -> bool:
    """Whether this is a file in GGUF format, by its first bytes."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def require_package(path: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{path} is a GGUF file, and the package gguf is not installed: pip install 'meshrl[gguf]'")


def convert_gguf(path: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model, the tokenizer and the chat template of the GGUF file `path` to the new folder `out`, in `dtype`.
    Quantised weights are dequantised; the precision that the quantisation removed is not restored.

    Other files of its folder are not read, and no code is run. Needs host memory for the model in float32, twice.
    """
    require_package(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = path.name
    try:
        with tempfile.TemporaryDirectory() as folder:  # Transformers also reads a tokenizer_config.json next to it
            Path(folder, name).symlink_to(path.absolute())
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
            result: Any = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
            )
    except Exception as cause:  # Transformers and gguf raise whatever a damaged file or an unknown architecture causes
        raise ConfigError(
            f"{path} could not be read by Transformers' GGUF reader: {type(cause).__name__}: {cause!s:.400}. Copy "
            "the file again, or get the model as a folder with safetensors"
        ) from cause
    quantised, loaded = result
    if wrong := sorted(map(str, {*loaded["missing_keys"], *loaded["mismatched_keys"]})):  # Transformers draws them
        raise ConfigError(
            f"{path} lacks {len(wrong)} of the model's tensors, or has other shapes, such as {', '.join(wrong[:3])}. "
            "Give a complete file; the parts of a split one can be merged by llama.cpp's gguf-split --merge"
        )
    config = quantised.config
    del config.quantization_config  # save_pretrained refuses a model that is still marked as quantised
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.load_state_dict(quantised.state_dict())
    with output_errors(out, "Make room, or give another folder"), replacing(out) as aside:
        save_pretrained(model, dtype, aside)
        tokenizer.save_pretrained(aside)


@torch.no_grad()
def write_gguf(lm: Any, tokenizer: Any, stops: Sequence[int], path: Path, kind: str) -> None:
    """Write a model with its tokenizer, chat template and stop ids to one file. kind: one of GGUF_TYPES, of the
    matrices; vectors are float32. Needs host memory for the model and the file.

    Raises: ConfigError for a model, a tokenizer or stop ids that llama.cpp would read as others.
    """
    require_package(path)
    import gguf

    config = lm.config
    head_dim, act = getattr(config, "head_dim", None), getattr(config, "hidden_act", None)
    # Transformers reads every Qwen3 with heads of 128, so that others can't be compared.
    if config.model_type not in _ARCHITECTURES or act != "silu" or (config.model_type == "qwen3" and head_dim != 128):
        raise ConfigError(
            f"a model of type {config.model_type} ({act}, heads of {head_dim}) is not written as GGUF, but "
            f"{', '.join(_ARCHITECTURES)} with silu are, qwen3 with heads of 128; {_OTHER_WAY}"
        )
    if too_large := not_finite(lm.state_dict(), torch.float16 if kind in ("f16", "q8_0") else torch.float32):
        raise ConfigError(f"{too_large[0]} has values that are not finite in {kind}; export it by --type bf16")
    arch = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    _write_sizes(writer, config)
    _write_tokenizer(writer, tokenizer, config.vocab_size)
    if not 0 < len(stops) <= len(_STOPS):
        raise ConfigError(f"the run ended answers by the ids {[*stops]}; a GGUF file has room for 1 to {len(_STOPS)}")
    for key, stop in zip(_STOPS, sorted(stops, key=lambda i: i != tokenizer.eos_token_id)):
        getattr(writer, f"add_{key}_token_id")(stop)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, types = gguf.get_tensor_name_map(number, config.num_hidden_layers), gguf.GGMLQuantizationType
    for name, tensor in lm.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, as_type = tensor.float(), types[kind.upper()] if tensor.dim() > 1 else types.F32
        if as_type == types.Q8_0 and tensor.shape[-1] % 32:  # of a block
            as_type = types.F16
        if arch == "llama" and (found := re.search(r"\.(q|k)_proj\.", name)):  # llama.cpp rotates neighbours
            heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
            values = values.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise ConfigError(f"{name} has no name in GGUF's table of {arch}; export the model by --to hf")
        writer.add_tensor(own, gguf.quants.quantize(values.numpy(), as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"config.json scales positions (rope_type {rope['rope_type']}), which is not written as GGUF; {_OTHER_WAY}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # llama.cpp has no window for these models: within its length the result is the same.
    context = min(config.max_position_embeddings, getattr(config, "sliding_window", None) or 1 << 62)
    writer.add_context_length(context)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: Any, tokenizer: Any, num_ids: int) -> None:
    """num_ids: of the model, which may have more or fewer than the tokenizer."""
    from gguf import TokenType

    core = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = core["model"], core["added_tokens"]
    is_pieces, rule, prefix = _kind_of(core)
    tokens, types = [f"[PAD{i}]" for i in range(num_ids)], [TokenType.UNUSED] * num_ids
    scores, merges = [0.0] * num_ids, model["merges"]
    for token, i in [*model["vocab"].items(), *((each["content"], each["id"]) for each in added)]:
        if i < num_ids:
            is_byte = is_pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", token)
            tokens[i], types[i] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for each in added:
        if each["id"] < num_ids:
            types[each["id"]] = TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("llama" if is_pieces else "gpt2")
    if is_pieces:
        for rank, (left, right) in reversed([*enumerate(merges)]):  # the highest score is merged first
            scores[model["vocab"][left + right]] = -float(rank)
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(prefix)
        if model["unk_token"] is not None:
            types[model["vocab"][model["unk_token"]]] = TokenType.UNKNOWN
            writer.add_unk_token_id(model["vocab"][model["unk_token"]])
    else:
        writer.add_tokenizer_pre(rule)
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    template = tokenizer.chat_template
    template = template["default"] if isinstance(template, dict) else template
    # A run writes BOS only where its template does; programs that add it leave out that of the template.
    writer.add_add_bos_token(bool(template and "bos_token" in template))
    writer.add_add_eos_token(False)
    for key in ("bos", "pad"):
        if (number := getattr(tokenizer, f"{key}_token_id")) is not None:
            getattr(writer, f"add_{key}_token_id")(number)
    if template:
        writer.add_chat_template(template)


def _kind_of(core: dict[str, Any]) -> tuple[bool, str, bool]:
    """Whether the tokenizer has pieces with spaces as SentencePiece's BPE, else bytes as GPT-2's; llama.cpp's name of
    the rule that splits a text; whether a text gets a space before its first word."""
    model, split, normalizer = core["model"], core["pre_tokenizer"] or {}, core["normalizer"] or {}
    changes = [step["type"] for step in normalizer.get("normalizers", [normalizer] if normalizer else [])]
    steps = list[str]()
    for step in split.get("pretokenizers", [split]):
        if step.get("type") == "ByteLevel":
            steps += ["words of GPT-2"] * step["use_regex"] + ["a space before a text"] * step["add_prefix_space"]
        else:
            is_digits = step.get("type") == "Digits" and step["individual_digits"]
            steps.append("digits" if is_digits else step.get("pattern", {}).get("Regex", str(step.get("type"))))
    if model["type"] == "BPE" and model["byte_fallback"]:
        if not split and changes in (["Prepend", "Replace"], ["Replace"]):
            return True, "", changes[0] == "Prepend"
    elif model["type"] == "BPE" and changes in ([], ["NFC"]):
        rule = _RULES.get(tuple(steps), "")
        if rule and model["ignore_merges"] == (rule == "llama-bpe"):  # then a word that is a token needs no merges
            return False, rule, False
    raise ConfigError(
        f"the tokenizer ({model['type']}, normalizer {changes}) splits a text by {steps!r:.300}, for "
        f"which no name in llama.cpp is known here; {_OTHER_WAY}"
    )


def stop_ids_in(path: Path) -> set[int]:
    """The ids of a GGUF file that end an answer."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    return {int(fields[name].contents()) for key in _STOPS if (name := f"tokenizer.ggml.{key}_token_id") in fields}
