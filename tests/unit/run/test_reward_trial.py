"""A run tries its graders before it depends on them; the trial does not change the run's results."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_run import write_run
from tiny_tokenizers import tiny_tokenizer

from meshrl.cli import main
from meshrl.config.algo import AlgoConfig
from meshrl.config.load import load_run_config
from meshrl.data.datasets import PromptMaker
from meshrl.data.order import open_feed
from meshrl.loops.finish_step import run_without_signal
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import JsonlSink
from meshrl.tools.runs import list_runs

MODULE = """
from meshrl.agent.loop import SingleTurn

class Agent(SingleTurn):
    pass

def without_answer(row):
    return {"prompt": row["question"]}

def constant(completion, answer):
    return 0.5

def misspelt(completion, answer):
    return float(normalise(completion) == answer)
"""
INLINE = ["cluster.executor=inline", "cluster.num_train_ranks=1"]
SHORT = ["loop.num_steps=1", "loop.prompts_per_step=2", "loop.samples_per_prompt=2", "run.name=short"]
WITHOUT_SIGNAL = "no group has answers with different rewards"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graders_of_this_test.py").write_text(MODULE)
    return write_run(tmp_path)


def _reward(kind: str) -> str:
    return f"reward.terms={json.dumps({'t': {'kind': kind}})}"


def test_a_built_in_grader_that_fails_its_self_test_ends_the_run_before_a_model_is_loaded(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    broken = (
        "LatexExtractionConfig = ExprExtractionConfig = dict\n"
        "def parse(text, extraction_config, parsing_timeout): return [text]\n"
        "def verify(*args, **kwargs): return False\n"
    )
    (config.parent / "math_verify.py").write_text(broken)
    monkeypatch.syspath_prepend(str(config.parent))
    (config.parent / "model" / "model.safetensors").write_bytes(b"loading this file raises an error")
    assert main(["train", str(config), *INLINE, _reward("math_answer")]) == 2
    printed = capsys.readouterr().err
    assert "meshrl: reward.terms.t of kind 'math_answer'" in printed and "the right one must score higher" in printed


def test_the_rows_that_a_function_was_tried_on_are_drawn_again(config: Path, capsys: pytest.CaptureFixture[str]):
    overrides = [*INLINE, *SHORT, _reward("graders_of_this_test:constant"), "data.streaming=true"]
    assert main(["train", str(config), *overrides]) == 0
    cfg = load_run_config(config, overrides).config
    expected = [(p.ordinal, p.id) for p in open_feed(PromptMaker(cfg.data, tiny_tokenizer()), cfg.run.seed).next(4)]
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note.startswith(
        "note: reward.terms.t of kind 'graders_of_this_test:constant' scores the data's own answers no"
    )
    tried = note.partition("(tried on ")[2].rstrip(")").split(", ")  # fewer than four if the trial takes too long
    assert tried == [name for _, name in expected[: len(tried)]]
    (path,) = (config.parent / "runs" / "short" / "rollouts").glob("step_*.jsonl")
    prompts = [entry.trajectory.prompt for entry in read_rollouts(path)]
    assert sorted({(p.ordinal, p.id) for p in prompts}) == expected[:2]


def test_a_function_that_fails_on_every_answer_ends_training_and_evaluation(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    reward = _reward("graders_of_this_test:misspelt")
    assert main(["train", str(config), *INLINE, *SHORT, reward]) == 2
    assert main(["eval", str(config), *INLINE, reward, "data.eval_path=rows.jsonl"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("meshrl: reward.terms.t of kind 'graders_of_this_test:misspelt' failed on the data's own") == 2
    assert "NameError" in printed


@pytest.mark.parametrize("command", [["train"], ["eval", "data.path=null", "data.eval_path=rows.jsonl"]])
def test_a_map_that_returns_no_answer_is_refused_under_a_reward_that_needs_one(
    config: Path, capsys: pytest.CaptureFixture[str], command: list[str]
):
    name, *keys = command
    keys += ["data.map=graders_of_this_test:without_answer", _reward("math_answer")]
    assert main([name, str(config), *INLINE, *keys]) == 1
    assert (
        "rows.jsonl:1: the answer from data.map graders_of_this_test:without_answer is null" in capsys.readouterr().err
    )


def test_the_rewards_of_a_users_agent_are_not_tried_on_bare_answers(config: Path, capsys: pytest.CaptureFixture[str]):
    kinds = [_reward("graders_of_this_test:constant"), "agent.kind=graders_of_this_test:Agent"]
    assert main(["train", str(config), *INLINE, *SHORT, *kinds]) == 0
    assert "note: " not in capsys.readouterr().out


@pytest.mark.parametrize("every_steps", [2, 0])
def test_a_run_whose_rewards_are_all_alike_gets_a_note_after_three_such_steps_and_at_its_end(
    every_steps: int, config: Path, capsys: pytest.CaptureFixture[str]
):
    """Every advantage is 0 and no weight changes, although the run looks healthy. The note at the end refers to the
    answers, if the run writes them."""
    overrides = ["train", str(config), *INLINE, *SHORT, "loop.num_steps=3", "loop.save_every_steps=1"]
    overrides += ["data.eval_path=rows.jsonl", "data.eval_limit=1", "loop.save_best=false"]
    overrides += [f"monitor.rollout_log_every_steps={every_steps}"]
    constant = "reward.terms.ascii.kind=graders_of_this_test:constant"
    assert main([*overrides, constant]) == 0
    folder = config.parent / "runs" / "short"
    output = capsys.readouterr().out.splitlines()
    health = [line for line in output if line.startswith("health: groups without signal since step 1: ")]
    lines = [line for line in output if WITHOUT_SIGNAL in line]
    assert len(health) == 1 and [line.partition(": ")[0] for line in lines] == ["all 3 steps"]
    assert output[-1].startswith("done: 3 steps without a training signal in ")
    assert json.loads((folder / "result.json").read_text())["no_signal"] == lines[0]
    assert "  done, no signal  3 of 3 steps  " in list_runs(folder.parent)
    assert '<span class="badge unsure">done, no signal: held-out reward ' in (folder / "report.html").read_text()
    names = sorted(path.stem for path in (folder / "rollouts").glob("*.jsonl"))
    if every_steps:
        assert names == ["eval_000000", "eval_000003", "step_000001", "step_000003"]
        assert f"rewards in {folder}/roll" in lines[0]
    else:
        assert not names and all("monitor.rollout_log_every_steps" in line for line in lines)

    assert main([*overrides, constant, "loop.num_steps=4", "run.resume=auto"]) == 0
    output = capsys.readouterr().out
    assert "health: " not in output  # the earlier part has noted it
    assert f"all 4 steps: {WITHOUT_SIGNAL}" in output

    assert main([*overrides, "loop.num_steps=5", "run.resume=auto"]) == 0  # with the config's own reward
    assert WITHOUT_SIGNAL not in capsys.readouterr().out and "done  " in list_runs(folder.parent)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([], None),
        ([(0, 0.5, 0.5), (1, 0.0, 9)], None),
        ([(1, 0.0, 9), (1, 0.5, 9)], "all 2 steps: no group has answers with different rewards"),
        ([(0, 0.0, 0)], "the step: no answer was trained"),
        ([(0, 0.0, 9), (0.5, 0.0, 9)], "all 2 steps: every gradient is 0, so no weight has changed"),
    ],
)
def test_a_run_that_changes_no_weight_by_its_rewards_has_a_reason(tmp_path: Path, steps, reason):
    """steps: (share of groups without a signal, norm of the gradient, trained tokens)."""
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, (share, norm, tokens) in enumerate(steps, start=1):
        values = {"reward/groups_without_signal": share, "train/grad_norm": norm, "train/num_tokens": tokens}
        sink.write(step, {**values, "train/lr": 1e-6}, {})
    sink.close()
    cfg = SimpleNamespace(algo=AlgoConfig())
    found = run_without_signal(SimpleNamespace(cfg=cfg, run=SimpleNamespace(folder=tmp_path)))
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize(("last_mean", "advised"), [(0.0, True), (0.5, False)])
def test_a_run_without_any_reward_is_advised_to_warm_up(tmp_path: Path, last_mean: float, advised: bool):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, mean in ((1, 0.0), (2, last_mean)):
        values = {"reward/groups_without_signal": 1.0, "train/num_tokens": 9.0, "reward/mean": mean}
        sink.write(step, values, {})
    sink.close()
    cfg = SimpleNamespace(algo=AlgoConfig())
    found = run_without_signal(SimpleNamespace(cfg=cfg, run=SimpleNamespace(folder=tmp_path)))
    assert ("`meshrl sft`" in found) == advised
