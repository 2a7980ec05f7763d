"""The records that a prompt becomes one after the other: Prompt, Turn, Trajectory, Sample (and Batch in core/batch.py).

This file imports numpy and the standard library only, so that sandbox workers, viewers and agents start in
milliseconds. Letters: T tokens of a row, C context, R sampled, L MoE layers, K experts a token.

Alignment, everywhere: index t belongs to token t itself, `logprobs[t] = log p(token_t | tokens_<t)`; the shift by one
is done once, in `Batch.previous` (train/packing). Index 0 of a row is never trained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from meshrl.core.errors import DataError, Failure, Graded

SCHEMA = 1  # written into every file that contains records

StopReason = Literal["stop", "length", "context", "abort"]
Purpose = Literal["train", "eval"]
Status = Literal["done", "truncated", "failed"]
Reduce = Literal["mean", "sum", "max", "min", "hist"]


@dataclass(kw_only=True, slots=True)
class Media:
    """One image (or other medium) of a prompt, processed once; sampler and trainer use the same tensors.

    outputs: the processor's arrays by model keyword, e.g. pixel_values [patches, dim], image_grid_thw [1, 3].
    num_tokens: its placeholder tokens in the text; equals the number of features that the vision tower returns.
    text: what a rendered prompt has for it, with its placeholders. digest: of its pixels and the processor's settings.
    thumbnail: a small JPEG file for logs and pages, b"" = none.
    """

    kind: str
    digest: str
    source: str
    outputs: Mapping[str, np.ndarray]
    num_tokens: int
    text: str = ""
    thumbnail: bytes = b""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One row of data as the task of an agent. Filled by data; `ids` by data or by the agent, which render it once.

    id is the same in all epochs; ordinal is the index in this run's data order (for resume, seeds, staleness limits).

    Example: Prompt(id="train-17", ordinal=4031, messages=[{"role": "user", "content": "2+2="}], answer="4")
    """

    id: str
    ordinal: int
    messages: list[dict[str, Any]] | None = None
    ids: np.ndarray | None = None  # int32[C]
    media: dict[str, Media] = field(default_factory=dict)  # in their order; a part {type: image, image: id} has the id
    media_spans: list[tuple[str, int, int]] = field(default_factory=list)  # (media id, start, length) in ids
    answer: Any = None
    env: str = "default"  # the task family or data source, for reward functions
    meta: dict[str, Any] = field(default_factory=dict)  # plain JSON only


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are sampled. temperature 0 is greedy; its logprobs are those of temperature 1.

    top_p, top_k, min_p and repetition_penalty change the sampler's distribution, so training refuses them;
    evaluation may use them. stop_token_ids end a turn; the stop token is part of the output and is trained. The
    same holds for the token that completes one of the texts in stop, even if the text ends inside this token. Both have
    the stop_reason "stop".
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(kw_only=True, slots=True)
class Times:
    """The stages of a turn's time in its engine, in seconds, and the number of context tokens that came from a cache.
    total_s: from the agent's request to its answer. tool_s: of the tools, the environment or the client, after it."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    total_s: float = 0.0
    tool_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Request:
    """A request of an agent to a rollout engine.

    context_ids: the full context, int32[C]. prefix_output: output tokens of an aborted turn, after which the engine
    continues; the returned Turn has only the tokens after them. max_new_tokens counts the complete output with the
    prefix, so a continuation repeats the same number. seed: see `turn_seed`; the sampler draws by (seed, output
    position). min_version: the engine refuses or waits below this weight version. session: requests of one session go
    to one engine. want: extras to return, from {"entropy", "topk:N"}. is_urgent: it does not wait for other requests,
    as far as the engine has memory for it.
    """

    id: str
    context_ids: np.ndarray
    prefix_output: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    media: dict[str, Media] = field(default_factory=dict)
    media_spans: list[tuple[str, int, int]] = field(default_factory=list)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    max_new_tokens: int = 256
    min_version: int = 0
    session: str = ""
    adapter: str | None = None
    want: tuple[str, ...] = ()
    is_urgent: bool = False


@dataclass(kw_only=True, slots=True)
class Turn:
    """One call of the sampler. Turns of a trajectory form a tree: `parent` is the index of the turn that this context
    continues, -1 = none. context_ids has only the tokens after the parent's end.

    Filled by the engine: output_ids, logprobs, versions, stop_reason, routed_experts, extras, engine_id, times.
    Filled by the agent: parent, context_ids (without the parent's tokens), media_spans, messages, source (the HTTP
    request that made the turn, for people), and reward, if the environment of the agent gives one; it is added to the
    trajectory's reward.

    Example, context [1, 5, 6], sampled [7, 2]: Turn(parent=-1, context_ids=[1, 5, 6], output_ids=[7, 2],
    logprobs=[-0.1, -0.3], versions=[0, 0], stop_reason="stop").
    """

    parent: int = -1
    context_ids: np.ndarray  # int32[C], never trained
    media_spans: list[tuple[str, int, int]] = field(default_factory=list)  # (media id, start, length) in context_ids
    output_ids: np.ndarray  # int32[R]
    logprobs: np.ndarray  # float32[R], as sampled: temperature applied
    versions: np.ndarray  # int32[R], weight version that sampled each token
    stop_reason: StopReason
    routed_experts: np.ndarray | None = None  # int16[C+R, L, K]; -1 = not recorded, the trainer's router chooses there
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # each [R, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    engine_id: str = ""
    times: Times = field(default_factory=Times)
    messages: list[dict[str, Any]] = field(default_factory=list)
    source: str = ""
    reward: float | None = None


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """All turns of one attempt at one prompt. group_id: the same for all attempts at one draw of a prompt (prompt id
    and ordinal); group statistics are taken by it.

    status `failed` has a Failure and never a reward of 0. Filled by the scorer: rewards, by term; reward, the weighted
    sum of the terms that apply, plus the rewards of all turns. reward None = masked out of training, and counted.
    has_abstained: it is None although no grading with a weight failed, because no term with a weight applies.
    metrics: of the agent, such as further scores of its environment; they are no part of the reward.
    """

    prompt: Prompt
    group_id: str
    index: int  # within the group
    purpose: Purpose = "train"
    turns: list[Turn] = field(default_factory=list)
    started: list[int] = field(default_factory=list)  # the content seed of each request, also of those still running
    status: Status = "done"
    failure: Failure | None = None
    rewards: dict[str, Graded] = field(default_factory=dict)
    reward: float | None = None
    has_abstained: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Three lines: what it is, the ends of its prompt and of its answer."""
        tokens = sum(len(turn.output_ids) for turn in self.turns)
        result = f"reward {self.reward}" if self.failure is None else f"failed: {self.failure.kind}"
        asked = next((m.get("content") for m in reversed(self.prompt.messages or []) if m.get("role") == "user"), None)
        answer = [message.get("content") for turn in self.turns for message in turn.messages[-1:]]
        head = f"Trajectory({self.id!r}: {result}, turns: {len(self.turns)}, tokens: {tokens}"
        return f"{head}\n  prompt {str(asked)[-100:]!r}\n  answer {' '.join(map(str, answer))[-100:]!r})"

    @property
    def id(self) -> str:
        return f"{self.group_id}/{self.index}"

    @property
    def text(self) -> str:
        """The sampled text of all turns, one after the other, without the special tokens that end a turn.

        Raises: DataError when the agent left no decoded message in a turn.
        """
        texts = []
        for number, turn in enumerate(self.turns):
            message = turn.messages[-1] if turn.messages else {}
            content = message.get("content")
            if isinstance(content, list):  # parts of a multimodal message
                content = "".join(str(part.get("text", "")) for part in content)
            if message.get("role") != "assistant" or not isinstance(content, str):
                raise DataError(
                    f"trajectory {self.id!r}, turn {number}: its text is unknown, because its agent left no message of "
                    "the assistant in turn.messages. Decode turn.output_ids by the tokenizer of the run's model"
                )
            texts.append(content)
        return "\n".join(texts)


@dataclass(kw_only=True, slots=True)
class Sample:
    """One root-to-leaf row of a trajectory's tree, all arrays [T].

    Filled by flatten: tokens .. versions, truncated, media; by annotate: old_logprobs, ref_logprobs (None when the
    algorithm does not need them); by algo: rewards (KL subtracted), advantages, loss_weight.

    mask: sampled and trained in THIS row; a token shared by two rows is trained in exactly one. prefix_len: leading
    tokens shared by all rows of the group. rollout_logprobs is NaN and versions -1 where not sampled. truncated: the
    trajectory was cut off; algo.truncated decides whether it is trained. engine_id: of the sampler; commas separate
    several.
    loss_weight is already divided by the global denominator of the optimizer step (fp64, on the controller, dummies
    0), so loss = sum(loss_weight * l) over all ranks; no other denominator exists.

    Example, context [1, 5, 6] and output [7, 2]: tokens [1,5,6,7,2], mask [0,0,0,1,1], turn [-1,-1,-1,0,0].
    """

    trajectory_id: str
    group_id: str
    row: int
    prefix_len: int
    tokens: np.ndarray  # int32
    mask: np.ndarray  # bool
    turn: np.ndarray  # int16; -1 = context
    rollout_logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32
    rewards: np.ndarray  # float32
    temperature: float = 1.0  # the sampler's; the trainer scores with the same
    reward: float = 0.0  # the trajectory's, for group statistics
    truncated: bool = False
    engine_id: str = ""
    env: str = ""  # of the prompt
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    loss_weight: np.ndarray | None = None
    media_spans: list[tuple[str, int, int]] = field(default_factory=list)  # absolute offsets
    media: dict[str, Media] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None  # int16[T, L, K]
    token_extras: dict[str, np.ndarray] = field(default_factory=dict)  # each [T, ...]; 0 where a turn has none

    def __len__(self) -> int:
        return len(self.tokens)


def unsampled_row(name: str, tokens: np.ndarray, mask: np.ndarray) -> Sample:
    """A row that no sampler made: rollout_logprobs are NaN, versions -1."""
    return Sample(
        trajectory_id=name,
        group_id=name,
        row=0,
        prefix_len=0,
        tokens=tokens,
        mask=mask,
        turn=np.where(mask, 0, -1).astype(np.int16),
        rollout_logprobs=np.full(len(tokens), np.nan, np.float32),
        versions=np.full(len(tokens), -1, np.int32),
        rewards=np.zeros(len(tokens), np.float32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One measured quantity before division. Merged only by adding sums and weights (max and min by max and min);
    only `monitor` divides. `hist` has (values, counts) in `sum` and `weight` as tuples.

    Example: Metric(name="loss/clip_fraction", sum=12.0, weight=4096.0, reduce="mean", unit="fraction").
    """

    name: str
    sum: float
    weight: float = 1.0
    reduce: Reduce = "mean"
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSpec:
    """What an engine of the train ranks is for. Commands and files name it by `name`.

    trains: it has gradients, and a file of its own in a checkpoint. head: what it computes for each token: logprobs, of
    the vocabulary's distribution. optimizer: of train.optimizer; None if the engine does not train.
    """

    name: str
    trains: bool
    head: Literal["logprobs"] = "logprobs"
    optimizer: Literal["adamw"] | None


POLICY = RoleSpec(name="policy", trains=True, optimizer="adamw")
"""The role whose weights samplers get."""

REFERENCE = RoleSpec(name="reference", trains=False, optimizer=None)
"""The policy before training, for the KL term. With LoRA it is the policy without its adapters."""


Generate = Callable[[Request], Awaitable[Turn]]
"""The function that an agent gets for sampling: `async (Request) -> Turn`. The agent does not know the engine."""


def freeze(record: Any) -> Any:
    """Make every array of a filled record read-only, and return it."""
    for name in record.__slots__:
        value = getattr(record, name)
        for array in value.values() if isinstance(value, dict) else (value,):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
    return record


_MASK64 = (1 << 64) - 1
Bits = TypeVar("Bits", int, np.ndarray)


def mix64(x: Bits) -> Bits:
    """splitmix64's finalizer: a bijection of 64-bit integers with full avalanche; of each element of a uint64 array.
    Source: Steele et al. 2014."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def turn_seed(run_seed: int, ordinal: int, index: int, turn: int) -> int:
    """The seed of one turn: independent of step, placement, batch and continuation. 63 bits, never negative.

    `ordinal` already differs between epochs, so no step enters; a step in the seed would break async = colocated.
    """
    seed = run_seed & _MASK64
    for part in (ordinal, index, turn):
        seed = mix64(seed ^ mix64(part & _MASK64))
    return seed >> 1
