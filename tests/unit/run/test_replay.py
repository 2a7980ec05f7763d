"""`meshrl replay` of one recorded run: equal to the bit, the first difference by its phase, and refused folders."""

from __future__ import annotations

import json
import re
import shutil
import sys
from bdb import BdbQuit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import train, write_run

from meshrl import cli
from meshrl.config.run import RunConfig
from meshrl.loops import train_step
from meshrl.monitor.digests import read_digests
from meshrl.monitor.sinks import read_metrics
from meshrl.run.provenance import model_digest
from meshrl.tools import replay as module
from meshrl.tools.replay import replay

RUN = (
    *("cluster.executor=inline", "loop.num_steps=3", "loop.save_every_steps=1", "train.updates_per_step=2"),
    "run.keep_checkpoints=5",
    *("algo.kl.coef=0.1", "loop.max_replaced_groups=1", "reward.terms.ascii.kind=tiny_run:abstains_for_some"),
    "algo.advantage=removed_advantage:centred",
)
ADVANTAGE = "def centred(groups):\n    return [group.rewards - group.rewards.mean() for group in groups]\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of two updates with replaced groups and abstaining rewards: three with a reference and an advantage of
    the user, whose module is gone, and two after a resume with another rate, of which rows without a gradient are
    scored only in part. Only the state after step 3 is left."""
    folder = tmp_path_factory.mktemp("recorded")
    config = write_run(folder)
    written = json.loads(config.read_text())
    written["model"]["path"], written["data"]["path"] = str(folder / "model"), str(folder / "rows.jsonl")
    config.write_text(json.dumps(written))
    module = folder / "removed_advantage.py"
    module.write_text(ADVANTAGE)
    train(config, "run", *RUN)
    module.unlink()
    sys.modules.pop(module.stem)
    others = ("run.resume=auto", "train.optimizer.lr=0.02", "algo.kl.coef=0", "algo.advantage=grpo")
    run = train(config, "run", *RUN, "loop.num_steps=5", *others)
    shutil.copy(run / "checkpoints/step_000005/model/model.safetensors", folder)
    for step in (1, 2, 4, 5):
        shutil.rmtree(run / f"checkpoints/step_{step:06d}", ignore_errors=True)
    return run


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_a_rank_has_as_many_threads_as_in_the_run(run: Path, monkeypatch: pytest.MonkeyPatch):
    """Else an order of sums, and so the bits, may differ: where sampler ranks had their share of the cores, or on
    another machine."""
    lines, threads = (run / "digests.jsonl").read_text().splitlines(keepends=True), torch.get_num_threads()
    (run / "digests.jsonl").write_text(
        "".join(re.sub(r"\d+ threads? a rank", f"{2 + (line is lines[-1])} threads a rank", line) for line in lines)
    )
    seen = list[int]()
    monkeypatch.setattr(module, "first_difference", lambda *args, **_: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(module, "_metric_difference", lambda *args: None)  # other threads, other bits
    try:
        replay(run, 5, lambda text: None)
    finally:
        torch.set_num_threads(threads)
    assert [*dict.fromkeys(seen)] == [2, 3]  # of steps 4 and 5


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("step", "num_steps", "begins"), [(3, 3, "the beginning"), (5, 2, "the state after step 3")])
def test_all_steps_are_equal_to_the_bit_from_a_state_and_from_the_beginning(
    run: Path, step: int, num_steps: int, begins: str
):
    lines, before = list[str](), contents(run)
    assert any(len(record["updates"]) == 2 for record in read_digests(run)[1].values())
    assert any(0 < line.metrics["train/no_forward_fraction"] < 1 for line in read_metrics(run / "metrics.jsonl")[0])
    assert replay(run, step, lines.append) is None
    assert lines[-1] == f"{num_steps} steps: equal to the bit" and begins in lines[0]
    assert len(lines) == num_steps + 2  # no other code, library or layout
    assert contents(run) == before


def test_the_beginning_is_used_across_a_resume_that_has_changed_the_config(run: Path):
    shutil.rmtree(run / "checkpoints")
    lines = list[str]()
    assert replay(run, 5, lines.append) is None
    assert lines[-1] == "5 steps: equal to the bit"


def test_the_model_of_a_step_without_a_checkpoint_is_the_one_that_the_run_had(
    run: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["convert", str(run), "--step", "5", str(tmp_path / "model")]) == 0
    written, of_run = tmp_path / "model/model.safetensors", recorded.parent.parent / "model.safetensors"
    assert written.read_bytes() == of_run.read_bytes()
    of_step(run, lambda r: other_tensor(r["updates"][1], "weights", 0))
    assert cli.main(["convert", str(run), "--step", "5", str(tmp_path / "other")]) == 1
    assert "no model is written, because step 5 of the replay differs" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert cli.main(["convert", str(run), "--step", "5", str(tmp_path / "model")]) == 2
    assert "replaying" not in (printed := capsys.readouterr().err) and "already exists" in printed


def of_start(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record of the start that made steps 4 and 5."""
    changed_line(run / "digests.jsonl", -3, change)


def continues_another_run(run: Path, state: Path) -> None:
    """As if it had only the steps after a state of another run."""
    shutil.rmtree(run / "checkpoints")
    of_start(run, lambda record: record.update({"from": str(state)}))
    lines = (run / "digests.jsonl").read_text().splitlines(keepends=True)
    (run / "digests.jsonl").write_text("".join(lines[-3:]))


def test_a_run_that_continues_another_one_begins_at_the_state_of_that_run(run: Path, recorded: Path):
    continues_another_run(run, recorded / "checkpoints/step_000003/state")
    lines = list[str]()
    assert replay(run, 5, lines.append) is None
    assert lines[-1] == "2 steps: equal to the bit"


def test_a_run_of_more_ranks_than_cores_is_replayed_in_one_process(run: Path):
    def layout(record: dict[str, Any]) -> None:
        record["config"]["cluster"].update(num_train_ranks=1024, executor="processes")
        record["config"]["train"].update(tensor_model_parallel_size=2, mesh={"tp": 2})

    of_start(run, layout)
    lines = list[str]()
    assert replay(run, 5, lines.append, inline=True) is None
    assert lines[1].startswith("one process fits: ")
    assert lines[2].startswith("gradients are not compared, because on the recorded layout 1024 ranks (")
    assert lines[3:] == ["step 4: equal", "step 5: equal", "2 steps: equal within rounding"]


def test_gradients_in_one_process_are_compared_with_those_on_the_recorded_layout(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    """In one process, with other micro-batches, whose sums are rounded otherwise."""
    one_process = module._in_one_process

    def smaller_batches(cfg: RunConfig) -> RunConfig:
        cfg = one_process(cfg)
        return cfg.model_copy(update={"train": cfg.train.model_copy(update={"max_tokens_per_microbatch": 80})})

    monkeypatch.setattr(module, "_in_one_process", smaller_batches)
    lines = list[str]()
    assert replay(run, 5, lines.append, inline=True) is None
    assert lines[2:4] == ["step 4: equal", "step 5: equal"] and lines[-2:] == [lines[3], lines[-1]]
    differences = [float(line.split()[-4]) for line in lines if line.startswith("the gradient of model.")]
    assert len(differences) == 2 and all(0 < each < 1e-5 for each in differences)
    monkeypatch.setitem(module._OF_NORM, "float32", differences[0] / 2)
    difference = replay(run, 5, lines.append, inline=True)
    assert difference is not None and difference.text.startswith("the gradient of model.")


def test_a_breakpoint_has_samples_and_gradients_and_the_debugger_may_end_the_replay(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def hook() -> None:
        names = sys._getframe(1).f_locals
        assert all(sample.loss_weight is not None for sample in names["samples"])
        assert names["gradients"]["model.embed_tokens.weight"].any()
        raise BdbQuit

    monkeypatch.setattr(sys, "breakpointhook", hook)
    assert cli.main(["replay", str(run), "--step", "5", "--break"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "meshrl: the debugger has ended the replay"


def changed_line(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[number])
    change(record)
    lines[number] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


def of_step(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record of step 5 in digests.jsonl, the last line."""
    changed_line(run / "digests.jsonl", -1, change)


def of_answer(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    changed_line(run / "rollouts/step_000005.jsonl", 0, change)


def flipped(text: str, at: int) -> str:
    return text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]


def other_tensor(update: dict[str, Any], phase: str, number: int) -> None:
    """Another digest of the tensor with this number."""
    update[phase] = [flipped(flipped(update[phase][0], 16 + 4 * number), 0)]


def slightly_changed_logprob(answer: dict[str, Any]) -> None:
    """By less than the proof of the sampler allows."""
    answer["turns"][0]["logprobs"][0] -= 1e-6


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a sampled token": (
        lambda run: of_answer(run, lambda r: r["turns"][0]["output_ids"].__setitem__(0, 7)),
        "differ from the trainer's by ",
    ),
    "a logprob of the sampler": (lambda run: of_answer(run, slightly_changed_logprob), ", samples"),
    "a reward": (lambda run: of_answer(run, lambda r: r.update(reward=0.125)), ", samples"),
    "the recorded advantages": (
        lambda run: of_step(run, lambda r: r["updates"][0].update(advantages="0" * 16)),
        "advantages",
    ),
    "the recorded plan": (
        lambda run: of_step(run, lambda r: r["updates"][0].update({"batch plan": "0" * 16})),
        "batch plan",
    ),
    "a gradient": (
        lambda run: of_step(run, lambda r: other_tensor(r["updates"][0], "gradients", 1)),
        "gradients of model.layers.0.self_attn.q_proj.weight in rank 0",
    ),
    "a weight": (
        lambda run: of_step(run, lambda r: other_tensor(r["updates"][1], "weights", 0)),
        "update 2 of 2, weights of model.embed_tokens.weight in rank 0",
    ),
    "an update more": (
        lambda run: of_step(run, lambda r: r["updates"].append(r["updates"][0])),
        "3 optimizer steps then, 2 now",
    ),
    "a metric": (
        lambda run: changed_line(run / "metrics.jsonl", -1, lambda r: r["metrics"].update({"train/grad_norm": 1.0})),
        "train/grad_norm was 1.0, is ",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_difference_is_named_by_its_phase(run: Path, name: str):
    change, phase = CHANGES[name]
    change(run)
    lines = list[str]()
    difference = replay(run, 5, lines.append)
    assert difference is not None and difference.step == 5 and phase in difference.text
    assert lines[-1] == f"step 5 differs: {difference.text}" and "step 4: equal" in lines


def test_other_code_is_named_and_the_exit_codes_are_0_1_and_2(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["replay", str(run), "--step"]
    assert cli.main([*arguments, "4"]) == 0
    of_start(run, lambda record: record.update(code="another"))
    rate = train_step.learning_rate
    monkeypatch.setattr(train_step, "learning_rate", lambda *args: rate(*args) * (1 + 1e-4))
    assert cli.main([*arguments, "4"]) == 1
    printed = capsys.readouterr().err
    assert "step 4: the code of meshrl is not that of the run" in printed
    assert "step 4 differs: update 1 of 2, weights of model." in printed
    assert cli.main([*arguments, "6"]) == 2
    assert "has no step 6; its steps are 1 to 5" in capsys.readouterr().err


def test_the_digest_of_a_model_follows_its_config_and_each_of_its_files(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    files = [tmp_path / f"model-{number}-of-2.safetensors" for number in (1, 2)]
    for file in files:
        file.write_bytes(bytes(3 << 20))
    (tmp_path / "tokenizer.json").write_text("{}")
    digests = [model_digest(tmp_path)]
    (tmp_path / "tokenizer.json").write_text("[]")
    assert model_digest(tmp_path) == digests[0]
    (tmp_path / "config.json").write_text("[]")
    digests.append(model_digest(tmp_path))
    for file, content in ((files[0], bytes(2 << 20) + b"1" * (1 << 20)), (files[1], bytes((3 << 20) - 1))):
        file.write_bytes(content)
        digests.append(model_digest(tmp_path))
    assert len(set(digests)) == 4


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no run": (lambda run: (run / "config.yaml").unlink(), "is not the folder of a run"),
    "no digests": (lambda run: (run / "digests.jsonl").unlink(), "an earlier version of meshrl wrote it"),
    "a damaged line": (
        lambda run: (run / "digests.jsonl").write_text("{\n" + (run / "digests.jsonl").read_text()),
        "digests.jsonl:1: ",
    ),
    "a later format": (lambda run: of_step(run, lambda r: r.update(schema=9)), "schema 9; this version reads schema 1"),
    "answers that are gone": (
        lambda run: (run / "rollouts/step_000004.jsonl").unlink(),
        "has no answers of step 4, which the replay needs (monitor.rollout_log_every_steps). Steps that it can replay: "
        "[1]",
    ),
    "damaged answers": (lambda run: (run / "rollouts/step_000005.jsonl").write_text("{}\n"), "step_000005.jsonl:1: "),
    "answers with images": (
        lambda run: of_answer(
            run,
            lambda r: r["prompt"].update(media={"a": {"kind": "image", "digest": "", "source": "", "num_tokens": 1}}),
        ),
        "its prompts have images",
    ),
    "metrics that are gone": (lambda run: (run / "metrics.jsonl").write_text(""), "has no line of step 4"),
    "a key of another version": (
        lambda run: of_start(run, lambda r: r["config"]["algo"].update(gamma_2=1)),
        "the config of step 4 is not one of this version of meshrl, but of ",
    ),
    "another run that is gone": (
        lambda run: continues_another_run(run, Path("/nowhere")),
        "continues /nowhere, which is gone, and has no state before step 5",
    ),
    "a model that has changed": (
        lambda run: of_start(run, lambda r: r.update(model="0" * 16)),
        "model has another model than when it was used for step 4; restore that one",
    ),
    "a model that is gone": (
        lambda run: (
            shutil.rmtree(run / "checkpoints"),
            [
                changed_line(run / "digests.jsonl", number, lambda r: r["config"]["model"].update(path="/nowhere"))
                for number in (0, -3)
            ],
        ),
        "/nowhere",
    ),
}


def test_a_model_of_the_hub_has_the_digest_of_its_files(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = Path(json.loads((run / "digests.jsonl").read_text().splitlines()[0])["config"]["model"]["path"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--organisation--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    shutil.copytree(model, cached / "snapshots" / ("a" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_digest("organisation/name") == model_digest(model)


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_without_what_a_replay_needs_is_refused_in_one_line(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    change, text = REFUSED[name]
    change(run)
    assert cli.main(["replay", str(run), "--step", "5"]) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]
