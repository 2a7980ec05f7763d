"""The keys of loop.* and sft.*, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from meshrl.config.base import EVALUATED, OnlyWith, Slice, Unless
from meshrl.config.case import Case, Problem
from meshrl.config.data import Format
from meshrl.config.kinds import compares_groups
from meshrl.core.lookup import similar_names

WEIGHTED_SUM = "weighted_sum"  # the value of loop.eval_term for the sum of all terms


_ASYNC = OnlyWith("loop.kind", "fully_async")


class LoopConfig(Slice):
    kind: Literal["colocated", "one_step_off", "fully_async"] = "colocated"
    """schedule of sampling and training; colocated = they take turns; one_step_off = each batch is sampled while the
    previous one is trained; fully_async = a step trains on the groups that have finished, and new weights arrive while
    others are sampled (docs/schedules.md)"""
    num_steps: int = Field(ge=1)
    """number of steps; each step samples and trains"""
    num_epochs: float | None = Field(None, gt=0, le=1e6)
    """in place of num_steps: passes over the rows of data.path, rounded to steps; rows that are left out count, too"""
    prompts_per_step: int = Field(32, ge=1)
    """prompts drawn for each step"""
    samples_per_prompt: int = Field(8, ge=1)
    """answers sampled for each prompt: the size of its group; 8 or more give a stable baseline"""
    max_staleness: int | None = Field(None, ge=0)
    """weight versions by which a sample may be older than the weights that train on it; null = 0 for colocated, 1 for
    one_step_off, 2 for fully_async"""
    in_flight: Annotated[Literal["keep", "abort", "restart"], _ASYNC] = "keep"
    """what happens under fully_async to running answers when new weights arrive; keep = the engine continues them with
    the new weights; abort = they are sent again with their tokens so far; restart = they begin again, so that an answer
    has one version"""
    oversampling: Annotated[float, _ASYNC] = Field(0.0, ge=0, le=1)
    """fraction of additional groups that fully_async starts; a step then drops groups that it does not take and that
    would become too old, up to this fraction, instead of waiting for them. 0 = no group is dropped. This is faster
    but biased: long answers are dropped most often"""
    max_replaced_groups: int = Field(0, ge=0)
    """groups that a step replaces by newly sampled ones because all their answers have the same reward, which gives
    no gradient (dynamic sampling of DAPO); after this many the step takes any group. 0 = none is replaced"""
    replace_by: Annotated[str | None, Unless("loop.max_replaced_groups", 0)] = None
    """score in which the answers of a group must differ, besides their reward: one of reward.terms, or weighted_sum =
    the reward; null = eval_term if it is set, else the weighted sum without terms of kind overlong and format, which
    judge no answer"""
    eval_every_steps: int = Field(0, ge=0)
    """steps between evaluations; 0 = only before and after training"""
    eval_samples: Annotated[int, EVALUATED] = Field(1, ge=1)
    """answers sampled for each held-out prompt: k of mean@k and pass@k; 1 = one greedy answer, unless
    rollout.eval_sampling.temperature is set"""
    eval_term: Annotated[str | None, EVALUATED] = None
    """score of an answer for eval/mean_at_k, eval/pass_at_k and save_best: one of reward.terms (its weight may be 0),
    or weighted_sum = the reward; null = weighted_sum. All terms are graded and reported in any case"""
    eval_pass_score: Annotated[float | None, EVALUATED] = None
    """score of eval_term from which on an answer counts as passed in eval/pass_at_k; null = 1 for a term, and for
    weighted_sum the sum of the weights above 0 of the terms that apply to the answer, without kind overlong: each of
    these terms scores 1"""
    save_best: Annotated[bool, EVALUATED] = True
    """save the model whenever an evaluation has the highest eval/mean_at_k so far, the mean of eval_term; the previous
    best is deleted, unless a checkpoint needs it or save_every_steps retains it"""
    save_every_steps: int | None = Field(None, ge=0)
    """null = the training state is saved at each evaluation, and at least every ten minutes; a number = steps between
    checkpoints, each with the training state and the model; 0 = a checkpoint only at the end and when the run is
    interrupted, so that a run that loses train ranks can't continue"""

    @property
    def staleness(self) -> int:
        """max_staleness, or its default for this kind."""
        if self.max_staleness is not None:
            return self.max_staleness
        return {"colocated": 0, "one_step_off": 1, "fully_async": 2}[self.kind]


class SftConfig(Slice):
    path: str
    """training rows, in any form that data.path accepts; each row has a list of chat messages, in which the assistant's
    messages are trained, or a question and its answer (sft.prompt)"""
    format: Format = "auto"
    """as data.format"""
    subset: str | None = None
    """as data.subset"""
    split: str | None = None
    """as data.split"""
    messages: Annotated[str, OnlyWith("sft.prompt", None)] = "messages"
    """column with the chat messages"""
    prompt: str | None = None
    """in place of messages: column with the question, as data.prompt"""
    answer: Annotated[str, Unless("sft.prompt", None)] = "answer"
    """column with the answer, a text or a number, which is trained"""
    system: Annotated[str | None, Unless("sft.prompt", None)] = None
    """system message put before each question"""
    images: str | None = None
    """as data.images"""
    eval_path: str | None = None
    """held-out rows, in any form that path accepts; eval/loss is the loss of their answers"""
    eval_split: Annotated[str | None, Unless("sft.eval_path", None)] = None
    """split of a Hugging Face data set in eval_path"""
    eval_fraction: float | None = Field(None, gt=0, lt=1)
    """in place of eval_path: share of the rows of path that are held out and not trained; those that data.eval_fraction
    with the same value holds out"""
    eval_every_steps: Annotated[int, Unless("sft.eval_path", None, also="sft.eval_fraction")] = Field(0, ge=0)
    """steps between held-out losses; 0 = only before and after training"""
    bad_rows: Literal["error", "leave_out"] = "error"
    """as data.bad_rows"""
    tools: str | None = "tools"
    """column with the tools of a row's conversation, a list or its JSON text, if the row has it; null = it is not
    read"""
    chat_template: str | None = None
    """as data.chat_template"""
    chat_template_kwargs: dict[str, Any] = Field({})
    """as data.chat_template_kwargs"""
    rows_per_step: int = Field(64, ge=1)
    """rows in one optimizer step"""
    num_steps: int = Field(ge=1)
    """optimizer steps"""
    num_epochs: float | None = Field(None, gt=0, le=1e6)
    """in place of num_steps: passes over the rows, rounded to steps; rows that are left out count, too"""
    save_every_steps: int | None = Field(None, ge=0)
    """null = the training state is saved at least every ten minutes; a number = steps between checkpoints; 0 = only at
    the end and when the run is interrupted, so that a run that loses train ranks can't continue"""
    max_row_tokens: int = Field(1024, ge=1)
    """limit of a row in tokens; longer rows are left out and counted"""
    shuffle: bool = True
    """draw the rows of each pass in a new random order, from run.seed"""


def loop_problems(case: Case) -> Iterator[Problem]:
    config, loop = case.rl, case.rl.loop
    for key, kind in config.algo.advantages.items() if loop.samples_per_prompt == 1 else ():
        if compares_groups(kind):
            text = f"{kind} compares the answers of a group; a group of one has nothing to compare with. "
            yield Problem(("loop.samples_per_prompt", key), f"{text}Use 2 or more (8 is usual).")
    if loop.samples_per_prompt == 1 and loop.max_replaced_groups:
        text = "a group of one answer has one reward, so every group would be replaced. Use 0, or 2 or more "
        yield Problem(("loop.max_replaced_groups", "loop.samples_per_prompt"), f"{text}samples_per_prompt.")
    if loop.prompts_per_step % config.train.updates_per_step:
        text = "must divide prompts_per_step, so that each optimizer step gets the same number of complete groups."
        yield Problem(("train.updates_per_step", "loop.prompts_per_step"), text)
    most = {"colocated": 0, "one_step_off": 1}.get(loop.kind)
    if most is not None and loop.staleness > most:
        text = f"{loop.kind} never trains on samples that are more than {most} versions old. Use at most {most}, or "
        keys = ("loop.max_staleness", "loop.kind")
        yield Problem(keys, f"{text}kind: fully_async.", void=keys[:1])
    if loop.kind != "colocated" and config.cluster.executor != "inline" and not config.cluster.num_rollout_ranks:
        text = f"{loop.kind} samples and trains at the same time, which needs ranks that only sample: use 1 or more."
        yield Problem(("cluster.num_rollout_ranks", "loop.kind"), text)
    if loop.staleness and config.rollout.engine == "endpoint":
        text = (
            "an endpoint gives no read-back of its weights, so only its samples prove them, and those that are older "
            "than the trainer's weights prove nothing. Use kind: colocated, or engine: vllm."
        )
        yield Problem(("loop.kind", "rollout.engine"), text)
    if not config.data.is_evaluated and (loop.eval_every_steps or case.purpose == "eval"):
        every = ("loop.eval_every_steps",) if loop.eval_every_steps else ()
        text, why = "set data.eval_path, eval_sets or eval_fraction.", "there are no held-out rows for an evaluation"
        keys = ("data.eval_path", *every)
        yield Problem(keys, f"an evaluation needs held-out rows: {text}", void=every, reason=why)
    terms = [*config.reward.terms, WEIGHTED_SUM]
    for key, term in {"eval_term": loop.eval_term, "replace_by": loop.replace_by}.items():
        if config.reward.terms and term is not None and term not in terms:
            close = similar_names(term, terms, 1)
            near = f" Nearest: {close[0]}." if close else ""
            text = f"must be one of reward.terms or {WEIGHTED_SUM}: {', '.join(terms)}.{near}"
            yield Problem((f"loop.{key}",), text)
