"""Each family of tests/vision_families.py, with images: what meshrl computes, trains, samples and writes is what
Transformers' own eager forward does, in fp32, on tiny models all of whose values matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from vision_families import (
    FAMILIES,
    SAMPLE,
    config_of,
    media_ids,
    reference_inputs,
    reference_logprobs,
    row,
    tiny_vision_lm,
)

from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.batch import Batch, Outputs
from meshrl.core.errors import ConfigError
from meshrl.core.types import POLICY, Request, Sample, SamplingParams, Turn, unsampled_row
from meshrl.model.facts import model_facts
from meshrl.model.folder import stored_tensors
from meshrl.model.lora import is_adapter, named_weights, randomize_adapters, weight_name
from meshrl.model.parts import HEAD, TEXT, part_of
from meshrl.parallel.fsdp import full_tensor
from meshrl.parallel.mesh import build_mesh
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.tools.model_check.checks import MIN_MARGIN, Scores, gradient_distance, logprob_distance
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

TOLERANCE = 1e-5  # nats of a logprob; of a gradient, relative to its norm
NEW_TOKENS = 12
of_each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow)
        for f, entry in FAMILIES.items()
        if not entry.refused
    ],
)


def rows_of(family: str) -> list[Sample]:
    """A text; a group of answers to one prompt with an image; the same tokens with another image; two images of two
    sizes; images next to each other, and first in a row; one image twice; an image that is last in a prompt;
    an image after sampled tokens."""
    a, b = FAMILIES[family].sizes
    prompts: list[tuple[str, list[Any], Sequence[int]]] = [
        ("text", [9], (6,)),
        ("group", [3, (a, 1), 4], (5, 1, 12)),
        ("other image", [3, (a, 2), 4], (5,)),
        ("two sizes", [2, (a, 3), 3, (b, 4), 2], (6,)),
        ("adjacent", [(b, 5), (a, 6), 1], (5,)),
        ("twice", [4, (a, 1), 2, (a, 1), 2], (4,)),
        ("last", [4, (b, 7)], (3,)),
        ("turns", [3, 2, (a, 8), 2], (5,)),
    ]
    draw, rows = np.random.default_rng(0), []
    for group, prompt, answers in prompts:
        for answer in answers:
            made = row(family, f"{group} {answer}", prompt, answer)
            made.group_id = group
            if group == "turns":
                made.prefix_len, made.mask[3:5] = 3, True
            made.advantages = np.where(made.mask, draw.standard_normal(len(made)), 0).astype(np.float32)
            rows.append(made)
    return rows


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    lm, report = loaded
    assert not any(names for key, names in report.items() if key != "error_msgs"), report
    return lm.eval()


def transformers_scores(family: str, lm: Any, rows: Sequence[Sample]) -> Scores:
    """Of each row alone."""
    lm.zero_grad()
    logprobs = {}
    for i, each in enumerate(rows):
        where = torch.from_numpy(each.mask.nonzero()[0])
        tokens = torch.from_numpy(each.tokens.astype(np.int64))[where]
        logprobs[i] = reference_logprobs(family, lm, each)[where - 1, tokens]
        (logprobs[i] * torch.from_numpy(each.advantages)[where]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    return Scores({i: logp.detach() for i, logp in logprobs.items()}, gradients)


def built_engine(folder: Path, world: int, lora: LoraConfig | None = None) -> TrainEngine:
    cfg = ModelConfig(path=str(folder), dtype="float32", lora=lora or LoraConfig())
    return TrainEngine.build(
        cfg, TrainConfig(activation_checkpointing=world > 1), build_mesh((1, world, 1, 1), "cpu"), POLICY
    )


def engine_scores(
    engine: TrainEngine, rows: Sequence[Sample], packs: Sequence[Sequence[int]], share: bool = False
) -> Scores:
    """Of these packs of rows. Each has an image, also one of text rows: then as a row that nothing reads."""
    inputs = engine.model.inputs
    batches = [
        pack([rows[i] for i in p], p, engine.device, share_prefix=share, inputs=inputs, has_images=len(p) > 1 or share)
        for p in packs
    ]
    engine.model.zero_grad()
    got = engine.forward_backward(batches, weighted_sum).logprobs
    gradients = {
        name: full_tensor(p.grad).clone() for name, p in engine.model.lm.named_parameters() if p.grad is not None
    }
    return Scores({i: torch.from_numpy(logp)[torch.from_numpy(rows[i].mask)] for i, logp in got.items()}, gradients)


def weighted_sum(out: Outputs, batch: Batch) -> tuple[torch.Tensor, list[Any]]:
    assert batch.advantages is not None
    return (out.logprobs * batch.advantages).sum(), []


def differences_on_rank(rank: int, world: int, family: str, folder: Path) -> dict[str, tuple[float, float]]:
    """Of logprobs and of gradients, from Transformers'."""
    rows = rows_of(family)
    want = transformers_scores(family, transformers_model(folder), rows)
    engine, all_rows = built_engine(folder, world), range(len(rows))
    if world == 2:  # a rank has the rows with images, and the other one the text alone
        packs = {"two ranks": ([[0]] if rank else [list(all_rows)[1:]], True)}
    else:
        packs = {
            "alone": ([[i] for i in all_rows], False),
            "packed": ([list(all_rows)], False),
            "shared prompts": ([list(all_rows)], True),
            "text and images": ([[0], [3, 1, 4], [2, *all_rows[5:]]], True),
        }
    found = {}
    for name, (of_ranks, share) in packs.items():
        got = engine_scores(engine, rows, of_ranks, share)
        mine = Scores({i: want.logprobs[i] for i in got.logprobs}, want.gradients)
        found[name] = logprob_distance(got, mine), gradient_distance(got.gradients, want.gradients)
    return found


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    """The files that Transformers writes of the family's tiny model."""
    tiny_vision_lm(family).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def over(found: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {name: values for name, values in found.items() if not max(values) <= TOLERANCE}


@of_each_family
def test_rows_with_images_are_scored_and_trained_as_by_transformers(family: str, folder: Path, pool: RankPool):
    """Each row alone, all in one pack, and after shared prompts."""
    (found,) = pool.run(differences_on_rank, 1, family, folder)
    assert over(found) == {}


@of_each_family
def test_two_ranks_of_which_one_has_text_alone_train_as_transformers(family: str, folder: Path, pool: RankPool):
    found = pool.run(differences_on_rank, 2, family, folder)
    assert [over(of_rank) for of_rank in found] == [{}, {}]


@of_each_family
def test_the_embedded_engine_samples_with_images_as_transformers(family: str, folder: Path):
    """All prompts at once: greedy tokens are those of `generate`; logprobs, also of sampled tokens, are those of the
    forward of the complete row."""
    lm = transformers_model(folder)
    prompts = {each.group_id: with_answer(each, np.zeros(0)) for each in rows_of(family)}
    engine = build_embedded_engine(
        ModelConfig(path=str(folder), dtype="float32"), RolloutConfig(), torch.device("cpu"), "vision", ()
    )
    engine.trust_loaded_weights()
    for name, prompt in prompts.items():
        for kind, temperature in (("greedy", 0.0), ("first", 1.0), ("second", 1.0)):
            request = Request(
                id=f"{kind} {name}",
                context_ids=prompt.tokens,
                media=prompt.media,
                media_spans=prompt.media_spans,
                sampling=SamplingParams(temperature=temperature),
                seed=len(kind),
                max_new_tokens=NEW_TOKENS,
            )
            engine.submit(request)
    turns: dict[str, Turn] = {}
    while engine.has_work:
        turns.update(engine.step())
    found = {key: sampled_difference(family, lm, prompts[key.split(" ", 1)[1]], turn) for key, turn in turns.items()}
    assert {key: value for key, value in found.items() if not value <= TOLERANCE} == {}
    compared = [num_generated(family, lm, prompt, turns[f"greedy {name}"]) for name, prompt in prompts.items()]
    assert len(found) == 3 * len(prompts) and sum(compared) > NEW_TOKENS * len(prompts) / 2


def sampled_difference(family: str, lm: Any, prompt: Sample, turn: Turn) -> float:
    complete = with_answer(prompt, turn.output_ids)
    with torch.no_grad():
        logq = reference_logprobs(family, lm, complete)
    at = torch.arange(prompt.prefix_len, len(complete))
    want = logq[at - 1, torch.from_numpy(complete.tokens.astype(np.int64))[at]]
    return float((torch.from_numpy(turn.logprobs) - want).abs().max())


def with_answer(prompt: Sample, answer: np.ndarray) -> Sample:
    """A row of the same context with these tokens as its last answer."""
    start = len(prompt) - (~prompt.mask[::-1]).argmax() if prompt.mask.any() else len(prompt)
    tokens = np.concatenate([prompt.tokens[:start], answer]).astype(np.int32)
    made = unsampled_row("sampled", tokens, np.arange(len(tokens)) >= start)
    made.media, made.media_spans, made.prefix_len = prompt.media, prompt.media_spans, int(start)
    return made


def num_generated(family: str, lm: Any, prompt: Sample, turn: Turn) -> int:
    """Of how many leading tokens `generate` is certain. The turn has them."""
    out = lm.generate(
        **reference_inputs(family, prompt),
        **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0},
        **{"output_scores": True, "return_dict_in_generate": True, "suppress_tokens": media_ids(lm.config)},
    )
    best = torch.cat(out.scores).float().topk(2).values
    certain = (best[:, 0] - best[:, 1] >= MIN_MARGIN).long().cumprod(0).bool()
    same = torch.from_numpy(turn.output_ids.astype(np.int64)) == out.sequences[0, prompt.prefix_len :]
    assert same[certain].all(), (same, certain)
    return int(certain.sum())


def export_on_rank(rank: int, world: int, folder: Path) -> None:
    built_engine(folder, world).export(folder.parent / "exported")


@of_each_family
def test_an_export_has_the_names_and_values_of_the_files(family: str, folder: Path, pool: RankPool):
    pool.run(export_on_rank, 1, folder)
    stored, _ = stored_tensors(folder)
    written, _ = stored_tensors(folder.parent / "exported")
    assert written.keys() == stored.keys()
    ours, theirs = transformers_model(folder.parent / "exported").state_dict(), transformers_model(folder).state_dict()
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


def lora_on_rank(rank: int, world: int, family: str, folder: Path, targets: list[str]) -> dict[str, Any]:
    """Adapters of which parts, those without a gradient although their weight has one in the full model, and
    differences of logprobs: of the adapted from the loaded model, and of the exported from the adapted one."""
    rows = rows_of(family)
    loaded = transformers_scores(family, transformers_model(folder), rows)
    engine = built_engine(folder, world, LoraConfig(enabled=True, rank=4, alpha=2, targets=targets))
    with torch.no_grad():
        randomize_adapters(engine.model.lm)
    got = engine_scores(engine, rows, [list(range(len(rows)))])
    adapters = {name: p.grad for name, p in named_weights(engine.model.lm) if is_adapter(name)}
    used = {name for name, gradient in loaded.gradients.items() if gradient.any()}
    without = [name for name, g in adapters.items() if g is None or not full_tensor(g).any()]
    engine.model.zero_grad()
    engine.export(folder.parent / "merged")
    merged = transformers_scores(family, transformers_model(folder.parent / "merged"), rows)
    return {
        "parts": {part_of(name, engine.model.parts) for name in adapters},
        "without gradient": [name for name in without if weight_name(name) in used],
        "change": logprob_distance(got, loaded),
        "merged": logprob_distance(merged, got),
    }


@of_each_family
@pytest.mark.parametrize("targets", [["all-linear"], ["all-linear", "vision"], ["vision"]], ids="+".join)
def test_lora_adapts_the_tower_where_the_targets_have_vision(
    family: str, folder: Path, pool: RankPool, targets: list[str]
):
    (found,) = pool.run(lora_on_rank, 1, family, folder, targets)
    assert (TEXT in found["parts"]) == ("all-linear" in targets) and HEAD not in found["parts"]
    assert bool(found["parts"] - {TEXT}) == ("vision" in targets) and found["without gradient"] == []
    assert found["change"] > 0.01 and found["merged"] <= TOLERANCE


@pytest.mark.parametrize("family", [family for family, entry in FAMILIES.items() if entry.refused])
def test_a_family_that_is_not_trained_with_its_tower_is_refused(family: str, folder: Path):
    with pytest.raises(ConfigError, match=FAMILIES[family].refused):
        model_facts(folder)


def test_a_models_weights_matter_and_so_do_its_images():
    """Else the comparisons above would prove nothing."""
    assert config_of("gemma3").text_config.sliding_window < 4  # shorter than an image
    for family in SAMPLE:
        size = FAMILIES[family].sizes[0]
        lm = tiny_vision_lm(family)
        one, other = (row(family, "", [3, (size, seed), 4], 5) for seed in (1, 2))
        assert (one.tokens == other.tokens).all() and one.media.keys() != other.media.keys()
        with torch.no_grad():
            change = (reference_logprobs(family, lm, one) - reference_logprobs(family, lm, other))[one.prefix_len :]
        assert change[change.isfinite()].abs().max() > 0.1
