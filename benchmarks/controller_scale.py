"""CPU time of the controller for a step of a large cluster: 512 ranks that train, 512 that sample, 16,384 samples of
4,096 tokens.

    python benchmarks/controller_scale.py

The controller's code is that of a fully asynchronous run. The ranks have no models: one other process answers at once
for all of them (`stand_in_ranks.py`), with answers of the real size. Messages are pickled and sent over TCP. Each CPU
second of the controller's process, of all its threads, is counted in one part:

    turns             the request and the answer of each turn: the agent, routes, messages, answers
    decode            the text of each answer, by the tokenizer
    buffer            the buffer of groups, with the data's cursor and the groups that are finished
    flatten           trajectories -> samples
    planning          the batch plan
    advantages        advantages, and staleness
    loss_weights
    dispatch          the samples to the train ranks, their answers with the values of each token, the optimizer step
    metrics           the proof of the samplers, the correction's summary, all metrics of the step
    log               the lines of the step's log, which a default run has, in the event loop
    log_thread        the thread that writes these lines and the values of all tokens; it is in no sum

The log is measured for 512 answers, after a first write, and each time scaled to all: `inline`, with all its work in
the event loop, and as in a run, `thread`. log_us_loop_* and log_us_thread: CPU time for a token; late_ms_*: how much
later than asked a coroutine continues that sleeps for 5 ms, while the log is written (`none`: nothing is written).

The first step of a run is not counted; each figure is the mean of the next two. Lengths are drawn from a quarter to
seven quarters of --tokens, since equal lengths make the batch plan trivial (`planning_equal`). Only CPU time is used,
so other work on the machine matters little.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import tempfile
import time
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from measure import Report, parser
from stand_in_ranks import PROMPT_TOKENS, StandInExecutor, stand_in_ranks

from meshrl.agent import loop as agent_loop
from meshrl.agent.flatten import flatten
from meshrl.agent.loop import SingleTurn
from meshrl.algo.advantages import assign_advantages
from meshrl.algo.correction import correction_summary
from meshrl.algo.losses import make_policy_loss
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.executor import WorkerSpec
from meshrl.cluster.sampler_group import RolloutGroup
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.run import RunConfig
from meshrl.core.batch import Outputs
from meshrl.core.device import keep_freed_memory
from meshrl.core.types import POLICY, Metric, Prompt, Sample, Trajectory
from meshrl.data.decode import answer_text, text_of
from meshrl.data.order import PromptSource
from meshrl.loops.buffer import GroupBuffer
from meshrl.loops.collect import ScoredBatch
from meshrl.loops.finish_step import rollout_metrics
from meshrl.loops.job import Job
from meshrl.loops.train_step import _staleness, split_updates
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.metrics import divide, merge
from meshrl.monitor.recorder import Spans
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.token_log import TrainerValues
from meshrl.run.assemble import garbage_of_the_run
from meshrl.train.batch_plan import make_batch_plan
from meshrl.train.packing import pack

GROUP = 8
VOCAB = 32768
NUM_WARM, NUM_STEPS = 1, 3  # the first step is not counted: it allocates the memory that later steps reuse
STEP_PARTS = ("buffer", "flatten", "planning", "advantages", "loss_weights", "dispatch", "metrics", "log")
TURN_PARTS = ("turns", "decode")
LOGGED = 512  # trajectories of which the log is measured; all have the same cost


class Clock:
    """CPU seconds of this process by part. A part inside another one is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = 0.0
        self._depth = 0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Everything that the process does inside the block."""
        gc.collect()
        self._inner, began = 0.0, time.process_time()
        yield
        self.seconds[part] += time.process_time() - began - self._inner
        self._inner = 0.0

    def function(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is counted separately from the block around it."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    took = time.thread_time() - began
                    self.seconds[part] += took
                    self._inner += took

        return counted

    async def coroutine(self, part: str, awaitable: Awaitable[Any]) -> Any:
        """A coroutine's own time, without the time in which it waits."""
        return await _stepped(cast("Generator[Any, Any, Any]", awaitable.__await__()), self.function(part, _resume))


def _resume(steps: Generator[Any, Any, Any]) -> tuple[bool, Any]:
    try:
        return False, steps.send(None)
    except StopIteration as end:
        return True, end.value


@types.coroutine
def _stepped(steps: Generator[Any, Any, Any], resume: Callable[..., Any]) -> Generator[Any, Any, Any]:
    while True:
        is_over, value = resume(steps)
        if is_over:
            return value
        yield value


class Rewards:
    """A scorer that needs no CPU time: graders have processes of their own."""

    async def score(self, trajectories: list[Trajectory]) -> list[Metric]:
        for t in trajectories:
            t.rewards = {"right": float(t.index % 2)}
            t.reward = float(t.index % 2)
        return [Metric(name="reward/term/right", sum=0.5 * len(trajectories), weight=len(trajectories))]

    def check_failures(self, trajectories: list[Trajectory]) -> None: ...


def tokenizer_of(vocab: int) -> Any:
    """A byte-level tokenizer of tokens with 1 to 8 letters."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    rng, tokens = np.random.default_rng(0), dict[str, int]()
    while len(tokens) < vocab:
        letters = rng.integers(97, 123, rng.integers(1, 9)).astype(np.uint8).tobytes().decode()
        tokens.setdefault(("Ġ" if rng.random() < 0.5 else "") + letters, len(tokens))
    core = Tokenizer(BPE(vocab=tokens, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def config_of(num_prompts: int, num_ranks: int, tokens: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"path": "none"},
            "train": {"max_tokens_per_microbatch": max(16384, 2 * tokens)},
            "rollout": {
                "max_running_requests": max(GROUP, num_prompts * GROUP // num_ranks),
                "sampling": {"max_new_tokens": 2 * tokens},
            },
            "reward": {"terms": {"right": {"kind": "exact_match"}}},
            "loop": {
                "kind": "fully_async",
                "num_steps": NUM_STEPS + 1,
                "prompts_per_step": num_prompts,
                "samples_per_prompt": GROUP,
                "max_staleness": 1,
            },
            "cluster": {"num_train_ranks": num_ranks, "num_rollout_ranks": num_ranks, "timeout_s": 3600.0},
        }
    )


def specs_of(cfg: RunConfig) -> list[WorkerSpec]:
    train, rollout = cfg.cluster.num_train_ranks, cfg.cluster.num_rollout_ranks
    return [
        WorkerSpec(
            rank=rank,
            num_train_ranks=train,
            num_rollout_ranks=rollout,
            model=cfg.model,
            train=cfg.train,
            rollout=cfg.rollout,
            roles=(POLICY,),
            stop_token_ids=(VOCAB,),
            timeout_s=cfg.cluster.timeout_s,
            nodes=max(1, (train + rollout) // 8),
        )
        for rank in range(train + rollout)
    ]


def metrics_of_a_micro_batch(cfg: RunConfig) -> list[Metric]:
    """What a rank reports for one micro-batch, of the real loss."""
    mask = np.array([False, True, True])
    ones = np.where(mask, np.float32(1), np.float32(0))
    row = Sample(
        trajectory_id="",
        group_id="",
        row=0,
        prefix_len=1,
        tokens=np.zeros(3, np.int32),
        mask=mask,
        turn=np.zeros(3, np.int16),
        rollout_logprobs=-ones,
        versions=np.zeros(3, np.int32),
        rewards=ones,
        advantages=ones,
        loss_weight=ones,
    )
    logprobs = torch.full([3], -1.0, requires_grad=True)
    return [*make_policy_loss(cfg.algo)(Outputs(logprobs=logprobs, entropy=logprobs.detach()), pack([row], [0]))[1]]


def job_of(cfg: RunConfig, executor: StandInExecutor, tokenizer: Any) -> Job:
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(
            id=f"row-{i}",
            ordinal=0,
            ids=rng.integers(0, VOCAB, PROMPT_TOKENS if cfg.rollout.sampling.max_new_tokens > 1024 else 8, np.int32),
            messages=[{"role": "user", "content": "A question."}],
            answer="1",
        )
        for i in range(4 * cfg.loop.prompts_per_step)
    ]
    task = SimpleNamespace(
        agent=SingleTurn(),
        tokenizer=tokenizer,
        stop_token_ids=(VOCAB,),
        max_context_tokens=1 << 20,
        train_prompts=PromptSource(prompts, seed=0),
    )
    run = SimpleNamespace(spans=Spans(), ends_early=False, note=print, progress=lambda text: None)
    parts: dict[str, Any] = {
        "run": run,
        "keeper": None,
        "task": task,
        "scorer": Rewards(),
        "layout": None,
        "rollout_log": None,
    }
    job = Job(cfg=cfg, trainer=TrainGroup(executor), rollouts=RolloutGroup(executor), **parts)
    job.trainer.version = 0
    return job


async def step(
    job: Job, clock: Clock, batch: ScoredBatch, buffer: GroupBuffer
) -> tuple[list[Sample], int, TrainerValues]:
    """The controller's part of `train_step` and `finish_step`, without the log. Returns the samples, the bytes sent for
    training, and what the log gets from the trainer."""
    cfg, executor = job.cfg, cast(StandInExecutor, job.trainer.executor)
    trajectories = batch.trained
    with clock("flatten"):
        samples, metrics = flatten(trajectories)
    with clock("planning"):
        (update,) = split_updates(job, samples, 1)
    with clock("advantages"):
        metrics.append(_staleness(samples, job.trainer.version))
        metrics += assign_advantages(samples, cfg.algo)
    with clock("loss_weights"):
        assign_loss_weights(samples, cfg.algo, cfg.rollout.sampling.max_new_tokens)
    before = executor.num_bytes
    with clock("dispatch"):
        report = await job.trainer.forward_backward(update, "policy", make_policy_loss(cfg.algo), values=True)
        values = TrainerValues(version=job.trainer.version, samples=samples)
        values.add(update.samples, report.values)
        await job.trainer.optim_step("policy", 1e-6)
    sent = executor.num_bytes - before
    with clock("metrics"):
        metrics += report.metrics
        metrics += job.proof.check(report.mismatch, samples, cfg.model.dtype, job.trainer.version, job.run.note)
        metrics += correction_summary(metrics)
        metrics += rollout_metrics(job, trajectories, samples)
        metrics += await job.trainer.memory()
        metrics += batch.metrics
        divide(merge(metrics))
    with clock("buffer"):
        buffer.metrics()
        job.cursor = buffer.cursor()
    job.step += 1
    return samples, sent, values


class InlineWrites(FailedWrites):
    """Writes in the event loop."""

    def write(self, output: str, write: Callable[[], None]) -> None:
        with self.attempt(output):
            write()


async def log_cost(
    writes: FailedWrites | None, trajectories: Sequence[Trajectory], values: TrainerValues, tokenizer: Any
) -> tuple[float, float, list[float]]:
    """CPU seconds of the event loop and of the thread for one write, and the delays of a coroutine that sleeps for 5
    ms. writes: None = nothing is written for a second."""
    late: list[float] = []

    async def beat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - before - 0.005)

    with tempfile.TemporaryDirectory() as folder:
        log = RolloutLog(folder, partial(text_of, tokenizer, special=True), writes)
        if writes is not None:
            log.write(0, trajectories, trainer=values)  # the pieces of all tokens are decoded once
            writes.wait()
        gc.collect()
        beats = asyncio.create_task(beat())
        await asyncio.sleep(0.05)
        late.clear()
        everything, loop = time.process_time(), time.thread_time()
        if writes is None:
            await asyncio.sleep(1)
        else:
            log.write(1, trajectories, trainer=values)
            loop = time.thread_time() - loop
            while writes._unfinished is not None and not writes._unfinished.done():
                await asyncio.sleep(0.005)
            writes.wait()
            await asyncio.sleep(0.01)
        beats.cancel()
        return loop, time.process_time() - everything - loop, late


def num_bytes(samples: list[Sample]) -> int:
    """Bytes of all arrays of the samples."""
    arrays = (getattr(sample, f.name) for sample in samples for f in fields(sample))
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


async def measure(report: Report, cfg: RunConfig, executor: StandInExecutor, tokenizer: Any, name: str) -> Clock:
    """CPU seconds by part of NUM_STEPS steps."""
    clock, tokens, sent, samples, logged = Clock(), cfg.rollout.sampling.max_new_tokens // 2, 0, [], []
    values = TrainerValues(version=0, samples=[])
    agent_loop.answer_text = clock.function("decode", answer_text)
    job = job_of(cfg, executor, tokenizer)
    buffer = GroupBuffer(job)
    buffer.fill = clock.function("buffer", buffer.fill)  # type: ignore[method-assign]
    async with buffer:
        for number in range(NUM_STEPS):
            if number == NUM_WARM:
                clock.seconds.clear()
            logged, samples, values = [], [], TrainerValues(version=0, samples=[])
            with clock("turns"):
                batch = await clock.coroutine("buffer", buffer.take())
                while not all(group.task.done() for group in buffer._groups.values()):
                    await asyncio.sleep(0.2)
            samples, sent, values = await step(job, clock, batch, buffer)
            logged = batch.trained[:LOGGED]
            del batch
    agent_loop.answer_text = answer_text
    for part in clock.seconds:
        clock.seconds[part] /= NUM_STEPS - NUM_WARM
    lengths = [len(sample) for sample in samples]
    report.figure(f"tokens_per_sample_{name}", float(np.mean(lengths)))
    report.figure(f"sample_bytes_{name}", num_bytes(samples))
    report.figure(f"train_message_bytes_{name}", sent)
    report.bar(f"bytes_ratio_{name}", sent / num_bytes(samples), at_most=1.1)
    report.figure(f"peak_rss_gb_{name}", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
    of_logged = {trajectory.id for trajectory in logged}
    values.samples = [sample for sample in samples if sample.trajectory_id in of_logged]
    del samples
    num_logged = sum(len(turn.output_ids) for trajectory in logged for turn in trajectory.turns)
    for way, writes in (("none", None), ("inline", InlineWrites()), ("thread", FailedWrites())):
        loop, thread, late = await log_cost(writes, logged, values, tokenizer)
        report.figure(f"late_ms_mean_{way}_{name}", 1e3 * float(np.mean(late)))
        report.figure(f"late_ms_max_{way}_{name}", 1e3 * max(late))
        if writes is not None:
            report.figure(f"log_us_loop_{way}_{name}", 1e6 * loop / num_logged)
    report.figure(f"log_us_thread_{name}", 1e6 * thread / num_logged)
    clock.seconds["log"] = loop * len(lengths) / len(logged)
    clock.seconds["log_thread"] = thread * len(lengths) / len(logged)
    numbers = [i // GROUP for i in range(len(lengths))]
    with clock("planning_equal"):
        equal, prompt = [tokens] * len(lengths), min(PROMPT_TOKENS, tokens // 2)
        make_batch_plan(equal, cfg.cluster.num_train_ranks, 16384, numbers, [prompt] * len(lengths))
    report.raw[name] = dict(clock.seconds)
    return clock


async def run(report: Report, args: Any, socks: list[Any], sizes: list[int]) -> None:
    tokenizer, sums = tokenizer_of(VOCAB), dict[str, list[float]]()
    executor = None
    for size in sizes:
        cfg = config_of(size // GROUP, args.ranks // 2, args.tokens)
        specs = specs_of(cfg)
        executor = executor or StandInExecutor(specs, socks)
        executor.specs = specs
        clock = await measure(report, cfg, executor, tokenizer, str(size))
        parts = {part: clock.seconds[part] for part in (*STEP_PARTS, *TURN_PARTS)}
        parts["step"] = sum(parts[part] for part in STEP_PARTS)
        parts["step_and_turns"] = parts["step"] + sum(parts[part] for part in TURN_PARTS)
        for part, seconds in parts.items():
            sums.setdefault(part, []).append(report.figure(f"cpu_s_{part}_{size}", seconds))
        for part in ("planning_equal", "log_thread"):
            report.figure(f"cpu_s_{part}_{size}", clock.seconds[part])
    report.bar("cpu_s_step", sums["step"][-1], at_most=3.0)
    report.bar("cpu_s_step_and_turns", sums["step_and_turns"][-1], at_most=6.0)
    for part in ("step", "step_and_turns"):
        ratio = report.figure(f"ratio_{part}", sums[part][-1] / sums[part][0])
        report.bar(f"ratio_{part}", ratio, at_most=4.6)


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.add_argument("--ranks", type=int, default=1024, help="ranks; half of them train (default 1024)")
    p.add_argument("--samples", type=int, default=16384, help="samples of a step (default 16384)")
    p.add_argument("--tokens", type=int, default=4096, help="mean tokens of a sample (default 4096)")
    args = p.parse_args()
    if args.smoke:
        args.ranks, args.samples, args.tokens = 16, 256, 64
    report = Report("controller_scale", args)
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))  # as a run does
    sizes = [args.samples // 4, args.samples]
    metrics = metrics_of_a_micro_batch(config_of(args.samples // GROUP, args.ranks // 2, args.tokens))
    with garbage_of_the_run(has_tensors=False), stand_in_ranks(args.ranks, VOCAB, args.tokens, metrics) as socks:
        asyncio.run(run(report, args, socks, sizes))
    report.finish()


if __name__ == "__main__":
    main()
