"""All optimizer steps of one step: logprobs that the algorithm needs, advantages, gradients, the sampler proof."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.algo.correction import correction_summary
from meshrl.algo.losses import make_policy_loss, rows_without_gradient
from meshrl.algo.mismatch import row_mismatch
from meshrl.algo.reduce import assign_loss_weights
from meshrl.cluster.rows import PlannedRows
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.algo import AlgoConfig
from meshrl.config.run import RunConfig
from meshrl.core.errors import MeshrlError, RewardError
from meshrl.core.types import Metric, Sample, Trajectory
from meshrl.loops.collect import check_failures
from meshrl.loops.finish_step import rollout_metrics
from meshrl.loops.job import Job
from meshrl.loops.step_record import update_record
from meshrl.loops.sync_and_probe import SamplerProof, contexts_to_probe, probe_result
from meshrl.monitor.digests import Record
from meshrl.monitor.metrics import histogram
from meshrl.monitor.recorder import Spans
from meshrl.monitor.token_log import TrainerValues
from meshrl.train.engine import ShardDigests, StepReport
from meshrl.train.optim import learning_rate

_MAX_REFUSED_STEPS = 3  # in succession
_MAX_ABSTAINED_STEPS = 3  # in succession


async def train_step(job: Job, trajectories: Sequence[Trajectory], replaced: Sequence[Trajectory] = ()) -> list[Metric]:
    """Train on scored trajectories: all optimizer steps of one step, without the sync. Returns the metrics. Without a
    reward there is nothing to train on, and the weights stay. replaced: answers of the step that are not trained.
    """
    answers = [*trajectories, *replaced]
    check_failures(job.cfg, job.scorer, answers)
    refusals = [t.failure.message for t in answers if t.failure is not None and t.failure.kind == "engine"]
    job.num_refused_steps = job.num_refused_steps + 1 if 0 < len(refusals) == len(answers) else 0
    if job.num_refused_steps == _MAX_REFUSED_STEPS:
        raise MeshrlError(
            f"step {job.step + 1}: in {_MAX_REFUSED_STEPS} steps in succession the engine refused or aborted every "
            f"request. First error: {refusals[0]}"
        )
    num_abstained = sum(t.has_abstained for t in answers)
    has_none = num_abstained > 0 and all(t.reward is None for t in answers)
    job.num_abstained_steps = job.num_abstained_steps + 1 if has_none else 0
    if job.num_abstained_steps == _MAX_ABSTAINED_STEPS:
        terms = [name for name, term in job.cfg.reward.terms.items() if term.weight]
        raise RewardError(
            f"step {job.step + 1}: in {_MAX_ABSTAINED_STEPS} steps in succession no answer has a reward, because the "
            f"reward functions of {', '.join(terms)} returned None, as for rows to which they don't apply. Does a "
            "function lack a return? Let one of them return a number for each row"
        )
    work = StepWork(
        cfg=job.cfg,
        trainer=job.trainer,
        proof=job.proof,
        step=job.step,
        spans=job.run.spans,
        note=job.run.note,
        logs_values=job.rollout_log.has_file(job.step + 1),
        free_memory=partial(_free_memory, job),
        before_step=lambda rows: probe_result(job),
    )
    job.record = {
        "trained": len(trajectories),
        "version": job.trainer.version,
        "threshold": job.proof.threshold,
        "updates": work.records,
    }
    samples, metrics = await train_on(work, trajectories, replaced)
    job.token_values = work.values
    if not samples:
        abstained = f"; the reward functions returned None for {num_abstained} of them" if num_abstained else ""
        reason = f". The engine refused {len(refusals)} of them, such as: {refusals[0]}" if refusals else ""
        text = f"none of {len(trajectories)} trajectories has a reward; nothing to train on{abstained}{reason}"
        job.run.note(f"step {job.step + 1}: {text}")
    else:
        job.probed = contexts_to_probe(samples) if job.cfg.loop.staleness else None
    with job.run.spans("log"):
        return metrics + rollout_metrics(job, answers, samples)


async def _free_memory(job: Job) -> list[Metric]:
    """Of colocated samplers, until the next sync."""
    if not job.rollouts.releases_memory:
        return []
    size = await job.rollouts.release_memory()
    return [Metric(name="memory/released_bytes", sum=float(size), reduce="sum", unit="bytes")]


@dataclass(kw_only=True, slots=True)
class StepWork:
    """What a step needs to train on its answers. `meshrl replay` makes it from a run's folder.

    step: finished steps. logs_values: whether `values` gets the trainer's values of each token. free_memory: awaited
    before the ranks train. before_step: awaited with the rows of each optimizer step. records: of the optimizer steps
    (loops/step_record.py). shards: the digests of their ranks.
    """

    cfg: RunConfig
    trainer: TrainGroup
    proof: SamplerProof
    step: int
    spans: Spans
    note: Callable[[str], None]
    logs_values: bool = False
    free_memory: Callable[[], Awaitable[list[Metric]]] | None = None
    before_step: Callable[[PlannedRows], Awaitable[list[Metric]]] | None = None
    values: TrainerValues | None = field(init=False, default=None)
    records: list[Record] = field(default_factory=list)
    shards: list[list[ShardDigests]] = field(default_factory=list)

    def begin(self, samples: Sequence[Sample]) -> None:
        if self.logs_values:
            self.values = TrainerValues(version=self.trainer.version, samples=samples)


async def train_on(
    work: StepWork, trajectories: Sequence[Trajectory], replaced: Sequence[Trajectory]
) -> tuple[list[Sample], list[Metric]]:
    """All optimizer steps on scored trajectories. Returns their samples, of which there are none without a reward, and
    the metrics."""
    algo = work.cfg.algo
    needs_logprobs = _needs_logprobs(algo)
    with work.spans("flatten"):
        samples, metrics = flatten(trajectories)
        if samples and not needs_logprobs:
            metrics += assign_advantages(samples, algo)
    if samples:
        work.begin(samples)
        with work.spans("batch_plan"):
            updates = split_updates(work, samples, work.cfg.train.updates_per_step)
        with work.spans("train"):
            if work.cfg.loop.staleness:
                metrics.append(_staleness(samples, work.trainer.version))
            metrics += [] if work.free_memory is None else await work.free_memory()
            metrics += await annotate(work, updates)
            if needs_logprobs:
                metrics += assign_advantages(samples, algo)
            metrics += await update(work, updates)
    if rewards := [t.reward for t in replaced if t.reward is not None]:  # the mean is that of all answers
        metrics.append(Metric(name="reward/mean", sum=math.fsum(rewards), weight=len(rewards)))
    return samples, metrics


def _staleness(samples: Sequence[Sample], version: int) -> Metric:
    """By how many versions the oldest token of each sample is older than the trainer's weights."""
    oldest = [int(s.versions[s.mask].min()) for s in samples if s.mask.any()]
    return histogram("rollout/staleness_versions", version - np.array(oldest), "versions")


def split_updates(work: StepWork, samples: Sequence[Sample], num_updates: int) -> list[PlannedRows]:
    """Divide the samples into num_updates optimizer steps with equally many groups; groups are not split. The loss
    weights are assigned. Rows without a gradient, as far as this is known by now, have micro-batches of their own, or
    none: then no logprob of theirs is computed. Old logprobs and gradient share this plan: in bf16 a row's logprobs
    depend on the rows packed with it, by more than GSPO's clip range."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    parts: list[list[Sample]] = [[] for _ in range(num_updates)]
    for i, members in enumerate(groups.values()):
        parts[i * num_updates // len(groups)].extend(members)
    return [_planned(work, part) for part in parts if part]


def _planned(work: StepWork, samples: list[Sample]) -> PlannedRows:
    cfg = work.cfg
    assign_loss_weights(samples, cfg.algo, cfg.rollout.sampling.max_new_tokens)
    balances = cfg.train.router_aux_loss_coef > 0  # a loss of all tokens
    scored = without = set() if balances else rows_without_gradient(cfg.algo, samples)
    if not _needs_logprobs(cfg.algo):
        scored = work.proof.rows_to_score(samples, without, work.trainer.version, cfg.run.seed)
    return work.trainer.plan_rows(samples, scored, without - scored)


def _needs_logprobs(cfg: AlgoConfig) -> bool:
    """Whether the advantages of a group depend on the logprobs of all of its rows."""
    return cfg.kl.coef > 0 and cfg.kl.place == "reward"


async def annotate(work: StepWork, updates: Sequence[PlannedRows]) -> list[Metric]:
    """Compute only the logprobs that the algorithm needs: of the reference when the KL coefficient is above 0, old ones
    when the step has several updates (a single update is on-policy and needs no second forward pass)."""
    metrics: list[Metric] = []
    for update in updates:
        if work.cfg.algo.kl.coef > 0:
            for i, row in (await work.trainer.forward(update, "reference")).items():
                update.samples[i].ref_logprobs = row
        if len(updates) > 1:
            version, mismatch = work.trainer.version, dict[int, np.ndarray]()
            for i, row in (await work.trainer.forward(update, "policy")).items():
                update.samples[i].old_logprobs = row
                mismatch[i] = row_mismatch(update.samples[i], row, version)
            metrics += work.proof.check(mismatch, update.samples, work.cfg.model.dtype, version, work.note)
    return metrics


async def update(work: StepWork, updates: Sequence[PlannedRows]) -> list[Metric]:
    """One optimizer step for each of the updates that has a token to train, else a note. The sampler proof is checked
    between the gradient and the step. The position in the schedule of the learning rate follows from the step, so that
    a resume may change train.updates_per_step, and steps without an optimizer step count."""
    cfg, metrics = work.cfg, list[Metric]()
    loss = make_policy_loss(cfg.algo)
    first = work.step * cfg.train.updates_per_step
    for position, part in enumerate(updates, first):
        if not any(sample.loss_weight is not None and sample.loss_weight.any() for sample in part.samples):
            cut = sum(sample.truncated for sample in part.samples)
            reason = f"none of {len(part.samples)} rows has a sampled token"
            if cut:
                reason = (
                    f"{cut} of {len(part.samples)} rows were cut off and algo.truncated is mask, so no token is "
                    "trained. Raise rollout.sampling.max_new_tokens (or agent.args.max_turns), or set algo.truncated "
                    "to train"
                )
            work.note(f"step {work.step + 1}: {reason}; this optimizer step is skipped")
            continue
        report = await work.trainer.forward_backward(part, "policy", loss, work.values is not None)
        unscored, num_rows = [part.samples[i] for i in part.batch_plan.unscored], len(part.samples)
        without = part.num_without_gradient()
        metrics += [
            Metric(name="train/no_gradient_fraction", sum=without, weight=num_rows, unit="fraction"),
            Metric(name="train/no_forward_fraction", sum=len(unscored), weight=num_rows, unit="fraction"),
        ]
        if unscored:  # their loss is 0
            weight = math.fsum(float(s.loss_weight.sum()) for s in unscored if s.loss_weight is not None)
            metrics.append(Metric(name="loss/policy", sum=0.0, weight=weight))
        if work.values is not None:
            work.values.add(part.samples, report.values)
        metrics += report.metrics
        if len(updates) == 1:
            metrics += work.proof.check(report.mismatch, part.samples, cfg.model.dtype, work.trainer.version, work.note)
        metrics += [] if work.before_step is None else await work.before_step(part)
        lr = learning_rate(position, cfg.num_updates, cfg.peak_lr, cfg.train.scheduler)
        step, of_the_step = await optimizer_step(work.trainer, work.step, lr, digests=True)
        work.records.append({"update": position - first, **update_record(part, report, step)})
        work.shards.append(step.shards)
        if step.skipped:
            work.note(
                f"step {work.step + 1}: the gradient norm is {step.grad_norm}, so this optimizer step is skipped; "
                f"look at loss/* (the loss is {cfg.algo.loss.kind})"
            )
        metrics += of_the_step
    return metrics + correction_summary(metrics)


async def optimizer_step(
    trainer: TrainGroup, step: int, lr: float, digests: bool = False
) -> tuple[StepReport, list[Metric]]:
    """Update the weights of all train ranks. step: number of finished steps of the loop. digests: as in optim_step."""
    report = await trainer.optim_step("policy", lr, digests)
    if report.not_finite:
        raise MeshrlError(
            f"step {step + 1}: {report.not_finite} has values that are not finite in model.dtype "
            f"{trainer.compute_dtype} after the optimizer step (learning rate {lr:g}, gradient norm "
            f"{report.grad_norm:.4g}). These weights are not used, saved or exported. Lower train.optimizer.lr, or set "
            "train.optimizer.clip to a value above 0 if it is 0, and continue from the last checkpoint with "
            "run.resume=auto"
        )
    return report, [
        Metric(name="train/grad_norm", sum=report.grad_norm, unit=""),
        Metric(name="train/lr", sum=lr, unit="1/step"),
        Metric(name="train/skipped_steps", sum=float(report.skipped), reduce="sum", unit="steps"),
    ]
