"""A GGUF file becomes a model folder with the same weights, tokens and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_lm, tiny_qwen2
from tiny_tokenizers import CHATML, tiny_tokenizer

from meshrl.core.errors import CheckpointError, ConfigError
from meshrl.data.chat import load_tokenizer, render
from meshrl.model.recipe import load_causal_lm
from meshrl.tools.convert import convert

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -r requirements-gguf.txt")

# Without digits and newlines: GGUF only names the rule that splits a text into words, and Qwen2's differs from the tiny
# tokenizer's there.
MESSAGES = [{"role": "user", "content": "ab Ä?"}]
PARTS = {  # of a block, GGUF's name -> Transformers' name
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(path: Path, lm: torch.nn.Module, tokenizer, without: str = "nothing", kind: str = "qwen2") -> None:
    config = lm.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token.startswith("<|") else 1 for token, _ in vocab])  # control or normal
    writer.add_token_merges(["a b", "1 2", "Ċ Ċ"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHATML)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for i in range(config.num_hidden_layers):
        names |= {f"blk.{i}.{short}": f"model.layers.{i}.{long}" for short, long in PARTS.items()}
    state = lm.state_dict()
    for short, long in names.items():
        for kind in ("weight", "bias"):
            if f"{long}.{kind}" in state and without not in short:
                writer.add_tensor(f"{short}.{kind}", state[f"{long}.{kind}"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder_with_the_same_model_tokens_and_template(tmp_path):
    tokenizer = tiny_tokenizer()
    lm = tiny_qwen2(vocab_size=len(tokenizer))
    write_gguf(tmp_path / "tiny.gguf", lm, tokenizer)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    read = load_causal_lm(tmp_path / "out").state_dict()
    expected = {name: value.bfloat16().float() for name, value in lm.state_dict().items()}
    torch.testing.assert_close(dict(read), expected, rtol=0, atol=0)
    converted = load_tokenizer(tmp_path / "out")
    assert render(converted, MESSAGES).tolist() == render(tokenizer, MESSAGES).tolist()
    assert converted.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(CheckpointError, match="already exists"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")


def test_a_damaged_gguf_file_is_refused_by_name(tmp_path):
    tokenizer = tiny_tokenizer()
    write_gguf(tmp_path / "tiny.gguf", tiny_qwen2(vocab_size=len(tokenizer)), tokenizer)
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"tiny\.gguf could not be read by Transformers' GGUF reader"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_without_some_tensors_is_refused(tmp_path):
    """Such as the first part of a split file. Transformers would fill them with random numbers."""
    tokenizer = tiny_tokenizer()
    write_gguf(tmp_path / "part.gguf", tiny_qwen2(vocab_size=len(tokenizer)), tokenizer, without="blk.1.ffn_")
    with pytest.raises(ConfigError, match=r"part\.gguf lacks 4 of the model's tensors.*model\.layers\.1\.mlp"):
        convert(tmp_path / "part.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_neither_a_checkpoint_nor_a_gguf_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.gguf does not exist"):
        convert(tmp_path / "gone.gguf", tmp_path / "out")
    (tmp_path / "other.gguf").write_bytes(b"something else")
    with pytest.raises(
        CheckpointError, match=r"other\.gguf is neither a checkpoint, nor a run with one, nor a GGUF file"
    ):
        convert(tmp_path / "other.gguf", tmp_path / "out")


def test_without_the_package_gguf_the_error_names_it(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("meshrl.model.gguf.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'meshrl\[gguf\]'"):
        convert(tmp_path / "x.gguf", tmp_path / "out")


def test_code_next_to_the_file_is_not_run_whatever_the_user_answers(tmp_path, monkeypatch):
    """A folder of another user, whose tokenizer has a class of its own. Transformers would ask whether to run it."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    tokenizer = tiny_tokenizer()
    lm = tiny_lm("llama", vocab_size=len(tokenizer))  # Transformers has no tokenizer class for this type of model
    write_gguf(theirs / "tiny.gguf", lm, tokenizer, kind="llama")
    code = {name: "planted.Planted" for name in ("AutoConfig", "AutoModelForCausalLM")}
    settings = {"tokenizer_class": "Planted", "auto_map": code | {"AutoTokenizer": ["planted.Planted", None]}}
    for name in ("tokenizer_config.json", "config.json"):
        (theirs / name).write_text(json.dumps({"model_type": "planted"} | settings))
    (theirs / "planted.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    convert(theirs / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "mark").exists() and not (tmp_path / "modules").exists()
    assert load_tokenizer(tmp_path / "out").eos_token_id == tokenizer.eos_token_id
