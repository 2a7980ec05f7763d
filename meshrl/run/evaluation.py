"""`meshrl eval`: answers and scores of a model on held-out prompts, in a folder of their own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from meshrl.agent.loop import Task
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.files import output_errors
from meshrl.core.terminal import print_output
from meshrl.core.types import Trajectory
from meshrl.data.decode import text_of
from meshrl.loops.evaluate import (
    constant_answer,
    eval_metrics,
    eval_sets,
    evaluate_prompts,
    evaluation_identity,
    evaluation_text,
)
from meshrl.monitor.glossary import meaning_of
from meshrl.monitor.metrics import NamedValues, divide, merge, units
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.run.assemble import sampling
from meshrl.run.folder import config_of, with_date
from meshrl.run.inputs import Objects, WriteReport
from meshrl.run.outputs import RunOutputs, live_run
from meshrl.run.signals import Stop
from meshrl.run.subject import Subject
from meshrl.run.task import load_task, note_on_special

Convert = Callable[[Path, Path], object]
"""convert(checkpoint, folder) writes the model of a training state."""
Evaluated = tuple[dict[str, float], list[Trajectory], Path]
"""Metrics; trajectories in the order of the prompts; the folder that was written."""


async def run_evaluation(
    stop: Stop,
    loaded: Loaded[RunConfig],
    subject: Subject,
    out: Path | None,
    write_report: WriteReport,
    convert: Convert,
    objects: Objects,
) -> Evaluated:
    """Answer and score the held-out prompts. The folder gets config.yaml, rollouts/ with the answers to each prompt as
    soon as they are scored, metrics.jsonl with one line, result.json and report.html. An evaluation that fails or is
    interrupted has what was scored before. out: the folder, None = a new folder eval_N.
    """
    loaded = with_date(loaded, config_of(subject.run))
    cfg = loaded.config
    task = await asyncio.to_thread(load_task, cfg, objects, False)
    if not task.eval_prompts:
        raise MeshrlError("meshrl eval needs held-out rows; set data.eval_path to a file of them")
    folder = _new_folder(cfg, subject.run, out)
    sets = eval_sets(cfg, task.eval_prompts)
    num_answers = sum(len(prompts) * cfg.of_eval_set(name).loop.eval_samples for name, prompts in sets.items())
    own = {"folder": str(folder.parent), "name": folder.name, "resume": "never"}  # without a checkpoint and trackers
    sections = {"run": cfg.run.model_copy(update=own), "monitor": cfg.monitor.model_copy(update={"sinks": []})}
    origins = dict.fromkeys(("run.folder", "run.name", "run.resume", "monitor.sinks"), "meshrl eval")
    loaded = replace(loaded, config=cfg.model_copy(update=sections), origins=loaded.origins | origins)
    with live_run(loaded, "eval", num_answers, stop, write_report, objects) as run:
        outputs = run.out
        outputs.note(f"evaluates {subject.text if subject.model is not None else cfg.model.path}")
        outputs.note(f"eval {folder}: {len(task.eval_prompts)} held-out prompts, {evaluation_text(cfg)}")
        for note in filter(None, (task.row_note, note_on_special(task), task.tool_note and f"note: {task.tool_note}")):
            outputs.note(note)
        answers = _Answers(outputs, cfg, task, subject)
        model = cfg.model
        try:
            if subject.state is not None:  # its model is written into the folder, and removed at the end
                convert(subject.state, folder / "model")
                model = cfg.model.model_copy(update={"path": str(folder / "model")})
            async with sampling(run, task, 0, cfg.sampling_ranks[1], model) as (scorer, trial, groups):
                assert groups.rollouts is not None
                await groups.rollouts.trust_loaded_weights()
                await trial
                identity = evaluation_identity(cfg, task, scorer)
                outputs.note(f"ready after {outputs.seconds:.1f} s")
                with outputs.spans("eval"):
                    trajectories, metrics = await evaluate_prompts(
                        cfg, task, groups.rollouts, scorer, min_version=0, scored=answers.add
                    )
        except BaseException:
            outputs.note(f"ended early: {len(answers.trajectories)} of {num_answers} answers are scored; see {folder}")
            raise
        finally:
            shutil.rmtree(folder / "model", ignore_errors=True)
            answers.write_tokens()
            outputs.result.update(answers.summary())
        values = outputs.report_end(subject.step, [*metrics, *outputs.spans.take("eval")], identity)
    if (constant := constant_answer(trajectories)) is not None:
        outputs.note(constant)
    outputs.note(f"done: {num_answers} answers in {outputs.seconds:.0f} s; see {folder}")
    named = units(merge(metrics))
    for name, unit in named.items() if not objects.quiet else ():
        meaning = meaning_of(name)
        of = name.removesuffix("/mean_at_k").rpartition("/")[2]
        label = meaning.label.replace("<name>", of) if meaning else name
        measure, is_at_k, _ = name.partition("/")[2].partition("_at_k")
        if is_at_k and "/" not in measure:  # such as: prompts with a right answer (pass@4)
            label += f" ({measure}@{'k' if cfg.data.eval_sets else cfg.loop.eval_samples})"
        print_output(f"{label:<38} {values[name]:.4g} {unit}".rstrip())
    return NamedValues((name, values[name]) for name in named), trajectories, folder


class _Answers:
    """The scored answers so far: a line in the file and in the summary for each, and the progress."""

    def __init__(self, outputs: RunOutputs, cfg: RunConfig, task: Task, subject: Subject):
        self.trajectories: list[Trajectory] = []
        self._outputs, self._cfg, self._subject = outputs, cfg, subject
        decode = partial(text_of, task.tokenizer, special=True)
        self._log = RolloutLog(outputs.folder, decode, outputs.writes, note=outputs.note)
        self._rewards = self._tokens = 0.0

    def add(self, group: list[Trajectory]) -> None:
        self._log.write(self._subject.step, group, name="eval", append=True)
        self.trajectories += group
        self._rewards += sum(t.reward or 0.0 for t in group)
        self._tokens += sum(len(turn.output_ids) for t in group for turn in t.turns)
        count = len(self.trajectories)
        means = {"reward/mean": self._rewards / count, "rollout/length_mean_tokens": self._tokens / count}
        self._outputs.show_answers(count, means)

    def write_tokens(self) -> None:
        """Write the values of all tokens so far."""
        if self.trajectories:
            self._log.write_tokens(self._subject.step, self.trajectories, "eval")

    def summary(self) -> dict[str, Any]:
        """The entries for result.json."""
        cfg, bar = self._cfg, self._cfg.eval_pass_score
        return {
            "model": cfg.model.path if self._subject.state is None else str(self._subject.state.resolve()),
            "step": self._subject.step,
            "data": cfg.data.eval_path or {n: each.path for n, each in cfg.data.eval_sets.items()} or cfg.data.path,
            "samples": cfg.loop.eval_samples,
            "sampling": cfg.eval_sampling.model_dump(mode="json"),
            "eval_term": cfg.eval_term,
            "eval_pass_score": sum(bar.values()) if isinstance(bar, dict) else bar,
            "answers": len(self.trajectories),
            "metrics": divide(merge(eval_metrics(self.trajectories, cfg))) if self.trajectories else {},
        }


def _new_folder(cfg: RunConfig, run: Path | None, out: Path | None) -> Path:
    """Create the folder of the evaluation: `out`, or the next eval_N in the model's run, else in that of run.name, else
    in run.folder."""
    name = () if cfg.run.name == "auto" else (cfg.run.name,)
    run_folder = Path(cfg.run.folder, *name) if run is None else run
    with output_errors(run_folder if out is None else out, "Make it writable, or name another folder by --out"):
        if out is not None:
            try:
                out.mkdir(parents=True)
            except FileExistsError:
                raise ConfigError(f"--out {out} already exists; name a new folder") from None
            return out
        for number in count(1):
            folder = run_folder / f"eval_{number}"
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    raise AssertionError
