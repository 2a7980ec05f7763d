"""The contract of a model: meshrl computes, samples and writes what Transformers' own eager forward does, in fp32.

A check returns the largest difference from Transformers, or raises the reason why the model does not have the property.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig

from meshrl.config.model import EXPERTS, LoraConfig, ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.batch import Batch, Outputs
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.types import POLICY, Request, Sample, SamplingParams, Turn
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import MASKED, CausalModel
from meshrl.model.facts import auto_class
from meshrl.model.folder import stored_tensors
from meshrl.model.hub_names import HubNames
from meshrl.model.inputs import ModelInputs, Piece
from meshrl.model.lora import is_adapter, joint_experts, named_weights, randomize_adapters
from meshrl.model.recipe import Recipe, build_model
from meshrl.model.save import save_pretrained
from meshrl.parallel.fsdp import full_tensor
from meshrl.parallel.mesh import build_mesh
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import bare_row, pack

TOLERANCE = 1e-5  # nats of a logprob; of a gradient, relative to its norm
MAX_TOLERANCE = 1e-4  # however much a change of the last bit changes a model
SMALL_GRADIENT = 1e-2  # of the largest norm; a smaller gradient (a key's bias has none) is compared with this
MIN_MARGIN = 1e-4  # between the best two logits; rounding decides a greedy token of a smaller one
NEW_TOKENS = 24
CPU = torch.device("cpu")
LORA = LoraConfig(enabled=True, rank=4, alpha=2)
Gradients = dict[str, torch.Tensor]
OnTwoRanks = Callable[..., list[float]]  # (function, *args) -> the results of function(rank, world, *args)


class Scores(NamedTuple):
    """logprobs: of the scored tokens, by row. gradients: of their sum, weighted by advantages, by parameter."""

    logprobs: dict[int, torch.Tensor]
    gradients: Gradients


class CheckedModel:
    """A model folder that holds a small model, and what Transformers computes of it, each row alone."""

    def __init__(self, path: Path, on_two_ranks: OnTwoRanks):
        """Raises: ConfigError when meshrl refuses the model."""
        self.path, self.on_two_ranks = path, on_two_ranks
        self.model = build_model(path, Recipe(trains=True))
        self.rows = rows_for(self.model.vocab_size, self.model.inputs)

    @cached_property
    def theirs(self) -> Any:
        return transformers_model(self.path)

    @cached_property
    def reference(self) -> Scores:
        return transformers_scores(self.theirs, self.rows)

    @cached_property
    def tolerance(self) -> float:
        """TOLERANCE; or, where Transformers' own results change by more than that when each weight is changed by at
        most its last bit, twice that change: large logits and gradients of terms that cancel are rounded as much."""
        lm, draw = transformers_model(self.path), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in lm.parameters():
                p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=draw))
        got, want = transformers_scores(lm, self.rows), self.reference
        change = max(logprob_distance(got, want), gradient_distance(got.gradients, want.gradients))
        return TOLERANCE if change <= TOLERANCE else min(2 * change, MAX_TOLERANCE)

    @cached_property
    def alone(self) -> tuple[float, float]:
        """The differences of rows in packs of their own."""
        return self.differences([[i] for i in range(len(self.rows))])

    def differences(self, packs: Sequence[Sequence[int]], share_prefix: bool = False) -> tuple[float, float]:
        """Of logprobs and of gradients, of these packs of rows from the rows alone in Transformers."""
        rows, inputs = self.rows, self.model.inputs
        got = scores(self.model, [pack([rows[i] for i in p], p, CPU, share_prefix, inputs=inputs) for p in packs])
        return logprob_distance(got, self.reference), gradient_distance(got.gradients, self.reference.gradients)


def rows_for(vocab_size: int, inputs: ModelInputs) -> list[Sample]:
    """Three answers to one prompt, one of a single token, and a row with a prompt of its own. The first prompt of a
    model with a tower has an image."""
    draw, text = np.random.default_rng(0), np.setdiff1d(np.arange(vocab_size), inputs.masked)[3:]
    prompt, image, media = text[draw.integers(0, len(text), 9)], np.zeros(0, np.int32), None
    if inputs.family is not None:
        image, media = inputs.smallest()
    rows = []
    for i, count in enumerate((5, 1, 20, 13)):
        start = prompt[:4] if i == 3 else np.concatenate([prompt[:4], image, prompt[4:]])
        row = bare_row(f"row {i}", [*start, *text[draw.integers(0, len(text), count)]], scored=True)
        if media is not None and i < 3:
            row.media, row.media_spans = {"image": media}, [("image", 4, len(image))]
        row.group_id, row.prefix_len = f"group {len(start)}", len(start)
        row.mask = np.arange(len(row)) >= row.prefix_len
        row.advantages = np.where(row.mask, draw.standard_normal(len(row)), 0).astype(np.float32)
        rows.append(row)
    return rows


def transformers_model(path: Path) -> Any:
    loaded: Any = auto_class(AutoConfig.from_pretrained(path, trust_remote_code=False)).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=False
    )
    lm, report = loaded
    if wrong := {key: names for key, names in report.items() if names and key != "error_msgs"}:
        raise ConfigError(f"Transformers does not load the folder {path} completely: {wrong!s:.300}")
    return lm.eval()


def transformers_scores(lm: Any, rows: Sequence[Sample]) -> Scores:
    """Of Transformers' own forward, called with one row at a time."""
    lm.zero_grad()
    logprobs = {}
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        where = torch.from_numpy(row.mask.nonzero()[0])
        inputs = ModelInputs(lm.config)
        logits = lm(tokens[None], **of_images(inputs, row), use_cache=False).logits[0].float()
        logits[:, inputs.masked] = MASKED
        logq = torch.log_softmax(logits, dim=-1)
        logprobs[i] = logq[where - 1, tokens[where]]
        (logprobs[i] * torch.from_numpy(row.advantages)[where]).sum().backward()
    return Scores({i: logp.detach() for i, logp in logprobs.items()}, _gradients(lm))


def of_images(inputs: ModelInputs, row: Sample) -> dict[str, torch.Tensor]:
    """The arguments of Transformers' forward for the images of a row."""
    arrays = {name: torch.from_numpy(array) for name, array in inputs.kwargs([Piece(row, 0, len(row))]).items()}
    if inputs.family is not None and inputs.family.types:
        arrays[inputs.family.types] = torch.from_numpy(row.tokens == inputs.placeholder).long()[None]
    return arrays


def scores(model: CausalModel, batches: Sequence[Batch]) -> Scores:
    """Of meshrl's forward."""
    model.zero_grad()
    logprobs: dict[int, torch.Tensor] = {}
    for batch in batches:
        context = PackedAttention(batch.cu_seqlens.tolist(), CPU, batch.parents, mutual=batch.mutual)
        at = batch.scored
        got, _ = model(
            *(batch.tokens, batch.position_ids, context, at),
            *(batch.previous[at], batch.temperature[at], None, False, batch.model_kwargs),
        )
        if batch.advantages is not None and got.requires_grad:
            (got * batch.advantages[at]).sum().backward()
        segment = torch.searchsorted(batch.cu_seqlens, at, right=True) - 1
        row_of = torch.tensor(batch.rows)[segment]
        logprobs |= {i: got.detach()[row_of == i] for i in batch.rows if i >= 0}
    return Scores(logprobs, _gradients(model.lm))


def _gradients(lm: torch.nn.Module) -> Gradients:
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


def logprob_distance(got: Scores, want: Scores) -> float:
    return max(float((got.logprobs[i] - want.logprobs[i]).abs().max()) for i in want.logprobs)


def gradient_distance(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> float:
    """The largest of a parameter, relative to its norm; a parameter without a gradient has the gradient 0."""
    norms = {name: float(g.norm()) for name, g in want.items()}
    least = SMALL_GRADIENT * max(norms.values())
    zero = torch.zeros(())
    return max(
        float((got.get(name, zero) - want.get(name, zero)).norm()) / max(norms.get(name, 0.0), least)
        for name in got.keys() | want.keys()
    )


# ---- the checks


def difference_on_rank(rank: int, world: int, path: str) -> float:
    """Of this rank's logprobs and, on rank 0, of the full gradients: the train engine on two FSDP2 ranks, with
    activation checkpointing; each rank has half of the rows."""
    model, cfg = ModelConfig(path=path, dtype="float32"), TrainConfig(activation_checkpointing=True)
    engine = TrainEngine.build(model, cfg, build_mesh((1, world, 1, 1), "cpu"), POLICY)
    rows = rows_for(engine.model.vocab_size, engine.model.inputs)
    mine = range(rank * 3, min(len(rows), 3 + rank))  # the second rank has the row without an image
    batch = engine.pack([rows[i] for i in mine], mine, has_images=engine.model.inputs.family is not None)
    result = engine.forward_backward([batch], _weighted_sum)
    full = {name: full_tensor(p.grad) for name, p in engine.model.lm.named_parameters() if p.grad is not None}
    reference = transformers_scores(transformers_model(Path(path)), rows)
    got = {i: torch.from_numpy(logp)[torch.from_numpy(rows[i].mask)] for i, logp in result.logprobs.items()}
    difference = max(float((logp - reference.logprobs[i]).abs().max()) for i, logp in got.items())
    return max(difference, gradient_distance(full, reference.gradients)) if rank == 0 else difference


def _weighted_sum(out: Outputs, batch: Batch) -> tuple[torch.Tensor, list[Any]]:
    assert batch.advantages is not None
    return (out.logprobs * batch.advantages).sum(), []


def embedded_sampling(checked: CheckedModel) -> float:
    """Greedy tokens are those of `generate`, and so are their logprobs, which are returned."""
    model = ModelConfig(path=str(checked.path), dtype="float32")
    engine = build_embedded_engine(model, RolloutConfig(), CPU, "model-check", ())
    engine.trust_loaded_weights()
    limits: dict[str, Any] = {"sampling": SamplingParams(temperature=0.0), "max_new_tokens": NEW_TOKENS}
    for i, row in enumerate(checked.rows):
        images: dict[str, Any] = {"media": row.media, "media_spans": row.media_spans}
        engine.submit(Request(id=str(i), context_ids=row.tokens[: row.prefix_len + i], **images, **limits))
    turns: dict[str, Turn] = {}
    while engine.has_work:
        turns.update(engine.step())
    largest, compared, inputs = 0.0, 0, checked.model.inputs
    for name, turn in turns.items():
        row = replace(checked.rows[int(name)], tokens=turn.context_ids)
        out = checked.theirs.generate(
            torch.from_numpy(turn.context_ids.astype(np.int64))[None],
            **of_images(inputs, row),
            suppress_tokens=inputs.masked or None,
            **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0},
            **{"output_logits": True, "return_dict_in_generate": True},
        )
        logits = torch.cat(out.logits).float()
        logits[:, inputs.masked] = MASKED
        tokens, best = out.sequences[0, len(turn.context_ids) :], logits.topk(2).values
        certain = (best[:, 0] - best[:, 1] >= MIN_MARGIN).long().cumprod(0).bool()
        wrong = (torch.from_numpy(turn.output_ids.astype(np.int64)) != tokens) & certain
        if wrong.any():
            raise MeshrlError(f"greedy token {int(wrong.nonzero()[0, 0])} after {len(turn.context_ids)} is another one")
        want = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
        largest = max([largest, *(torch.from_numpy(turn.logprobs) - want)[certain].abs().tolist()])
        compared += int(certain.sum())
    if compared < NEW_TOKENS * len(turns) / 2:
        raise MeshrlError(f"the model is certain of {compared} greedy tokens only, too few to compare")
    return largest


def lora(checked: CheckedModel) -> float:
    """Adapters on all linear layers and experts: each one gets a gradient, and the exported model, with merged weights,
    has the logprobs of the model with adapters."""
    on_experts = [EXPERTS] if joint_experts(checked.model.lm) else []
    cfg = LORA.model_copy(update={"targets": [*LORA.targets, *on_experts]})
    with_adapter = build_model(checked.path, Recipe(trains=True, lora=cfg))
    randomize_adapters(with_adapter.lm)
    got = scores(with_adapter, [pack(checked.rows, range(len(checked.rows)), inputs=with_adapter.inputs)])
    if logprob_distance(got, checked.reference) < 100 * TOLERANCE:
        raise MeshrlError("the adapters do not change the logprobs")
    adapters = {name: p.grad for name, p in named_weights(with_adapter.lm) if is_adapter(name)}
    without = [name for name, grad in adapters.items() if grad is None or not grad.any()]
    if without:
        raise MeshrlError(f"{without[0]} gets no gradient ({len(without)} of {len(adapters)} adapters)")
    return _exported_distance(with_adapter, checked.rows, got)


def _exported_distance(model: CausalModel, rows: Sequence[Sample], want: Scores) -> float:
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model.lm, torch.float32, Path(folder))
        return logprob_distance(transformers_scores(transformers_model(Path(folder)), rows), want)


def file_names(checked: CheckedModel) -> float:
    """Weights are sent to servers under the names of the files that Transformers writes."""
    names = HubNames(checked.model.lm)
    if names.computed:
        raise MeshrlError(next(iter(names.computed.values())))
    with tempfile.TemporaryDirectory() as folder:
        checked.theirs.save_pretrained(folder)
        written = {name: tensor.shape for name, tensor in stored_tensors(Path(folder))[0].items()}
    if different := written.items() ^ names.tensors.items():
        raise MeshrlError(f"{sorted(different)[0][0]} is not a tensor of both ({len(different)} differences)")
    return 0.0


CHECKS: dict[str, Callable[[CheckedModel], float]] = {
    "logprobs": lambda checked: checked.alone[0],
    "gradients": lambda checked: checked.alone[1],
    "packed": lambda checked: max(checked.differences([range(len(checked.rows))])),  # all rows in one pack
    "shared prompts": lambda checked: max(checked.differences([range(len(checked.rows))], share_prefix=True)),
    "two FSDP2 ranks": lambda checked: max(checked.on_two_ranks(difference_on_rank, 2, str(checked.path))),
    "embedded sampling": embedded_sampling,
    "export": lambda checked: _exported_distance(checked.model, checked.rows, checked.reference),
    "LoRA": lora,
    "file names": file_names,
}


class Finding(NamedTuple):
    """difference: the largest, NaN if there is a reason why it was not measured. allowed: the tolerance."""

    difference: float
    allowed: float = TOLERANCE
    reason: str = ""

    @property
    def proven(self) -> bool:
        return self.difference <= self.allowed

    def __str__(self) -> str:
        return self.reason or f"largest difference {self.difference:.1e} (allowed: {self.allowed:.1e})"


def findings(path: Path, on_two_ranks: OnTwoRanks) -> Iterator[tuple[str, Finding]]:
    """The result of each of CHECKS for the model of a folder."""
    checked = CheckedModel(path, on_two_ranks)
    for name, check in CHECKS.items():
        try:
            yield name, Finding(check(checked), checked.tolerance)
        except Exception as cause:  # a model's own code may raise anything
            kind = "" if isinstance(cause, MeshrlError) else f"{type(cause).__name__}: "
            yield name, Finding(math.nan, reason=f"{kind}{cause}")
