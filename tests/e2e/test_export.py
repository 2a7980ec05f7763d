"""`meshrl export`: what it writes is the run's model, with its template and stop ids; what is not is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_lm
from tiny_run import train, write_run
from tiny_tokenizers import THINKING, sentencepiece_tokenizer, tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from meshrl.cli import main
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.types import unsampled_row
from meshrl.model.exported import difference, read_policy
from meshrl.model.gguf import convert_gguf, stop_ids_in, write_gguf
from meshrl.tools.export import BOUNDS, Export

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -r requirements-gguf.txt")
INLINE = ("cluster.executor=inline", "cluster.num_train_ranks=1", "loop.num_steps=1", "data.eval_path=rows.jsonl")
INLINE += ("loop.save_best=false",)  # the newest model is exported
CHAT = ("data.chat_template=chat.jinja", "data.chat_template_kwargs={enable_thinking: false}", "data.eval_limit=8")
LORA = ("model.lora.enabled=true", "model.dtype=bfloat16", "model.lora.rank=4")
LLAMA = os.environ.get("MESHRL_LLAMA_PYTHON", "")  # a Python with llama-cpp-python


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `full`, `lora` and `sft`. Their tokenizer's EOS is not the token with which the template ends a turn."""
    folder = tmp_path_factory.mktemp("export")
    config = write_run(folder)
    tiny_tokenizer(eos="<|endoftext|>").save_pretrained(folder / "model")
    theirs = {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.1}
    (folder / "model" / "generation_config.json").write_text(json.dumps(theirs))
    (folder / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "chat.jinja").write_text(THINKING, newline="")
    train(config, "full", *INLINE, *CHAT)
    train(config, "lora", *INLINE, *CHAT, *LORA)
    values = json.loads(config.read_text())
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    sft = {"path": "chats.jsonl", "num_steps": 1, "rows_per_step": 1, "max_row_tokens": 99}
    sft |= {"chat_template": "chat.jinja", "chat_template_kwargs": {"enable_thinking": False}}
    config.write_text(json.dumps({**{key: values[key] for key in ("model", "train", "run")}, "sft": sft}))
    assert main(["sft", str(config), *INLINE[:2], "run.name=sft"]) == 0
    return folder / "runs"


@pytest.mark.parametrize(
    ("run", "to", "kind", "proofs"),
    [
        ("full", "hf", "", ["equal to the bit to the training state", "nats from the recorded", "copied to the byte"]),
        ("full", "gguf", "f16", ["KL", "renders 8 prompts"]),
        ("full", "gguf", "q8_0", ["KL", "renders 8 prompts"]),
        ("lora", "adapter", "", ["nats from the recorded", "adapter_model.safetensors: copied"]),
        ("lora", "gguf", "f32", ["nats from the recorded", "KL"]),
        ("sft", "hf", "", ["equal to the bit to the training state", "renders 16 prompts"]),
        ("sft", "gguf", "bf16", ["KL", "renders 16 prompts"]),
    ],
)
def test_an_export_is_the_runs_model_with_its_proof_and_a_card(
    runs: Path, tmp_path: Path, run, to, kind, proofs, capsys
):
    out = tmp_path / "out"
    words = ["--to", to, *(("--type", kind) if kind else ())]
    assert main(["export", str(runs / run), str(out), *words]) == 0
    printed, card = capsys.readouterr().out, (out / "README.md").read_text()
    for proof in proofs:
        assert proof in printed and proof in card
    stops = [tiny_tokenizer().convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    for fact in (
        "license: apache-2.0",
        "train.optimizer.lr: 0.01",
        "chat_template_kwargs",
        f"torch {torch.__version__}",
    ):
        assert fact in card
    assert run == "sft" or "held-out reward 0." in card
    assert str(runs.parent) not in card, "it may be pushed"
    if to == "gguf":
        (file,) = out.glob("*.gguf")
        assert stop_ids_in(file) == {*stops}
        modelfile = (out / "Modelfile").read_text()
        assert modelfile.count("PARAMETER stop") == 2 and (
            run == "sft" or "PARAMETER repeat_penalty 1.0\n" in modelfile
        )
        return
    generation = GenerationConfig.from_pretrained(out)
    used = generation.temperature, generation.top_p, generation.top_k, generation.repetition_penalty
    assert used == ((0.6, 0.8, None, 1.1) if run == "sft" else (1.0, 1.0, 0, 1.0)), "as the run sampled"
    assert {*json.loads((out / "generation_config.json").read_text())["eos_token_id"]} == {*stops}
    asked = AutoTokenizer.from_pretrained(out).apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    assert asked.endswith("assistant\n<think></think>"), "without the variables of the run"
    base = AutoModelForCausalLM.from_pretrained(runs.parent / "model" if to == "adapter" else out)
    if to == "adapter":
        from peft import PeftModel

        assert PeftModel.from_pretrained(base, out).peft_config


def test_merged_weights_that_lost_the_adapters_change_are_measured(runs: Path, tmp_path: Path, monkeypatch):
    """bfloat16 loses most of the change of one step; the bound decides."""
    printed = Export(runs / "lora", "hf", out=tmp_path / "out").write()
    assert "KL" in printed and "copied to the byte" in printed and not (tmp_path / "out" / "adapter").exists()
    monkeypatch.setitem(BOUNDS, "merged", (1e-12, 1.0))
    with pytest.raises(MeshrlError, match=r"the exported model is not the run's: KL .* Try --to adapter"):
        Export(runs / "lora", "hf", out=tmp_path / "strict").write()


def test_an_adapter_is_exported_from_a_training_state_alone(runs: Path, tmp_path: Path):
    run = Path(shutil.copytree(runs / "lora", tmp_path / "lora"))
    own = run / "checkpoints" / "step_000001" / "model"
    expected = load_file(own / "adapter" / "adapter_model.safetensors")
    shutil.rmtree(own)
    assert "nats from the recorded" in Export(run, "adapter").write()
    found = load_file(run / "exports" / "adapter" / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def transposed(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def other_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text(THINKING.replace("<|im_end|>\n", "<|im_end|> "), newline="")


def missing_stop(model: Path) -> None:
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 2}))


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (transposed, "was changed: model.layers.0.self_attn.o_proj.weight is not that of"),
        (other_template, "the exported chat template is not the run's: it renders"),
        (missing_stop, "ends answers by the ids"),
    ],
)
def test_a_model_that_was_changed_after_the_run_is_refused(
    runs: Path, tmp_path: Path, to: str, change: Callable[[Path], None], expected: str
):
    if to == "gguf" and change is missing_stop:
        return  # its stop ids are those that the run recorded
    run = Path(shutil.copytree(runs / "full", tmp_path / "full"))
    change(run / "checkpoints" / "step_000001" / "model")
    with pytest.raises(MeshrlError, match=expected):
        Export(run, to).write()
    assert not any((run / "exports").iterdir())
    if change is transposed:  # without a state, the recorded logprobs show it
        shutil.rmtree(run / "checkpoints" / "step_000001" / "state")
        with pytest.raises(MeshrlError, match="is not the model that the run evaluated"):
            Export(run, to).write()


def transposing(values: np.ndarray, kind: Any, quantize: Any = gguf.quants.quantize) -> np.ndarray:
    is_square = values.ndim == 2 and values.shape[0] == values.shape[1]
    return quantize(np.ascontiguousarray(values.T) if is_square else values, kind)


@pytest.mark.parametrize(
    ("place", "fault", "expected"),
    [
        ((gguf.quants, "quantize"), transposing, "_proj.weight differs most, by 1"),
        ((gguf.GGUFWriter, "add_eot_token_id"), lambda *_: None, "ends answers by the ids"),
        (
            (gguf.GGUFWriter, "add_chat_template"),
            lambda self, text: self.add_string("tokenizer.chat_template", text.replace("assistant", "model")),
            "the exported chat template is not the run's",
        ),
        (
            (gguf.GGUFWriter, "add_rope_freq_base"),
            lambda self, base: self.add_float32("qwen2.rope.freq_base", 9 * base),
            "KL",
        ),
    ],
)
def test_a_gguf_file_with_a_planted_fault_is_refused(runs: Path, tmp_path: Path, monkeypatch, place, fault, expected):
    monkeypatch.setattr(*place, fault)
    if expected == "KL":
        monkeypatch.setitem(BOUNDS, "f16", (1e-7, 1.0))
    with pytest.raises(MeshrlError, match=expected):
        Export(runs / "full", "gguf", "f16", tmp_path / "out").write()
    assert not (tmp_path / "out").exists()


HEADS = {"llama": {"head_dim": 16}, "mistral": {"head_dim": 16, "sliding_window": None}, "qwen3": {"head_dim": 128}}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_family_is_read_back_from_gguf_as_it_was(family: str, tmp_path: Path):
    """With biases where the family has them, heads of another size than hidden size / heads, and an untied head."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    lm = tiny_lm(family, vocab_size=300, **HEADS.get(family, {}))
    write_gguf(lm, tokenizer, [2], tmp_path / "x.gguf", "f32")
    convert_gguf(tmp_path / "x.gguf", tmp_path / "read", torch.float32)
    lm.save_pretrained(tmp_path / "own")
    rows = [unsampled_row("x", np.arange(4, n + 4, dtype=np.int32), np.arange(n) > 0) for n in (36, 80)]
    found = difference(read_policy(tmp_path / "own"), read_policy(tmp_path / "read"), rows)
    assert found.kl_max < 1e-6 and found.share == 0 and found.num_tokens == 35 + 64, "64 of the longer one"


@pytest.mark.parametrize(
    ("family", "changes", "tokenizer", "expected"),
    [
        ("gemma2", {}, tiny_tokenizer, "a model of type gemma2"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            None,
            "scales positions",
        ),
        ("llama", {}, tiny_tokenizer, "for which no name in llama.cpp is known here"),  # it splits no words
        ("llama", {}, sentencepiece_tokenizer, "for which no name in llama.cpp is known here"),  # nor marks spaces
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path, family, changes, tokenizer, expected):
    with pytest.raises(ConfigError, match=expected):
        write_gguf(
            tiny_lm(family, vocab_size=300, **changes), tokenizer and tokenizer(), [2], tmp_path / "x.gguf", "f16"
        )


@pytest.mark.parametrize("stops", [[], [1, 2, 3, 4]])
def test_stop_ids_for_which_gguf_has_no_room_are_refused(tmp_path: Path, stops: list[int]):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(ConfigError, match="a GGUF file has room for 1 to 3"):
        write_gguf(tiny_lm("llama", vocab_size=300), tokenizer, stops, tmp_path / "x.gguf", "f16")


def test_a_push_needs_a_token_and_uploads_the_folder(runs: Path, tmp_path: Path, monkeypatch):
    import huggingface_hub

    calls = []

    class Hub:
        def create_repo(self, name: str, **more: Any) -> None:
            calls.append((name, more))

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
            calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    export = Export(runs / "full", "hf", out=tmp_path / "out")
    with pytest.raises(ConfigError, match="needs a token that may write there; set HF_TOKEN"):
        export.write(push="me/model")
    assert not (tmp_path / "out").exists() and not calls
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    with pytest.raises(ConfigError, match="written organisation/name"):
        export.write(push="model")
    assert "pushed to https://hub/me/model" in export.write(push="me/model")
    assert calls[0] == ("me/model", {"private": True, "exist_ok": True})
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {*calls[1][1]}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Hub, "upload_folder", fail)
    with pytest.raises(
        MeshrlError, match=r"is complete, but was not pushed to me/model: no room\. Push it by: hf upload"
    ):
        Export(runs / "full", "hf", out=tmp_path / "again").write(push="me/model")
    assert (tmp_path / "again" / "model.safetensors").is_file()


def test_what_can_not_be_exported_is_refused_before_anything_is_written(runs: Path, tmp_path: Path, capsys):
    assert main(["export", str(runs / "full"), str(tmp_path / "x"), "--to", "hf", "--type", "f16"]) == 2
    assert main(["export", str(runs / "full"), str(tmp_path / "x"), "--to", "adapter"]) == 2
    assert main(["export", str(runs.parent / "model"), str(tmp_path / "x"), "--to", "hf"]) == 2
    assert main(["export", str(runs / "full"), str(runs), "--to", "hf"]) == 2
    run = Path(shutil.copytree(runs / "full", tmp_path / "full"))
    shutil.rmtree(run / "rollouts")
    assert main(["export", str(run), "--to", "hf"]) == 1
    (run / "config.yaml").unlink()
    assert main(["export", str(run), "--to", "hf"]) == 1
    assert not (tmp_path / "x").exists() and not any((run / "exports").iterdir())
    assert "its model could be compared; meshrl convert STEP FOLDER" in (text := capsys.readouterr().err)
    assert "config.yaml, of which the model was trained, can't be read" in text


def test_convert_of_a_run_is_an_export(runs: Path, tmp_path: Path, capsys):
    assert main(["convert", str(runs / "full"), str(tmp_path / "out")]) == 0
    assert "nats from the recorded" in capsys.readouterr().out and (tmp_path / "out" / "README.md").is_file()


_IN_LLAMA_CPP = """
import json, sys, numpy as np
from llama_cpp import Llama, llama_vocab_is_eog
asked = json.load(sys.stdin)
llm = Llama(model_path=sys.argv[1], n_ctx=256, verbose=False, logits_all=True, n_threads=1)
tokens = [llm.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]
logprobs = []
for ids, start in asked["rows"]:
    llm.reset(); llm.eval(ids)
    scores = np.array(llm.scores[start - 1 : len(ids) - 1], np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    logprobs += scores[np.arange(len(scores)), ids[start:]].tolist()
ends = [i for i in range(llm.n_vocab()) if llama_vocab_is_eog(llm._model.vocab, i)]
print(json.dumps({"tokens": tokens, "logprobs": logprobs, "ends": ends}))
"""


def in_llama_cpp(file: Path, texts: list[str], rows: list[tuple[list[int], int]] = ()) -> dict[str, Any]:
    """rows: token ids, and the first one whose logprob is returned."""
    words = [LLAMA, "-c", _IN_LLAMA_CPP, str(file)]
    done = subprocess.run(words, input=json.dumps({"texts": texts, "rows": rows}), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


needs_llama = pytest.mark.skipif(not LLAMA, reason="MESHRL_LLAMA_PYTHON names no Python with llama-cpp-python")


@needs_llama
def test_llama_cpp_answers_as_the_runs_evaluation_did(runs: Path, tmp_path: Path):
    from meshrl.monitor.rollout_log import read_rollouts

    Export(runs / "full", "gguf", "f16", tmp_path / "out").write()
    turns = [each.trajectory.turns[0] for each in read_rollouts(runs / "full" / "rollouts" / "eval_000001.jsonl")]
    tokenizer = AutoTokenizer.from_pretrained(runs / "full" / "checkpoints" / "step_000001" / "model")
    texts = [tokenizer.decode(turn.context_ids.tolist()) for turn in turns]
    rows = [([*turn.context_ids.tolist(), *turn.output_ids.tolist()], len(turn.context_ids)) for turn in turns]
    found = in_llama_cpp(tmp_path / "out" / "full-f16.gguf", texts, rows)
    assert found["tokens"] == [turn.context_ids.tolist() for turn in turns]
    assert np.abs(np.array(found["logprobs"]) - np.concatenate([turn.logprobs for turn in turns])).max() < 0.01
    assert {*found["ends"]} == {*turns[0].sampling.stop_token_ids}


TEXT = "Hello  world's 12345 don't\n\n  x= 3.14\tÄpfel 日本 👍 we'LL  end."
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
RULES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT % r"\p{N}"), "isolated"), BYTES]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT % r"\p{N}{1,3}"), "isolated"), BYTES]),
}


def with_merges(rule: str) -> Any:
    """A tokenizer that splits a text by this rule of llama.cpp, and whose merges would also join what it splits."""
    core = Tokenizer(BPE(ignore_merges=rule == "llama-bpe"))
    core.pre_tokenizer, core.decoder = BYTES, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([TEXT] * 3, BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False))
    core.pre_tokenizer = RULES[rule]
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


def with_pieces() -> Any:
    """Llama 2's kind of tokenizer: pieces with a space at their start, and bytes for the rest."""
    pieces = [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *dict.fromkeys("▁" + TEXT[:30].replace(" ", "▁")),
        "He",
        "ll",
    ]
    pieces += ["Hell", "Hello", "▁Hello", "▁▁", "or", "wor", "▁wor", "ld", "▁world", "12", "123"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *pieces])}
    splits = ((token[:at], token[at:]) for token in vocab for at in range(1, len(token)) if token[0] != "<")
    merges = [(left, right) for left, right in splits if left in vocab and right in vocab]
    core = Tokenizer(BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


@needs_llama
@pytest.mark.parametrize("rule", [*RULES, "pieces"])
def test_llama_cpp_makes_the_tokens_of_the_runs_tokenizer(tmp_path: Path, rule: str):
    tokenizer = with_pieces() if rule == "pieces" else with_merges(rule)
    lm = tiny_lm("llama", vocab_size=len(tokenizer) + 3)  # a model's embedding is often larger
    write_gguf(lm, tokenizer, [tokenizer.eos_token_id], tmp_path / "x.gguf", "q8_0")
    texts = [TEXT, TEXT[::-1], f"{TEXT}<|im_end|>Hello 12345", "1234567 abc", ""]
    found = in_llama_cpp(tmp_path / "x.gguf", texts)["tokens"]
    assert found == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert len({len(tokenizer.tokenize(text)) for text in texts}) > 2
