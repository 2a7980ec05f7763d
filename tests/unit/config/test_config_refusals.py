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
FILES = REFUSED.with_name("files.txt")  # configs, whose lines end with |


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


@pytest.mark.parametrize("sink", ["tensorboard", "mlflow"])
def test_a_sink_that_is_not_installed_is_refused_before_anything_starts(
    good: Path, sink: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, sink, None)  # as for a module that is not installed
    message = _words(good, [f"monitor.sinks=[{sink}]"])
    assert "1 problem" in message and f"pip install {sink}" in message
    load_run_config(good, [f"monitor.sinks=[{sink}]"], KNOWN, purpose="eval")  # an evaluation only prints


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


def test_a_missing_section_names_its_required_keys(write, good: Path):
    message = _words(write("train: {optimizer: {lr: 1e-5}}\n", "bad.yaml"), [])
    assert "3 problems" in message
    for words in ("model.path is required", "data.path or data.sources", "loop.num_steps is required"):
        assert words in message


@pytest.mark.parametrize("given", [given for given, _ in cases(FILES)])
def test_a_bad_file_is_refused_with_this_error(write, good: Path, given: str):
    message = _words(write(given.replace("|", "\n"), "bad.yaml"), [])
    check_case(FILES, given, message, home=good.parent)


def test_a_file_that_is_missing_a_folder_or_no_text_is_refused(good: Path, tmp_path: Path):
    assert "no such file" in _words(tmp_path / "no.yaml", [])
    assert "is a folder" in _words(tmp_path, [])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in _words(tmp_path / "binary.yaml", [])


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


def test_a_missing_required_key_does_not_hide_other_problems(write, good: Path):
    path = write("data: {path: gone.jsonl}\nloop: {prompts_per_step: 4}\nmodel: {dtype: bfloat16}\n", "missing.yaml")
    message = _words(path, ["train.mesh.tp=4"])
    for words in ("model.path [not given]", "loop.num_steps [not given]", "train.mesh.tp = 4", "no such file"):
        assert words in message


def test_no_column_is_needed_where_no_reward_compares_with_it(good: Path):
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
