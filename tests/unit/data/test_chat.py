from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_tokenizers import CHATML, DROPS_THINKING, sentencepiece_tokenizer, tiny_tokenizer

from meshrl.core.errors import DataError
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.data.chat import (
    ChatFiles,
    continuation_ids,
    load_tokenizer,
    render,
    render_text,
    sft_row,
    stop_token_ids,
    write_chat,
)

USER = {"role": "user", "content": "ab?"}
ANSWER = {"role": "assistant", "content": "12"}
TOOL = {"role": "tool", "content": "ok"}


def names(tokenizer, ids, mask):
    return tokenizer.convert_ids_to_tokens(ids[mask].tolist())


def test_a_rendered_prompt_has_one_bos_although_the_tokenizer_adds_its_own():
    """Encoding the template's text as a plain string gives a second BOS."""
    tokenizer = tiny_tokenizer()
    ids = render(tokenizer, [USER])
    assert ids.dtype == np.int32
    assert (ids == tokenizer.bos_token_id).sum() == 1
    doubled = tokenizer(tokenizer.decode(ids.tolist())).input_ids
    assert doubled.count(tokenizer.bos_token_id) == 2


def test_render_ends_with_the_generation_prompt_only_when_asked():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(render(tokenizer, [USER]).tolist()).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(render(tokenizer, [USER], add_generation_prompt=False).tolist()).endswith("<|im_end|>\n")


def test_a_tokenizer_without_a_template_is_refused_with_advice():
    with pytest.raises(DataError, match=r"no chat template.*chat_template\.jinja"):
        render(tiny_tokenizer(template=None), [USER])


def test_chatml_is_a_built_in_template_for_tokenizers_that_have_its_tokens(tmp_path):
    tiny_tokenizer(template=None).save_pretrained(tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base", "chatml")
    text = tokenizer.decode(render(tokenizer, [USER, ANSWER, USER]).tolist())
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in (USER, ANSWER, USER))
    assert text == turns + "<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_token_ids(tokenizer)
    sentencepiece_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match=r"no token <\|im_end\|>.*<\|im_start\|>"):
        load_tokenizer(tmp_path / "other", "chatml")


def test_a_template_that_refuses_the_messages_names_their_roles():
    picky = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    with pytest.raises(DataError, match=r"roles \['user'\].*system first"):
        render(tiny_tokenizer(template=picky), [USER])


def test_a_saved_tokenizer_loads_and_renders_the_same(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert np.array_equal(render(load_tokenizer(tmp_path), [USER]), render(tokenizer, [USER]))


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"no tokenizer could be loaded.*config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("eos_in_file", "expected"),
    [([2, 3], (2, 3)), (3, (2, 3)), ([3, 3, 1], (1, 2, 3)), (None, (2,)), ([], (2,))],
)
def test_stop_ids_are_taken_from_tokenizer_and_generation_config(tmp_path, eos_in_file, expected):
    """Several EOS ids."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_in_file}))
    tokenizer = tiny_tokenizer()  # its EOS is id 2
    assert stop_token_ids(tokenizer, tmp_path) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, (2, 3)),  # the EOS is 3, as in a base model, and the template ends a turn with 2
        (CHATML.replace("{{ m.content }}<", "{{ m.content }}\n <"), (2, 3)),
        (CHATML.replace("{{ m.content }}", "<|bos|>final<|im_start|>{{ m.content }}"), (2, 3)),  # channels before it
        (CHATML.replace("<|im_end|>", "</s>"), (3,)),  # the end is plain text
        (CHATML.replace("<|im_end|>", " (end)<|im_end|>"), (3,)),
        (CHATML.replace("<|im_end|>", "<|endoftext|>"), (3,)),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", (3,)),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}", (3,)),
        (None, (3,)),
    ],
)
def test_the_token_with_which_the_template_ends_a_turn_is_a_stop_id(template, expected):
    """A sampler with only the tokenizer's EOS would not stop after an answer, but at its length limit."""
    assert stop_token_ids(tiny_tokenizer(template, eos="<|endoftext|>")) == expected


def test_stop_ids_of_tokenizer_template_and_generation_config_come_together(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert stop_token_ids(tiny_tokenizer(eos="<|endoftext|>"), tmp_path) == (1, 2, 3, 9)


@pytest.mark.parametrize(
    ("stops", "config", "generation", "eos"),
    [
        ((0, 2), {"eos_token_id": 0}, {"eos_token_id": 0, "top_k": 5}, (0, [0, 2])),
        ((2,), {"eos_token_id": [2, 7]}, {}, (2, 2)),  # config.json names an id at which the run did not stop
        ((2, 3), {"text_config": {"eos_token_id": 7}}, {"eos_token_id": [7]}, (2, [2, 3])),
        ((), {"eos_token_id": 2}, {"eos_token_id": 2}, (None, None)),  # the run ended answers by their length only
        (None, {"eos_token_id": 2}, {"eos_token_id": 3}, (2, 3)),  # not known
    ],
)
def test_the_files_of_a_written_model_have_exactly_the_stop_ids_of_its_run(tmp_path, stops, config, generation, eos):
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (tmp_path / name).write_text(json.dumps(values))
    write_chat(tmp_path, ChatFiles("a template", stops))
    written = json.loads((tmp_path / "config.json").read_text())
    written_generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert (written.get("text_config", written)["eos_token_id"], written_generation["eos_token_id"]) == eos
    assert written_generation | {"eos_token_id": 0} == generation | {"eos_token_id": 0}
    assert (tmp_path / "chat_template.jinja").read_text() == "a template"


def test_stop_ids_need_no_generation_config(tmp_path):
    assert stop_token_ids(tiny_tokenizer(), tmp_path) == (2,)
    assert stop_token_ids(tiny_tokenizer()) == (2,)


@pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, -1]}'])
def test_a_broken_generation_config_is_refused_by_name(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(DataError, match="generation_config"):
        stop_token_ids(tiny_tokenizer(), tmp_path)


def test_sft_trains_the_answer_and_its_end_token_and_nothing_after():
    """EOS is trained; ChatML's newline after it is not, because a sampler stops before it."""
    tokenizer = tiny_tokenizer()
    ids, mask = sft_row(tokenizer, [USER, ANSWER])
    assert names(tokenizer, ids, mask) == ["12", "<|im_end|>"]
    assert mask[-1] and ids[-1] == tokenizer.eos_token_id
    assert np.array_equal(ids[: -int(mask.sum())], render(tokenizer, [USER]))


@pytest.mark.parametrize("pad", ["<|endoftext|>", "<|im_end|>"])
def test_sft_trains_the_end_token_when_it_is_also_the_pad_token(pad):
    """A mask made from token values would lose it."""
    tokenizer = tiny_tokenizer(pad=pad)
    ids, mask = sft_row(tokenizer, [USER, ANSWER])
    assert names(tokenizer, ids, mask) == ["12", "<|im_end|>"]


def test_sft_trains_an_empty_answer_as_its_end_token_alone():
    """EOS first."""
    tokenizer = tiny_tokenizer()
    ids, mask = sft_row(tokenizer, [USER, {"role": "assistant", "content": ""}])
    assert names(tokenizer, ids, mask) == ["<|im_end|>"]


def test_sft_rows_of_several_turns_have_the_same_ids_as_sampler_and_agent_would_make():
    """The parts are prompt, sampled answer, the template's tokens, sampled answer."""
    tokenizer = tiny_tokenizer()
    ids, mask = sft_row(tokenizer, [USER, ANSWER, TOOL, {"role": "assistant", "content": "ab"}])
    assert names(tokenizer, ids, mask) == ["12", "<|im_end|>", "ab", "<|im_end|>"]
    eos = tokenizer.eos_token_id
    first, second = (tokenizer(t, add_special_tokens=False).input_ids for t in ("12", "ab"))
    added = continuation_ids(tokenizer, [TOOL], (eos,), ended_by=eos)
    assert tokenizer.decode(added.tolist()) == "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"
    assert ids.tolist() == [*render(tokenizer, [USER]), *first, eos, *added, *second, eos]


def test_after_a_stop_string_the_template_ends_the_turn_itself():
    """The answer has no end token, and the next turn must not follow without one."""
    tokenizer = tiny_tokenizer()
    added = continuation_ids(tokenizer, [TOOL], (2,))
    assert tokenizer.decode(added.tolist()) == "<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"
    np.testing.assert_array_equal(added[1:], continuation_ids(tokenizer, [TOOL], (2,), ended_by=2))


ROLE_TOKENS = (  # no end of a turn: the token of the next message's role ends it
    "{% for m in messages %}{{ {'user': '<|im_start|>', 'tool': '<|im_end|>'}.get(m.role, 'assistant:') }}"
    "{{ m.content }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "ended_by", "expected"),
    [
        (ROLE_TOKENS, 2, "okassistant:"),
        (ROLE_TOKENS, 1, "<|im_end|>okassistant:"),
        (ROLE_TOKENS, 3, "<|im_end|>okassistant:"),
        (ROLE_TOKENS, None, "<|im_end|>okassistant:"),
        (CHATML, 2, "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, 3, "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_the_next_role_has_its_token_whichever_stop_id_was_sampled(template, ended_by, expected):
    tokenizer = tiny_tokenizer(template)
    added = continuation_ids(tokenizer, [TOOL], (1, 2, 3) if template == ROLE_TOKENS else (2, 3), ended_by=ended_by)
    assert tokenizer.decode(added.tolist()) == expected


def test_chatml_tools_is_chatml_without_tools_and_writes_tools_calls_and_results_with_them():
    tokenizer = tiny_tokenizer(BUILT_IN["chatml_tools"])
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    plain = [system, question, {"role": "assistant", "content": "Ok"}, question]
    assert render_text(tokenizer, plain) == render_text(tiny_tokenizer(BUILT_IN["chatml"]), plain)
    calls = [
        {"function": {"name": "f", "arguments": {"a": '"<é>"', "b": [1, None]}}},
        {"name": "g", "arguments": '{"c": 1.50}'},
    ]
    schema = {"type": "function", "function": {"name": "f", "parameters": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    text = render_text(tokenizer, [system, question, called, TOOL, TOOL, question], [schema])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n") and text.count("system") == 1 and '"name": "f"' in text
    bodies = [
        '{"name": "f", "arguments": {"a": "\\"<é>\\"", "b": [1, null]}}',
        '{"name": "g", "arguments": {"c": 1.50}}',
    ]
    wrapped = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    results = "\n<tool_response>\nok\n</tool_response>" * 2
    turn = f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{wrapped}<|im_end|>\n"
    rest = f"{turn}<|im_start|>user{results}<|im_end|>\n"
    assert text.endswith(f"</tool_call><|im_end|>\n{rest}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_continuation_of_a_template_that_drops_answers_is_refused():
    without_answers = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(DataError, match="does not write the content of assistant messages"):
        continuation_ids(tiny_tokenizer(without_answers), [TOOL], (2,))


def test_sft_ignores_messages_after_the_last_answer():
    tokenizer = tiny_tokenizer()
    ids, _ = sft_row(tokenizer, [USER, ANSWER, USER])
    assert np.array_equal(ids, sft_row(tokenizer, [USER, ANSWER])[0])


def test_a_template_whose_end_token_is_not_a_stop_id_is_refused():
    """A base model's EOS with a chat template: the trained model would never stop."""
    tokenizer = tiny_tokenizer(eos="<|endoftext|>")
    with pytest.raises(DataError, match=r"none of the stop ids \{3: '<\|endoftext\|>'\}.*never stop"):
        sft_row(tokenizer, [USER, ANSWER], stop_ids=(3,))
    ids, mask = sft_row(tokenizer, [USER, ANSWER], stop_ids=(2, 3))
    assert names(tokenizer, ids, mask) == ["12", "<|im_end|>"]


def test_a_stop_token_inside_an_answer_is_refused():
    with pytest.raises(DataError, match=r"message 1 has the stop token '<\|im_end\|>'.*could never produce"):
        sft_row(tiny_tokenizer(), [USER, {"role": "assistant", "content": "1<|im_end|>2"}])


def test_a_template_that_rewrites_history_is_refused_for_rows_of_several_answers():
    tokenizer = tiny_tokenizer(DROPS_THINKING)
    thinking = {"role": "assistant", "content": "<think>a</think>12"}
    ids, mask = sft_row(tokenizer, [USER, thinking])
    assert "".join(names(tokenizer, ids, mask)) == "<think>a</think>12<|im_end|>"
    with pytest.raises(DataError, match="rewrites message 1 when others follow"):
        sft_row(tokenizer, [USER, thinking, USER, ANSWER])


def test_an_answer_that_merges_with_its_generation_prompt_is_refused():
    """A leading newline and the newline of the prompt become one token, which no sampler could produce there."""
    with pytest.raises(DataError, match="does not begin with its generation prompt"):
        sft_row(tiny_tokenizer(CHATML), [USER, {"role": "assistant", "content": "\n12"}])


@pytest.mark.parametrize("messages", [[USER], [ANSWER], [ANSWER, USER, ANSWER]])
def test_a_conversation_without_an_answer_to_a_message_is_refused(messages):
    with pytest.raises(DataError, match="after another message"):
        sft_row(tiny_tokenizer(), messages)
