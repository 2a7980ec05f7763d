"""Every fault of a config that can be found is refused before torch is imported, with a helpful error."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from golden import cases, check_case

from meshrl.config import load as config_load
from meshrl.config.check import ONLY, unused
from meshrl.core.errors import ConfigError
from meshrl.data.check import check_data

load_run_config = partial(config_load.load_run_config, further=[check_data])
load_sft_config = partial(config_load.load_sft_config, further=[check_data])

KNOWN = {"reward": {"math_answer", "format"}, "agent": {"single_turn", "multi_turn"}}
REFUSED = Path(__file__).parent / "golden" / "refused.txt"  # "train" or "sft" and overrides of a valid config


def _words(path: Path, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        load_run_config(path, overrides, KNOWN)
    return " ".join(str(error.value).split())


def _split(overrides: str) -> list[str]:
    """Overrides are separated by blanks; a value in braces may contain blanks, too."""
    parts: list[str] = []
    for word in overrides.split(" "):
        if parts and parts[-1].count("{") > parts[-1].count("}"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


@pytest.mark.parametrize("given", [given for given, _ in cases(REFUSED)])
def test_a_wrong_config_is_refused_with_this_error(good: Path, good_sft: Path, given: str):
    command, _, overrides = given.partition(" ")
    with pytest.raises(ConfigError) as error:
        if command == "sft":
            load_sft_config(good_sft, _split(overrides))
        else:
            load_run_config(good, _split(overrides), KNOWN)
    tests = Path(__file__).parents[2]
    check_case(REFUSED, given, str(error.value), home=good.parent, elsewhere=Path.cwd(), tests=tests)


def test_every_unsupported_key_and_every_key_without_effect_is_tried(good: Path):
    tried = " ".join(given for given, _ in cases(REFUSED))
    config = load_run_config(good, ["algo.advantage=rloo", "data.eval_path=null"]).config
    for key in [*ONLY, *unused(config)]:
        assert f"{key}=" in tried, f"no config of refused.txt has {key}"


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_sink_that_is_not_installed_is_refused_before_anything_starts(
    good: Path, sink: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, sink, None)  # as for a module that is not installed
    message = _words(good, [f"monitor.sinks=[{sink}]"])
    assert "1 problem" in message and f"pip install {sink}" in message
    load_run_config(good, [f"monitor.sinks=[{sink}]"], KNOWN, purpose="eval")  # an evaluation only prints


def test_null_is_not_to_be_quoted_where_text_is_required(good: Path):
    """A quoted null would be the name of a column."""
    message = _words(good, ["data.prompt=null"])
    assert "allowed: string" in message and "Quote" not in message


@pytest.mark.parametrize("value", ["a", "true"])
def test_advice_on_the_form_of_a_list_is_not_given_for_entries_of_another_type(good: Path, value: str):
    message = _words(good, [f"rollout.sampling.stop_token_ids={value}"])
    assert "list of integers" in message and "Write a list" not in message


def test_vllm_that_is_not_installed_is_installed_by_the_script_that_keeps_torch(
    good: Path, monkeypatch: pytest.MonkeyPatch
):
    """`pip install vllm` can bring another torch."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    message = _words(good, ["rollout.engine=vllm"])
    assert "1 problem" in message and "pip install" not in message
    assert "docs/install.md" in message and "scripts/install.sh --cpu --vllm" in message
    assert "rollout.vllm.python=.venv-vllm/bin/python" in message


def test_a_config_of_another_command_is_recognized_in_one_line(good: Path, good_sft: Path):
    with pytest.raises(ConfigError) as error:
        load_sft_config(good)
    message = " ".join(str(error.value).split())
    assert "2 problems" in message and "Remove it here" not in message
    assert "this is a config of `meshrl train`: this command does not read data, rollout and loop." in message
    assert "sft.path and sft.num_steps are required, but not given." in message

    message = _words(good_sft, [])
    assert "3 problems" in message and "Remove it here" not in message
    assert "this is a config of `meshrl sft`: this command does not read sft." in message


def test_the_error_for_a_section_of_another_command_advises_to_remove_it(good_sft: Path):
    with pytest.raises(ConfigError, match=r"Remove it here") as error:
        load_sft_config(good_sft, ["loop.num_steps=3"])
    assert "this is a config of" not in str(error.value)


def test_a_missing_section_names_its_required_keys(write, good: Path):
    message = _words(write("train: {optimizer: {lr: 1e-5}}\n", "bad.yaml"), [])
    assert "3 problems" in message
    for words in ("model.path is required", "data.path or data.sources", "loop.num_steps is required"):
        assert words in message


FILES: list[tuple[str, list[str]]] = [
    ("loop: {num_steps: 1}\nloop: {num_steps: 2}\n", ["loop", "given twice", "line 1", "bad.yaml:2"]),
    (
        "base: run.yaml\ntrain:\n  optimizer:\n    lr: 1e-6\n    lr: 1e-5\n",
        ["train.optimizer.lr", "bad.yaml:5", "twice"],
    ),
    ("base: run.yaml\ntrain:\n\n  lrs: 1\n", ["train.lrs = 1", "[bad.yaml:4]", "train.optimizer.lr"]),
    ("base: run.yaml\ntrain.optimizer.lr: 1\n", ["bad.yaml:2", "section of its own"]),
    ("model: {path: tiny}\n", ["data", "loop", "required, but not given", "[not given]"]),
    ("a: [1\n", ["not valid YAML", "line 2"]),
    ("just text\n", ["mapping of sections"]),
    ("a: 1\n--- \nb: 2\n", ["not valid YAML"]),
    ("? [a, b]\n: 1\n", ["bad.yaml:1", "single word"]),
    ("a: !!python/name:os.system x\n", ["bad.yaml:1", "YAML tag"]),
    ("a: &x\n  b: *x\n", ["nested more than"]),
    ("a: &x [*x]\n", ["nested more than"]),
    ('base: run.yaml\nrun: {name: "\\ud800"}\n', ["can't be read"]),
]


@pytest.mark.parametrize(("text", "words"), FILES, ids=[text.replace("\n", "|") for text, _ in FILES])
def test_a_bad_file_is_refused_with_its_name_and_line(write, good: Path, text: str, words: list[str]):
    message = _words(write(text, "bad.yaml"), [])
    for word in words:
        assert word in message


def test_a_file_that_is_missing_a_folder_or_no_text_is_refused(good: Path, tmp_path: Path):
    assert "no such file" in _words(tmp_path / "no.yaml", [])
    assert "is a folder" in _words(tmp_path, [])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in _words(tmp_path / "binary.yaml", [])


@pytest.mark.parametrize("text", ["train", "=3", "train..lr=1", ".lr=1", "loop.num_steps=[1", "loop.num_steps=!!int 3"])
def test_a_malformed_override_is_refused(good: Path, text: str):
    message = _words(good, [text])
    assert "key=value" in message or "command line" in message


def test_all_problems_are_reported_at_once_with_file_line_and_command_line(write, good: Path):
    path = write(
        "base: run.yaml\nalgo:\n  advantge: grpo\n  kl: {coef: -1}\nloop:\n  samples_per_prompt: 1\n", "bad.yaml"
    )
    message = _words(path, ["train.optimizer.lr=slow", "model.vision=half", "data.path=gone.jsonl"])
    assert "6 problems" in message
    for words in (
        "algo.advantge = grpo [bad.yaml:3] unknown key. Nearest: algo.advantage",
        "algo.kl.coef = -1 [bad.yaml:4] allowed: number >= 0",
        "train.optimizer.lr = slow [command line] allowed: number > 0",
        "model.vision = half [command line]",
        "loop.samples_per_prompt = 1 [bad.yaml:6] algo.advantage = grpo [default]",
        "data.path = gone.jsonl [command line] no such file",
    ):
        assert words in message


def test_a_wrong_or_missing_required_key_does_not_hide_other_problems(write, good: Path):
    message = _words(good, ["loop.num_steps=abc", "train.mesh.tp=4", "train.scheduler.warmup_steps=9"])
    assert "2 problems" in message  # whether the warm-up is too long can't be known
    assert "loop.num_steps = abc [command line] allowed: integer >= 1" in message and "train.mesh.tp = 4" in message
    path = write("data: {path: gone.jsonl}\nloop: {prompts_per_step: 4}\nmodel: {dtype: bfloat16}\n", "missing.yaml")
    message = _words(path, ["train.mesh.tp=4"])
    for words in ("model.path [not given]", "loop.num_steps [not given]", "train.mesh.tp = 4", "no such file"):
        assert words in message


def test_a_key_whose_value_was_refused_is_not_checked_further(good: Path):
    """The check would see a default in place of the refused value, and not the user's value."""
    message = _words(good, ["loop.prompts_per_step=six", "train.updates_per_step=5"])
    assert "1 problem" in message and "divide" not in message


def test_columns_are_looked_up_in_the_first_row(good: Path):
    message = _words(good, ["data.prompt=prompt"])
    assert "data.prompt = prompt" in message and "'question', 'answer'" in message
    assert "set data.answer" not in message
    message = _words(good, ["data.answer=solution"])
    assert "'question', 'answer'. If no reward needs an answer, set data.answer: null." in message
    load_run_config(good, ["data.answer=null", "reward.terms.answer.kind=json:dumps"])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", json.dumps({"vision_config": {}}), "vision tower"),
        ("model.safetensors", None, "no weights"),
        ("tokenizer.json", None, "no tokenizer"),
    ],
)
def test_an_incomplete_model_folder_is_refused(good: Path, file: str, content: str | None, words: str):
    path = good.parent / "tiny" / file
    path.unlink() if content is None else path.write_text(content)
    assert words in _words(good, [])


def test_names_are_not_checked_without_a_table_but_their_form_is(good: Path):
    (Path.cwd() / "my_rewards.py").write_text("raise RuntimeError('a check runs no user code')")
    load_run_config(good, ["agent.kind=anything", "reward.terms.answer.kind=my_rewards:score"])
    with pytest.raises(ConfigError, match=r"package.module:name"):
        load_run_config(good, ["agent.kind=not a name"])
