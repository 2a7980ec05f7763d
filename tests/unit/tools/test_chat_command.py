"""`meshrl chat`: answers of the embedded engine in the terminal."""

from __future__ import annotations

import io
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_qwen2
from tiny_tokenizers import tiny_tokenizer
from tiny_vision import drawing, make_vision_folder

from meshrl.cli import main
from meshrl.config.chat import ChatSettings
from meshrl.core.errors import ConfigError
from meshrl.data.chat import render, stop_token_ids
from meshrl.tools.chat import Chat, LoadedModel, chat

GREEDY = ChatSettings(temperature=0, max_new_tokens=12, dtype="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose greedy answers have different tokens."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_qwen2(vocab_size=len(tokenizer), initializer_range=0.5).save_pretrained(folder)
    return str(folder)


def greedy(model: str, messages: list[dict[str, str]]) -> str:
    """The text of Transformers' own greedy answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = render(tokenizer, messages)
    stops = list(stop_token_ids(tokenizer, model))
    out = lm.generate(
        torch.from_numpy(ids.astype(np.int64))[None], max_new_tokens=12, do_sample=False, eos_token_id=stops
    )
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def without_remark(text: str) -> str:
    return re.sub(r" \[cut at \w+ after \d+ tokens\]$", "", text)


def test_each_answer_is_streamed_and_continues_the_conversation_until_it_is_reset(model):
    each = Chat(LoadedModel(model, GREEDY), "tiny", None)
    messages = []
    for question in ("ab?", "and 12?"):
        messages.append({"role": "user", "content": question})
        parts = [without_remark(text) for text in each.answer(question)]
        assert len(set(parts)) > 3 and all(b.startswith(a) for a, b in pairwise(parts))
        assert parts[-1] == greedy(model, messages)
        messages.append({"role": "assistant", "content": parts[-1]})
        assert each.messages == messages
    each.reset()
    assert without_remark(list(each.answer("ab?"))[-1]) == messages[1]["content"]


def test_special_tokens_of_an_answer_are_shown(model, tmp_path):
    """A letter of the greedy answer becomes a special token."""
    messages = [{"role": "user", "content": "ab?"}]
    answer = greedy(model, messages)
    letter = next(c for c in answer if c.isascii() and c.isprintable() and c not in "ab? userassistant")
    shutil.copytree(model, tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [letter]})
    tokenizer.save_pretrained(tmp_path / "model")
    assert greedy(str(tmp_path / "model"), messages) == answer.replace(letter, "") != answer
    *_, shown = Chat(LoadedModel(str(tmp_path / "model"), GREEDY), "tiny", None).answer("ab?")
    assert without_remark(shown) == answer


def test_an_interrupted_answer_stays_in_the_conversation_and_the_next_question_works(model):
    each = Chat(LoadedModel(model, GREEDY), "tiny", "be brief")
    answer = each.answer("ab?")
    first = next(answer)
    answer.close()
    assert [m["role"] for m in each.messages] == ["system", "user", "assistant"]
    assert each.messages[-1]["content"] == first
    assert list(each.answer("and 12?"))


def test_one_question_prints_the_answer_on_stdout_and_nothing_else(model, capsys):
    words = ["ab?", "temperature=0", "max_new_tokens=12", "dtype=float32"]
    assert main(["chat", model, *words]) == 0
    expected = greedy(model, [{"role": "user", "content": "ab?"}])
    printed = capsys.readouterr().out
    assert without_remark(printed.rstrip("\n")) == "".join(
        c if c.isprintable() else f"\\x{ord(c):02x}" for c in expected
    )


def test_a_seed_gives_the_same_answer_at_the_same_place_of_a_conversation(model):
    settings = ChatSettings(temperature=1, max_new_tokens=12, dtype="float32", seed=3)
    each = Chat(LoadedModel(model, settings), "tiny", None)
    first, second = (list(each.answer("ab?"))[-1] for _ in range(2))
    each.reset()
    assert [list(each.answer("ab?"))[-1] for _ in range(2)] == [first, second] and first != second


def test_typed_questions_are_answered_by_both_models_and_commands_are_followed(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab?\n/reset\n/wrong\n\nab?\n/exit\nnever asked\n"))
    chat([model, model], ["temperature=0", "max_new_tokens=4", "dtype=float32"], None)
    printed = capsys.readouterr()
    assert printed.out.count(f"== {model}") == 4
    first, second = printed.out[: len(printed.out) // 2], printed.out[len(printed.out) // 2 :]
    assert first == second  # the conversation was forgotten
    assert "'/wrong' is not a command" in printed.err


def test_ctrl_c_after_an_answer_does_not_end_the_conversation_in_a_terminal(model, monkeypatch, capsys):
    typed = iter([KeyboardInterrupt, "ab?", KeyboardInterrupt, "ab?", EOFError])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    chat([model], ["temperature=0", "max_new_tokens=4", "dtype=float32"], None)
    assert capsys.readouterr().out.count("[cut at length after 4 tokens]") == 2 and next(typed, None) is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["temprature=0"], "did you mean 'temperature'"),
        (["temperature=-1"], "temperature=-1"),
        (["max_new_tokens=many"], "max_new_tokens='many'"),
        (["dtype=int8"], "'bfloat16', 'float16' or 'float32'"),
        (["seed=1.5"], "seed=1.5"),
        (["one", "two"], "2 questions"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(words, error):
    with pytest.raises(ConfigError, match=error):
        chat(["no/model"], words, None)


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="neither a model"):
        chat([str(tmp_path)], ["hi"], None)
    with pytest.raises(ConfigError, match="does not exist"):
        chat([str(tmp_path / "gone")], ["hi"], None)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ConfigError, match=r"is a file.*meshrl convert"):
        chat([str(tmp_path / "x.gguf")], ["hi"], None)


def test_a_question_that_does_not_fit_is_reported_and_the_chat_goes_on(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * 400 + "\nab?\n"))
    chat([model], ["temperature=0", "max_new_tokens=4", "dtype=float32"], None)
    printed = capsys.readouterr()
    assert "meshrl: " in printed.err and "tokens" in printed.err and printed.out.strip()


def test_a_run_with_an_agent_is_noted_because_no_tool_is_used(model, tmp_path, capsys):
    for name, kind in (("plain", "single_turn"), ("tools", "multi_turn")):
        shutil.copytree(model, tmp_path / name / "checkpoints" / "step_000001" / "model")
        (tmp_path / name / "config.yaml").write_text(f"agent:\n  kind: {kind}\n")
        chat([str(tmp_path / name)], ["temperature=0", "max_new_tokens=2", "dtype=float32", "ab?"], None)
        noted = "trained with agent.kind multi_turn, but a chat uses no agent" in capsys.readouterr().err
        assert noted == (name == "tools")


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision-language model whose answers depend on the image, and two images."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = make_vision_folder(tmp_path_factory.mktemp("vision") / "model", "llava")
    config = AutoConfig.from_pretrained(folder)
    config.text_config.initializer_range = config.vision_config.initializer_range = config.initializer_range = 0.5
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    for seed in (1, 2):
        drawing(seed=seed).save(folder.parent / f"{seed}.png")
    return folder


def greedy_about(model: Path, images: list[Path], messages: list[dict]) -> str:
    """The text of Transformers' own greedy answer, to the images of the first message."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoTokenizer, LlavaImageProcessorPil, LlavaProcessor

    tokenizer = AutoTokenizer.from_pretrained(model)
    stated = json.loads((model / "processor_config.json").read_text())
    kwargs = {name: value for name, value in stated.items() if name != "processor_class"}
    processor = LlavaProcessor(LlavaImageProcessorPil.from_pretrained(model), tokenizer, **kwargs)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opened = [Image.open(path) for path in images]
    inputs = processor(images=opened, text=[text], return_tensors="pt", add_special_tokens=False)
    lm = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    stops = list(stop_token_ids(tokenizer, str(model)))
    banned = [[lm.config.image_token_id]]
    out = lm.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=stops, bad_words_ids=banned)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_images_belong_to_the_first_question_and_stay_in_the_conversation_until_a_reset(vision_model: Path):
    files = [vision_model.parent / "1.png", vision_model.parent / "2.png"]
    each = Chat(LoadedModel(str(vision_model), GREEDY), "tiny", None, [str(path) for path in files])
    parts = [{"type": "image", "image": f"image-{i}"} for i in range(2)]
    messages: list[dict] = [{"role": "user", "content": [*parts, {"type": "text", "text": "ab?"}]}]
    answers = [without_remark(list(each.answer("ab?"))[-1])]
    assert answers[0] == greedy_about(vision_model, files, messages)
    assert answers[0] != greedy_about(vision_model, files[::-1], messages), "the answer depends on the images"
    messages += [{"role": "assistant", "content": answers[0]}, {"role": "user", "content": "and 12?"}]
    assert without_remark(list(each.answer("and 12?"))[-1]) == greedy_about(vision_model, files, messages)
    each.reset()
    assert without_remark(list(each.answer("ab?"))[-1]) == answers[0]


def test_images_that_can_not_be_read_and_models_of_text_are_refused(model, vision_model: Path, tmp_path, capsys):
    image = str(vision_model.parent / "1.png")
    assert main(["chat", model, "ab?", "--image", image]) == 2
    assert "reads text only: its config.json has no vision_config. Remove --image" in capsys.readouterr().err
    (tmp_path / "notes.png").write_text("no image")
    for wrong, error in ((tmp_path / "gone.png", "gone.png"), (tmp_path / "notes.png", "is not an image")):
        assert main(["chat", str(vision_model), "ab?", "--image", image, "--image", str(wrong)]) != 0
        assert error in capsys.readouterr().err
    assert main(["chat", str(vision_model), "an <image>?", "--image", image]) != 0
    assert "the question has '<image>', which stands for an image" in capsys.readouterr().err
