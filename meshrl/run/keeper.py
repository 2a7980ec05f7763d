"""What a run saves while its loop runs: training states, models, and the best model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from meshrl.cluster.train_group import TrainGroup
from meshrl.core.best_models import Best, read_best
from meshrl.core.errors import CheckpointError, DataError, MeshrlError
from meshrl.core.files import CONTINUE_LATER, output_errors, replacing
from meshrl.core.types import Metric
from meshrl.data.chat import ChatFiles, read_tokenizer, write_chat
from meshrl.loops.job import Resumable
from meshrl.model.lora import ADAPTER_FOLDER, LEAST_MERGED
from meshrl.plan.decisions import AUTO_SAVE_S
from meshrl.run.folder import OTHER_FOLDER
from meshrl.run.models import model_folder, prune_models, replace_best
from meshrl.run.outputs import LiveRun
from meshrl.train.checkpoint_files import (
    CONTROLLER,
    Manifest,
    commit,
    make_temporary_folder,
    prune,
    require_space,
    state_folder,
    states,
    write_json,
)


class Checkpoints:
    """Saves the checkpoints of one run, one at a time, and keeps the newest. An asynchronous context manager: when the
    block ends, the last checkpoint is on disk.

    The ranks copy their state to host memory, except the last one, and write it while training continues. An error of
    that write is raised by the next `save`, by `check`, or at the end.
    """

    def __init__(
        self,
        folder: Path,
        trainer: TrainGroup,
        keep: int,
        note: Callable[[str], None],
        add: Callable[[Metric], None] = lambda metric: None,
    ):
        """add: gets the metric of each complete save."""
        self.folder, self.trainer, self.keep, self._note, self._add = folder / "checkpoints", trainer, keep, note, add
        self._writing: asyncio.Task[None] | None = None
        self._step = 0  # of the save in _writing
        self._began = time.monotonic()  # the last save, or this object

    @property
    def age_s(self) -> float:
        """Seconds since the last save began, or since the start."""
        return time.monotonic() - self._began

    @property
    def is_writing(self) -> bool:
        """Whether the last save is not on disk yet."""
        return self._writing is not None and not self._writing.done()

    def newest_on_disk(self) -> int:
        """The step of the newest complete checkpoint; 0 = none."""
        return max((step for step, _ in states(self.folder)), default=0)

    async def save(self, step: int, saved: dict[str, Any], continues: bool = True) -> None:
        """Save the state after `step` finished steps, unless it is saved already. Waits for the previous save.
        continues: whether training goes on before the state is on disk.
        """
        if step == (self.newest_on_disk() if self._writing is None else self._step):
            return
        await self.settle()
        with output_errors(self.folder, CONTINUE_LATER, CheckpointError):
            self.folder.mkdir(exist_ok=True)
        require_space(self.folder, await self.trainer.state_bytes())
        final = state_folder(self.folder, step)
        temporary = make_temporary_folder(final)
        await self.trainer.save(str(temporary), continues)
        self._step, self._began = step, time.monotonic()
        self._writing = asyncio.create_task(self._commit(step, final, temporary, saved))

    async def _commit(self, step: int, final: Path, temporary: Path, saved: dict[str, Any]) -> None:
        started_at = time.perf_counter()
        files = await self.trainer.finish_save()
        num_ranks = self.trainer.num_ranks
        files[CONTROLLER] = await asyncio.to_thread(write_json, temporary / CONTROLLER, saved)
        await asyncio.to_thread(commit, final, Manifest(step=step, num_ranks=num_ranks, files=files))
        with output_errors(self.folder, CONTINUE_LATER, CheckpointError):
            await asyncio.to_thread(prune, self.folder, self.keep)
        took_s = time.perf_counter() - started_at
        self._add(Metric(name="checkpoint/write_s", sum=took_s, reduce="max", unit="s"))
        self._note(f"saved {final}")

    def check(self) -> None:
        """Raises: the error of the current save, if it has failed."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def abandon(self, wait_s: float | None = None) -> None:
        """Abandon the current save, unless it finishes within wait_s: its ranks are lost, or the run can't wait."""
        if self._writing is not None:
            done, _ = await asyncio.wait({self._writing}, timeout=wait_s)
            if not done:
                self._writing.cancel()
            elif not self._writing.cancelled():
                self._writing.exception()  # lost ranks are already reported; the next save reports a full disk
            self._writing = None

    async def settle(self) -> None:
        """Wait until the current save, if there is one, is on disk."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`settle`; a signal is raised when the save is on disk."""
        interruption: asyncio.CancelledError | None = None
        while self._writing is not None and self.is_writing:
            try:
                await asyncio.wait({self._writing})
            except asyncio.CancelledError as signal:
                interruption = signal
        try:
            await self.settle()
        except MeshrlError as of_the_save:
            if error is None or isinstance(error, asyncio.CancelledError):
                raise
            error.add_note(f"the checkpoint that was being written is not complete: {of_the_save}")
            return
        if interruption is not None:
            raise interruption


class Keeper:
    """What a loop gets for its states and models (loops/job.py: LoopKeeper).

    chat: of the models that are written. evaluation: identity of the run's evaluations. restarts: how often the train
    ranks were started again.
    """

    def __init__(
        self, run: LiveRun, checkpoints: Checkpoints, chat: ChatFiles, evaluation: Mapping[str, str] | None = None
    ):
        self._run, self.checkpoints, self._trainer = run, checkpoints, checkpoints.trainer
        self._chat, self._evaluation, self.restarts = chat, dict(evaluation or {}), 0

    def count_restart(self) -> None:
        self.restarts += 1

    @contextmanager
    def updating(self, job: Resumable) -> Iterator[None]:
        with self._run.stop.updating(job, lambda: self.checkpoints.newest_on_disk() > 0):
            yield
        self._run.out.raise_error()

    async def save_if_due(self, job: Resumable, every: int | None, with_model: bool, eval_every: int = 0) -> None:
        out = self._run.out
        out.raise_error()
        self.checkpoints.check()
        await out.tracing.between_steps(self._trainer.executor, job.step, job.is_over)
        steps = eval_every if every is None else every
        is_due = job.is_over or bool(steps and job.step % steps == 0)
        if every is None and not job.is_over:
            is_old = self.checkpoints.age_s > AUTO_SAVE_S
            is_due = (is_due or is_old) and not self.checkpoints.is_writing
        if job.step == 0 or not is_due or not self._run.objects.saves:
            return
        if with_model and (job.is_over or every is not None):
            with out.spans("export"):
                await self._export(job.step)
        await self.save(job)

    async def save(self, job: Resumable) -> None:
        """Start to save a checkpoint of the last finished step, unless it is saved."""
        run = self._run
        with run.stop.saving(), run.out.spans("save"):
            run.out.writes.wait()  # a run that continues from here does not write earlier files again
            saved = {
                "kind": run.kind,
                "config": run.loaded.config.model_dump(mode="json"),
                "chat_template": self._chat.template,
                "stop_token_ids": self._chat.stop_token_ids,
                "wall_s": run.out.wall_s,
            }
            await self.checkpoints.save(job.step, saved | job.snapshot(), continues=not job.is_over)

    async def _export(self, step: int) -> Path:
        """Write the trainer's model, once for each step, in the compute dtype and with its tokenizer; a folder of this
        name is always complete."""
        run, cfg, trainer = self._run, self._run.loaded.config, self._trainer
        path = model_folder(run.folder, step)
        if path.is_dir():
            return path
        with output_errors(path, CONTINUE_LATER):
            path.parent.mkdir(parents=True, exist_ok=True)
        needed = await trainer.model_bytes() + (256 << 10)  # of the header
        if cfg.model.lora.enabled:
            needed += await trainer.state_bytes()  # the adapters alone are a third of that
        require_space(path.parent, needed, "a model")
        with output_errors(path, CONTINUE_LATER), replacing(path) as aside:
            share = await trainer.export(str(aside), cfg.model.path)
            write_chat(aside, self._chat)
        run.out.note(f"wrote {path}")
        if share is not None and share < LEAST_MERGED:
            run.out.note(
                f"its {cfg.model.dtype} weights have {share:.0%} of the change by the LoRA adapters; the rest is below "
                f"half a step of that dtype. {path / ADAPTER_FOLDER} has the adapters for peft, and this writes all of "
                f"it: meshrl convert {state_folder(path.parent.parent, step).parent} FOLDER --dtype float32"
            )
        prune_models(run.folder, cfg.run.keep_models)
        return path

    async def try_export(self) -> None:
        """Write all files of a model except its weights to a temporary folder, and load its tokenizer, so that nothing
        refuses the model after the steps that made it."""
        folder = self._run.folder
        if not self._run.objects.saves:
            return
        with output_errors(folder, OTHER_FOLDER), TemporaryDirectory(dir=folder) as name:
            await self._trainer.export(name, path := self._run.loaded.config.model.path, weights=False)
            write_chat(Path(name), self._chat)
            if read_tokenizer(name).get_vocab() != read_tokenizer(path).get_vocab():
                raise DataError(
                    f"a tokenizer with the files that an export copies has other tokens than that of {path}"
                )

    async def keep_best(self, step: int, score: float) -> None:
        """Make the model of `step` the best one if its score is higher, or if that of the former best one is of
        evaluations with another identity; for step 0 that is the model of model.path."""
        run, own = self._run, self._evaluation
        with run.out.spans("export"):
            best = read_best(run.folder)
            if math.isnan(score) or (best is not None and best.evaluation == own and score <= best.score):
                return
            model = str(await self._export(step)) if step else run.loaded.config.model.path
            every = run.save_every_steps or run.num_steps
            replace_best(
                run.folder, Best(step, score, model, own), lambda old: old == run.num_steps or old % every == 0
            )
