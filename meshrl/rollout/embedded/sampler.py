"""From logits to tokens: exact logprobs, and random draws that depend on (seed, output position) alone.

A draw is the inverse of the cumulative distribution at u(seed, position). u is a counter-based uniform number, computed
in 64-bit integers on the host: the same bits on every device and in every batch, row and engine.

Letters: N rows, V vocabulary, B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from meshrl.core.device import has_triton
from meshrl.core.types import SamplingParams, mix64
from meshrl.rollout.admission import topk_of
from meshrl.rollout.embedded.decode_graph import StepArrays
from meshrl.rollout.embedded.rows import Rows, filters

_ALMOST_ONE = 1 - 2.0**-53  # a positive fp64 number times this is the next smaller number
BLOCK = 128  # tokens; blocks are summed in fp32, so that the fp64 cumulative sum runs over V / 128 numbers only

History = Callable[[int], np.ndarray]
"""row -> all tokens of its sequence so far; called only for rows with a repetition penalty."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens int64[N] and logprobs float32[N], on the device; extras: row -> {name: its value for this token}."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    extras: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


class RowSampling:
    """Sampling parameters of N rows as tensors; they are sent with the other arrays of a step."""

    def __init__(self, rows: Rows, arrays: StepArrays):
        fixed = rows.fixed(_FixedSampling)
        self.filtered, self.wants, self.all_greedy = fixed.filtered, fixed.wants, fixed.all_greedy
        self.unit_temperature = fixed.unit_temperature
        self.greedy = arrays.add(fixed.is_greedy) if fixed.is_greedy.any() else None
        self.temperature = arrays.add(fixed.temperature)
        self.u = arrays.add(np.zeros(0) if self.all_greedy else uniforms(fixed.seeds, rows.position[rows.slots]))


class _FixedSampling:
    """What is the same in all steps of these rows. A row with filters is not greedy: they may select its tokens."""

    def __init__(self, rows: Rows):
        temperature, special = rows.temperature[rows.slots], np.flatnonzero(rows.is_special[rows.slots]).tolist()
        requests = [(row, rows.sequences[row].request) for row in special]
        self.filtered = [(row, request.sampling) for row, request in requests if filters(request.sampling)]
        self.wants = [(row, request.want) for row, request in requests if request.want]
        self.is_greedy = temperature == 0
        self.is_greedy[[row for row, _ in self.filtered]] = False
        self.all_greedy = bool(self.is_greedy.all())
        self.unit_temperature = bool(((temperature == 0) | (temperature == 1)).all())
        self.temperature = np.where(temperature > 0, temperature, np.float32(1))[:, None]
        self.seeds = rows.seed[rows.slots]


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """u in [0, 1), float64[N], from uint64 seeds and output positions: mix64(seed ^ mix64(position)) / 2^64."""
    bits = mix64(seeds ^ mix64(positions.astype(np.uint64)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits: torch.Tensor, rows: RowSampling, history: History) -> Drawn:
    """Draw one token for each row of logits float[N, V], which are overwritten.

    Logprobs come from softmax(logits / temperature), with 1 in the place of temperature 0 (greedy), before any filter
    or penalty, as the trainer computes them. A token of probability 0 is never drawn.
    """
    z = logits if rows.unit_temperature else logits.div_(rows.temperature())
    top = z.amax(-1, keepdim=True)
    weights, sums = _weights(z, top)
    ends = sums.double().cumsum(-1)
    lse = top + torch.log(ends[:, -1:]).to(z.dtype)
    if rows.all_greedy:
        tokens = z.argmax(-1)
    else:
        for row, params in rows.filtered:
            weights[row] = _filtered(z[row] * rows.temperature()[row], params, history, row)
            ends[row] = block_ends(weights[row][None])[0]
        tokens = inverse_cdf(weights, ends, rows.u())
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy(), z.argmax(-1), tokens)
    logprobs = (z.gather(1, tokens[:, None]) - lse)[:, 0].clamp_(max=0)
    extras = {row: _extras(z[row] - lse[row], want) for row, want in rows.wants}
    return Drawn(tokens, logprobs.float(), extras)


def _weights(z: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(z - top) of z [N, V] and top [N, 1], and its sums of blocks [N, blocks]."""
    if z.shape[1] % BLOCK == 0 and z.dtype == torch.float32 and has_triton(z.device):
        from meshrl.rollout.embedded.kernels import exponentials  # Triton is not installed everywhere

        return exponentials(z, top, BLOCK)
    weights = torch.exp(z - top)
    return weights, _blocks(weights).sum(-1)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N, blocks, B], padded with zeros."""
    missing = -weights.shape[1] % BLOCK
    return (F.pad(weights, (0, missing)) if missing else weights).view(weights.shape[0], -1, BLOCK)


def block_ends(weights: torch.Tensor) -> torch.Tensor:
    """The cumulative sum of weights [N, V] at the end of each block of B: float64[N, blocks]."""
    return _blocks(weights).sum(-1).double().cumsum(-1)


def inverse_cdf(weights: torch.Tensor, ends: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative sum of weights [N, V] exceeds u * total; u float64[N] in [0, 1) -> int64[N].

    It searches the block sums (ends, of `block_ends`) first, then inside one block. Both searches look for the first
    sum ABOVE the target, and targets stay below the last sum, so rounding can't select a token of weight 0. A row of
    NaN gives some valid id, and a NaN logprob that the caller can detect.
    """
    target = _below(u * ends[:, -1], ends[:, -1])
    block = torch.searchsorted(ends, target[:, None], right=True).clamp_(max=ends.shape[1] - 1)
    before = F.pad(ends, (1, 0)).gather(1, block)[:, 0]
    first = torch.arange(0, ends.numel(), ends.shape[1], device=u.device)  # block of each row, all rows end to end
    inside = _blocks(weights).flatten(0, 1).index_select(0, first + block[:, 0]).double().cumsum(-1)
    target = _below((target - before).clamp_(min=0), inside[:, -1])
    place = torch.searchsorted(inside, target[:, None], right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + place)[:, 0].clamp_(max=weights.shape[1] - 1)


def _below(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return torch.minimum(x, bound * _ALMOST_ONE)


def _filtered(logits: torch.Tensor, p: SamplingParams, history: History, row: int) -> torch.Tensor:
    """Probabilities float[V] of one row: repetition penalty, temperature, top_k, top_p, min_p, in that order."""
    if p.repetition_penalty != 1:
        keys = np.unique(history(row)).astype(np.int64)  # those below 0 are features of images
        seen = torch.from_numpy(keys[keys >= 0]).to(logits.device)
        at = logits[seen]
        logits = logits.index_copy(0, seen, torch.where(at > 0, at / p.repetition_penalty, at * p.repetition_penalty))
    z = logits / p.temperature if p.temperature > 0 else logits
    top_k = p.top_k if p.temperature > 0 else 1
    if 0 < top_k < len(z):
        best = torch.zeros_like(z, dtype=torch.bool)
        best[z.topk(top_k).indices] = True
        z = z.masked_fill(~best, -torch.inf)
    probs = torch.softmax(z, -1)
    if p.top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        dropped = ranked.cumsum(-1) - ranked >= p.top_p  # the token that crosses top_p is retained
        probs[order[dropped]] = 0
    if p.min_p > 0:
        probs[probs < p.min_p * probs.max()] = 0
    return probs


def _extras(logprobs: torch.Tensor, want: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The extras in `Request.want`, of the distribution float[V] from which the reported logprob comes."""
    extras: dict[str, np.ndarray] = {}
    for name in want:
        if name == "entropy":
            entropy = torch.special.entr(logprobs.exp()).sum()
            extras["entropy"] = np.array(entropy.item(), np.float32)
        else:
            top = logprobs.topk(min(topk_of(name), len(logprobs)))
            extras["topk_ids"] = top.indices.to(torch.int32).cpu().numpy()
            extras["topk_logprobs"] = top.values.float().cpu().numpy()
    return extras
