"""What every metric means: its unit, what it looks like in a healthy run, and what it says when it doesn't.

The one source for docs/metrics.md, the texts under the curves of report.html and TensorBoard's descriptions.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """names: metrics that share an explanation; `<...>` in one stands for any text. units: one for all, or one each;
    "none" is a number without unit. healthy: the curve of a good run. otherwise: what another curve means, and what to
    do; may be empty."""

    names: tuple[str, ...]
    units: tuple[str, ...]
    healthy: str
    otherwise: str

    def unit_of(self, index: int) -> str:
        return self.units[index if len(self.units) > 1 else 0]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    intro: str
    entries: tuple[Entry, ...]


def meaning_of(name: str) -> tuple[Entry, str] | None:
    """The entry of a metric as a run logs it, and its unit there; None for a name that nobody explains. What the first
    sync tells is explained where all syncs are."""
    name = name.removeprefix("first_") if name.startswith("first_sync/") else name
    for entry in (entry for section in SECTIONS for entry in section.entries):
        for index, pattern in enumerate(entry.names):
            if re.fullmatch(re.sub("<[^>]*>", ".+", pattern), name):
                return entry, entry.unit_of(index)
    return None


def tables() -> str:
    """The glossary as Markdown: a table for each section."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"## {section.title}", ""] + [textwrap.fill(section.intro, 118), ""] * bool(section.intro)
        lines += ["| name | unit | healthy | when it isn't |", "| --- | --- | --- | --- |"]
        for entry in section.entries:
            names = ", ".join(f"`{name}`" for name in entry.names)
            lines.append(f"| {names} | {', '.join(entry.units)} | {entry.healthy} | {entry.otherwise} |")
        lines.append("")
    return "\n".join(lines)


def _entry(names: str, units: str, healthy: str, otherwise: str) -> Entry:
    return Entry(tuple(names.split(", ")), tuple(units.split(", ")), healthy, otherwise)


SECTIONS: tuple[Section, ...] = (
    Section(
        "Reward",
        "",
        (
            _entry(
                "reward/mean",
                "none",
                "rises, with noise of about std / sqrt(samples), and flattens",
                "flat from the start: every group scores alike, see `reward/groups_without_signal`. A "
                "jump to the maximum within a few steps: read rollouts, the grader has a hole",
            ),
            _entry(
                "reward/max, reward/min",
                "none",
                "the grader's extremes, both met early",
                "max never reached: no group can learn the answer; warm up by SFT or choose easier prompts",
            ),
            _entry(
                "reward/term/<name>",
                "none",
                "the term you care about moves, not only the cheap ones",
                "only the format term rises: its weight is too high",
            ),
            _entry(
                "reward/group_std",
                "none",
                "well above 0, falls as prompts get solved",
                "0 with a middling mean: all samples of a group are the same, see `rollout/duplicate_fraction`",
            ),
            _entry(
                "reward/groups_without_signal",
                "fraction",
                "below a half for most of the run; rises towards 1 as the task is mastered",
                "near 1 from the start: these groups cost a full rollout and teach nothing. More samples "
                "per prompt, or prompts of another difficulty",
            ),
            _entry(
                "reward/groups_of_one",
                "fraction",
                "0",
                "members of a group failed or were evicted; a lone sample has no baseline and gets advantage 0",
            ),
            _entry(
                "reward/failed",
                "fraction",
                "0, at most a stray timeout",
                "graders crash or time out. Failures are masked, never scored 0; past "
                "`reward.max_failure_fraction` the run ends",
            ),
            _entry(
                "reward/failed_<kind>",
                "gradings",
                "absent",
                "`timeout`, `crash`, `memory`, `bad_value`, `agent`: which of them it was",
            ),
            _entry(
                "reward/workers_killed",
                "processes",
                "0",
                "each was killed for time or memory or died, and another started in its place",
            ),
            _entry(
                "reward/gradings_redone",
                "gradings",
                "0",
                "their worker died, by itself or by the kernel for lack of memory, and they got a second try",
            ),
            _entry(
                "reward/math_timeouts",
                "gradings",
                "0, at most a few",
                "answers that `math_answer` could not evaluate in 1 s of CPU time. Each is graded as wrong and costs a "
                "new worker; many of them slow down every step: read such answers in the rollouts",
            ),
            _entry("reward/kl", "nats", "small, rises slowly", "only with `algo.kl.place: reward`; as `loss/kl`"),
        ),
    ),
    Section(
        "Held-out evaluation",
        "",
        (
            _entry(
                "eval/mean_at_k",
                "score",
                "follows `reward/mean`; the number to believe",
                "stays behind a rising reward: overfitting or a grader with a hole",
            ),
            _entry(
                "eval/pass_at_k",
                "fraction",
                "at or above mean@k; barely moves when RL only sharpens what the model could do before",
                "falls while mean@k rises: the answers lose variety; watch `loss/entropy`",
            ),
            _entry(
                "eval/length_mean_tokens",
                "tokens",
                "like the training length",
                "much longer than in training: greedy loops",
            ),
            _entry(
                "eval/num_prompts, eval/num_failed",
                "prompts, attempts",
                "constant; 0",
                "failed attempts count as 0 here, so that a model is not better for what it could not answer",
            ),
        ),
    ),
    Section(
        "Rollout",
        "",
        (
            _entry(
                "rollout/length_mean_tokens",
                "tokens",
                "finds its level; reasoning tasks may grow for long",
                "to the limit: answers are cut. To almost nothing: the reward can be had without an answer",
            ),
            _entry(
                "rollout/length_max_tokens, rollout/length_tokens/<quantile>",
                "tokens",
                "p95 well below `rollout.sampling.max_new_tokens`",
                "p95 at the limit: as `rollout/truncated_fraction`",
            ),
            _entry(
                "rollout/truncated_fraction",
                "fraction",
                "falls below a few percent",
                "under `algo.truncated: train` cut answers are trained with whatever the grader gave them, which "
                "teaches brevity; above 0.2 it teaches little else. Under `mask` they are left out of the loss, and "
                "this is their share. Raise the limit or check that the model knows its stop token",
            ),
            _entry(
                "rollout/failed_fraction",
                "fraction",
                "0",
                "engine or agent refused them (a prompt that fills the context, say); their `failure` is "
                "in the rollout log",
            ),
            _entry(
                "rollout/evicted_fraction",
                "fraction",
                "0 without staleness",
                "too stale when their turn came: the sampler is far ahead of the trainer",
            ),
            _entry("rollout/unscored_fraction", "fraction", "0", "their grading failed: see `reward/failed`"),
            _entry(
                "rollout/duplicate_fraction",
                "fraction",
                "near 0 for answers of some length; high only for one-word answers or spent entropy",
                "near 1 from the start: samples share a seed",
            ),
            _entry(
                "rollout/turns_mean, rollout/rows",
                "turns, rows",
                "1 and one a trajectory for single-turn agents",
                "more rows than trajectories: branches, or a chat template that rewrites history",
            ),
            _entry("rollout/num_tokens", "tokens", "samples x mean length", ""),
            _entry(
                "rollout/ranks_replaced, rollout/requests_redone",
                "ranks, requests",
                "0",
                "a rank that only samples died or gave no answer; the run's notes say why",
            ),
            _entry(
                "rollout/tokens_per_s",
                "tokens/s",
                "level, or falling slowly as answers grow",
                "falls at equal lengths: a few long answers hold up the batch, or memory is short",
            ),
        ),
    ),
    Section(
        "Loss",
        "Per trained token. With one update a step the old policy is the policy itself: ratios are "
        "exactly 1, clip fractions exactly 0, `loss/approx_kl` exactly 0. Anything else there is a bug, "
        "not a training signal.",
        (
            _entry(
                "loss/policy",
                "none",
                "near 0, either sign, without trend: advantages are centred",
                "not a progress bar; large values come with large ratios",
            ),
            _entry(
                "loss/kl",
                "nats",
                "rises slowly from exactly 0 at step 0",
                "not 0 at step 0: policy and reference are not the same model. Runs away: raise "
                "`algo.kl.coef` or lower the learning rate",
            ),
            _entry(
                "loss/approx_kl",
                "nats",
                "below about 0.02 with several updates a step",
                "growing: updates too large; lower the learning rate or the number of updates",
            ),
            _entry(
                "loss/entropy",
                "nats",
                "falls as the model gets sure, more and more slowly",
                "to 0 in a few steps: collapse, nothing left to explore. Rising without end: the policy dissolves",
            ),
            _entry(
                "loss/clip_fraction_low, loss/clip_fraction_high",
                "fraction",
                "up to a few percent each",
                "above 0.2: most of the gradient is thrown away; lower the learning rate",
            ),
            _entry(
                "loss/clip_fraction_dual",
                "fraction",
                "near 0",
                "only with `algo.loss.dual_clip`; as the other clip fractions",
            ),
            _entry(
                "loss/ratio_mean, loss/ratio_max",
                "none",
                "1; below about 10",
                "max in the hundreds: sampler and trainer disagree on some token, see `proof/logprob_abs_diff_max`",
            ),
            _entry(
                "loss/nll",
                "nats",
                "falls fast, then slowly",
                "SFT only. Rises: learning rate too high. Below 0.01: rows learned by heart",
            ),
            _entry(
                "loss/<name>",
                "none",
                "depends on the loss: the mean over trained tokens of what a user-defined loss measures",
                "",
            ),
        ),
    ),
    Section(
        "Training",
        "",
        (
            _entry(
                "train/grad_norm",
                "norm",
                "level within a factor of a few; before clipping",
                "spikes that come more often: lower the learning rate. 0: no group had a signal",
            ),
            _entry("train/lr", "1/step", "the schedule", ""),
            _entry(
                "train/skipped_steps",
                "steps",
                "0",
                "the gradient was not finite and the step was left out on all ranks alike",
            ),
            _entry(
                "train/restarts",
                "restarts",
                "0",
                "train ranks died or gave no answer, and the run went on from its last checkpoint",
            ),
            _entry(
                "train/num_tokens, train/tokens_per_s",
                "tokens, tokens/s",
                "speed level",
                "falls at equal tokens: recomputation, swapping, or a rank that waits for another",
            ),
        ),
    ),
    Section(
        "Proof that the sampler is the trainer",
        "The trainer scores what was sampled before every optimizer step. The first step, where both "
        "sides hold the same untouched weights, calibrates the limit: ten times its mean difference, or "
        "what rounding explains in the model's dtype if that is more (1e-4 nats in float32, 0.02 in bfloat16), "
        "but never above 0.01 and 0.2 nats, which also bound the first step itself. A single row may be five times as "
        "far off. Beyond that the run ends with "
        "`SamplerMismatchError` rather than train on a mistake.",
        (
            _entry(
                "proof/logprob_abs_diff_mean",
                "nats",
                "constant from the first step on: about 1e-6 in fp32, about 0.01 in bf16",
                "any trend. Growing with the steps: weights do not arrive",
            ),
            _entry(
                "proof/logprob_abs_diff_max",
                "nats",
                "an order or two above the mean",
                "large on single tokens only: a filter in sampling, another temperature, a cache that survived a sync",
            ),
            _entry(
                "proof/logprob_abs_diff_row",
                "nats",
                "a few times the mean",
                "far above the mean: one engine of several samples with other weights",
            ),
            _entry("proof/sampler_kl", "nats", "tiny and level", "as the mean"),
            _entry(
                "proof/limit",
                "nats",
                "constant after the first step; `proof/logprob_abs_diff_mean` stays far below",
                "a mean beyond it ends the run",
            ),
        ),
    ),
    Section(
        "Weight sync",
        "",
        (
            _entry("sync/latency_s", "s", "constant", "grows: memory pressure on the receiving side"),
            _entry(
                "sync/num_bytes",
                "bytes",
                "to each sampler. `rollout.sync_mode=full`: constant, parameters x bytes of the sampler's dtype; "
                "delta: a tenth of that and less at small learning rates",
                "delta, and as much as full: samplers were new or had lost their version, or most weights change",
            ),
            _entry("sync/gb_per_s", "GB/s", "near the rate of copying memory, or of the network", ""),
            _entry(
                "sync/extra_bytes",
                "bytes",
                "constant: two buckets (`rollout.sync_bucket_bytes`), all train ranks together; with delta also a copy "
                "of the weights in the sampler's dtype",
                "",
            ),
            _entry("sync/changed_tensors", "fraction", "1: every tensor has another digest than before", "0: no step"),
            _entry(
                "sync/changed_elements",
                "fraction",
                "with `rollout.sync_mode=delta`: of the weights as the sampler rounds them; exact. A few hundredths at "
                "lr 1e-6 in bfloat16",
                "0: no step was large enough to change one sampled weight",
            ),
            _entry("sync/version", "version", "rises by one a step", "stands still: nothing was trained in that step"),
            _entry(
                "sync/proven_wire, sync/proven_resident",
                "fraction",
                "1: all samplers acknowledged the version with matching digests, of the bytes that "
                "arrived (wire) and of the parameters that they compute with, read back (resident)",
                "a digest that differs ends the run with `SyncError`; resident below 1: an engine "
                "that can't read its parameters back",
            ),
            _entry(
                "sync/<stage>_s",
                "s",
                "constant",
                "each by the slowest rank. `cast`: shards into the sampler's dtype and into buckets, and the search "
                "for changes; `gather`: train ranks wait for each other; `load`: bytes into place; `verify`: digests "
                "on both sides; `send`: what is left of the latency. Senders and samplers work at the same time, so "
                "together they may be more than `sync/latency_s`",
            ),
            _entry(
                "first_sync/<name>",
                "as `sync/<name>`",
                "of the sync before the first step, which gives the samplers version 0 and is always full; "
                "in the line of step 0",
                "",
            ),
        ),
    ),
    Section(
        "Time and memory",
        "",
        (
            _entry(
                "time/<phase>_s",
                "s",
                "`time/rollout_s` the largest, `time/train_s` next; together about the step's length",
                "reward above a tenth: more `reward.num_workers`. Phases of several tasks at once count "
                "their wall time once",
            ),
            _entry(
                "memory/rss_bytes, memory/rss_bytes/<process>",
                "bytes",
                "level after the first steps; all processes of the run, shared pages counted in each",
                "a slope over a hundred steps: a leak; the processes' own curves say whose",
            ),
            _entry(
                "memory/lent_bytes",
                "bytes",
                "with `rollout.release_memory`: what all samplers gave up for the trainer in this step; at least their "
                "weights",
                "far below the weights of all samplers: one of them keeps its memory",
            ),
            _entry(
                "memory/device_<kind>",
                "bytes",
                "level after the first steps, largest rank",
                "`peak_bytes` near the device's size: lower `train.max_tokens_per_microbatch`",
            ),
        ),
    ),
)
