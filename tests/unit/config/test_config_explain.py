import json
from pathlib import Path
from typing import Any

import pytest
from golden import cases, check_case
from tiny_run import write_run

from meshrl.cli import main
from meshrl.config.docs import every_key, list_keys
from meshrl.config.load import load_run_config, load_sft_config
from meshrl.plan.explain import explain

EXPLAINED = Path(__file__).parent / "golden" / "explained.txt"  # command, overrides, rows of the data


@pytest.mark.parametrize("given", [given for given, _ in cases(EXPLAINED)])
def test_explain_begins_with_the_sizes_of_a_step_and_notes(good: Path, good_sft: Path, given: str):
    command, overrides, num_rows = json.loads(given)
    if command == "sft":
        loaded: Any = load_sft_config(good_sft, overrides)
    else:
        loaded = load_run_config(good, overrides, purpose=command)
    check_case(EXPLAINED, given, explain(loaded, num_rows).partition("# resolved from")[0], home=good.parent)


def test_explain_shows_values_origins_and_keys_without_effect(good: Path):
    lines = {
        " ".join(line.split()) for line in explain(load_run_config(good, ["train.optimizer.lr=3e-6"])).splitlines()
    }
    assert {"lr: 3e-06 # command line", "max_new_tokens: 28 # run.yaml:11", "dp_shard: 2 # default, from -1"} < lines
    assert "# estimator: k3 # unused: algo.kl.coef is 0" in lines


def test_lines_of_explain_have_at_most_100_characters(write, good: Path):
    short = explain(load_run_config(good, ["algo.aggregation=seq_mean_token_mean", "model.dtype=float32"]))
    lines = [line for line in short.splitlines() if str(good.parent) not in line]
    assert max(map(len, lines)) <= 100


def test_keys_are_found_by_name_by_description_and_by_similarity():
    assert list_keys("lr").startswith("train.optimizer.lr   number > 0 or null   (default null)")
    assert "rollout.sampling.temperature" in list_keys("logits")
    assert "cluster.timeout_s" in list_keys("RANK AND phase")
    assert list_keys("num_generations").startswith("loop.samples_per_prompt")
    nearest = list_keys("stepz").splitlines()
    assert nearest[0] == "no key contains 'stepz'. Nearest:" and any("num_steps " in line for line in nearest)
    assert "\nreward.terms.right.weight   number " in list_keys("reward.terms.right.wieght")
    none = list_keys("zzz")
    assert none.startswith("no key contains 'zzz'. No key has a similar name.") and "model, train, rollout" in none
    leaves = [path for path, key in every_key().items() if not key.is_section]
    sections = ["model.lora", "train.mesh", "data.sources", "cluster.deadlines"]
    assert {*leaves, *sections} < {line.split()[0] for line in list_keys().splitlines()[::2]}
    assert "\ncluster.deadlines   a section" in list_keys() and "NAME   " not in list_keys()


def test_letters_inside_a_word_of_the_description_do_not_match():
    """ "already" contains "lr"."""
    found = list_keys("lr").splitlines()[::2]
    assert [line.split()[0] for line in found] == [
        "train.optimizer.lr",
        "train.scheduler.min_lr_ratio",
        "train.master_dtype",
        "train.optimizer.weight_decay",
        "train.scheduler.warmup_steps",
    ]


def test_every_key_has_a_description():
    for path, key in every_key().items():
        assert key.text and not key.text.endswith("."), path


def test_what_is_wrong_with_files_that_are_here_is_an_error(tmp_path: Path, monkeypatch, capsys):
    """Damaged rows end the command with an error; a model that is elsewhere does not."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = write_run(tmp_path)
    command = ["train", str(config), "--explain"]
    assert main(command) == 0 and "# first prompt: " in capsys.readouterr().out
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"question": "1+1", "answer": \n')
    assert main([*command, "model.path=of/another-machine"]) == 0
    assert "# first prompt: can't be shown from what is on this machine" in capsys.readouterr().out
    assert main(command) == 1
    assert "rows.jsonl:21: not JSON" in capsys.readouterr().err
