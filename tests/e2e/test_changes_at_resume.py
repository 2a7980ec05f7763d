"""What may change between the parts of a run, and what must not: the clock, keys that multiply a counter, and the
weights that a KL term is measured from."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import transformers.utils.chat_template_utils as of_transformers
from tiny_models import tiny_qwen2
from tiny_run import steps_of, train, write_run
from tiny_tokenizers import CHATML, tiny_tokenizer

from meshrl.cli import main
from meshrl.config.train import SchedulerConfig
from meshrl.core.errors import CheckpointError, DataError
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.run import folder as run_folder
from meshrl.run.folder import config_of
from meshrl.train.optim import learning_rate

pytestmark = pytest.mark.timeout(300)
DATED = "{{ strftime_now('%d.%m.%y') }}" + CHATML
PEAK = 0.01


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a dated template, a KL term and several updates a step; runs/first has two steps of it, of today."""
    path = write_run(tmp_path_factory.mktemp("changes"))
    values = json.loads(path.read_text())
    values["data"] |= {"eval_path": "rows.jsonl", "eval_limit": 2, "chat_template": DATED}
    values["algo"] = {"kl": {"coef": 0.1}}
    values["cluster"] = {"executor": "inline"}
    values["train"] |= {"updates_per_step": 4, "scheduler": {"kind": "linear"}}
    values["loop"] |= {"samples_per_prompt": 2}
    path.write_text(json.dumps(values))
    train(path, "first")
    return path


@pytest.fixture
def tomorrow(monkeypatch: pytest.MonkeyPatch) -> str:
    """The clock is a day later. The value is today's date, as DATED writes it."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    for module in (of_transformers, run_folder):
        monkeypatch.setattr(module, "datetime", Clock)
    return f"{datetime.now():%d.%m.%y}"


def prompts_of(folder: Path, pattern: str) -> list[str]:
    """The texts of all prompts in the files of answers."""
    tokenizer = tiny_tokenizer()
    logged = [one for path in sorted((folder / "rollouts").glob(pattern)) for one in read_rollouts(path)]
    return [tokenizer.decode(one.trajectory.prompt.ids.tolist()) for one in logged]


def part(config: Path, name: str, *overrides: str) -> Path:
    """A run that continues from the second step of runs/first."""
    return train(config, name, f"run.resume={config.parent / 'runs/first/checkpoints/step_000002'}", *overrides)


@pytest.mark.parametrize(("kind", "updates"), [("linear", 1), ("cosine", 2)])
def test_after_a_resume_a_day_later_with_other_updates_date_and_learning_rate_are_those_of_the_step(
    config: Path, tomorrow: str, kind: str, updates: int
):
    """A run whose template writes the date could not be resumed the next day, and one whose updates_per_step became
    smaller had a learning rate of 0 for all other steps, because optimizer steps were counted over both parts."""
    keys = (f"train.updates_per_step={updates}", f"train.scheduler.kind={kind}", "loop.num_steps=4")
    folder = part(config, kind, *keys, "loop.prompts_per_step=2")
    texts = [*prompts_of(folder, "step_*.jsonl"), *prompts_of(folder, "eval_*.jsonl")]
    assert len(texts) == 2 * 4 + 2 and all(text.startswith(tomorrow) for text in texts)
    cfg = SchedulerConfig(kind=kind)
    expected = [
        sum(learning_rate(step * updates + i, 4 * updates, PEAK, cfg) for i in range(updates)) / updates
        for step in (2, 3)
    ]
    lines = [line["train/lr"] for line in steps_of(folder) if "train/lr" in line]
    assert lines == pytest.approx(expected) and min(lines) > 0


def test_an_evaluation_of_a_run_renders_its_date_and_a_new_run_its_own(config: Path, tomorrow: str):
    run = config.parent / "runs" / "first"
    for given in ([str(run)], [str(config), "--model", str(run)]):
        assert main(["eval", *given]) == 0
    assert [prompts_of(run / f"eval_{i}", "*.jsonl")[0][:8] for i in (1, 2)] == [tomorrow] * 2
    assert config_of(run / "eval_1")["run"]["date"] == config_of(run)["run"]["date"] is not None
    given = train(config, "given", "loop.num_steps=1", "run.date=2001-02-03T04:05:06")
    assert prompts_of(given, "*.jsonl")[0].startswith("03.02.01")
    with pytest.raises(DataError, match="another data order"):
        part(config, "dated", "run.date=2001-02-03T04:05:06", "loop.num_steps=3")


def test_supervised_rows_have_the_date_of_the_runs_start(config: Path, tomorrow: str, monkeypatch: pytest.MonkeyPatch):
    values = json.loads(config.read_text())
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (config.parent / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    sft = {"path": "chats.jsonl", "num_steps": 1, "rows_per_step": 1, "max_row_tokens": 99, "chat_template": DATED}
    kept = {key: values[key] for key in ("model", "cluster")} | {"run": {**values["run"], "name": "sft"}}
    (config.parent / "sft.yaml").write_text(json.dumps({**kept, "sft": sft}))
    with monkeypatch.context() as today:
        for module in (of_transformers, run_folder):
            today.setattr(module, "datetime", datetime)
        assert main(["sft", str(config.parent / "sft.yaml")]) == 0
    assert main(["sft", str(config.parent / "sft.yaml"), "run.resume=auto", "sft.num_steps=2"]) == 0


def test_weights_that_were_replaced_below_the_reference_end_the_resume(config: Path):
    """The shapes are equal, so nothing else notices: the KL term would be measured from another model."""
    model = config.parent / "model"
    shutil.copytree(model, config.parent / "kept")
    other = tiny_qwen2(vocab_size=len(tiny_tokenizer()), initializer_range=0.1)
    other.model.norm.weight.data[0] += 1e-3
    other.save_pretrained(model)
    try:
        with pytest.raises(CheckpointError, match=r"another reference model: the weights in model\.path have changed"):
            part(config, "replaced", "loop.num_steps=3")
        without = part(config, "without", "loop.num_steps=3", "algo.kl.coef=0")  # they are not read any more
        state = without / "checkpoints" / "step_000003"
        train(config, "again", f"run.resume={state}", "loop.num_steps=4")  # the state identifies no reference
    finally:
        shutil.rmtree(model)
        shutil.move(config.parent / "kept", model)
