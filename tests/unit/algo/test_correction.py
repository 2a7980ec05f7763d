"""The importance correction: golden weights, which ratio uses which logprobs, numbers that are not finite, and metrics
that do not depend on the partition."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from meta_device import META, DeviceCalls
from tiny_samples import random_groups, trained_fields

from meshrl.algo.correction import correct, correction_summary
from meshrl.algo.losses import LossInputs, make_policy_loss
from meshrl.config.algo import AlgoConfig, CorrectionConfig, KlConfig, LossConfig, RejectionConfig, UserLossConfig
from meshrl.core.batch import Batch, Outputs
from meshrl.monitor.metrics import divide, merge
from meshrl.train.packing import pack

RATIOS = [1.0, 4.0, 0.5, 0.5, 0.25, 1.0]  # rows of 2, 3 and 1 tokens: their products are 4, 1/16 and 1
LENGTHS = [2, 3, 1]


def inputs_of(ratios: list[float], lengths: list[int], dtype: torch.dtype = torch.float32) -> LossInputs:
    old = torch.full([len(ratios)], -1.0, dtype=dtype)
    logs = torch.tensor([math.log(r) if r == r and r > 0 else r for r in ratios], dtype=dtype)
    return LossInputs(
        logprobs=(old + 0.25).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old - logs,
        advantages=torch.ones_like(old),
        ref_logprobs=None,
        entropy=None,
        row_lengths=lengths,
    )


def weights(ratios: list[float] = RATIOS, lengths: list[int] = LENGTHS, **cfg) -> list[float] | None:
    found, _ = correct(CorrectionConfig(**cfg), inputs_of(ratios, lengths))
    assert found is None or not found.requires_grad
    return None if found is None else pytest.approx(found.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"kind": "off"}, None),
        ({"kind": "auto"}, None),
        ({"kind": "truncate"}, [1, 2, 0.5, 0.5, 0.25, 1]),
        ({"kind": "truncate", "high": 8.0}, [1, 4, 0.5, 0.5, 0.25, 1]),
        ({"kind": "truncate", "low": 0.4}, [1, 2, 0.5, 0.5, 0.4, 1]),
        ({"kind": "mask"}, [1, 0, 0.5, 0.5, 0.25, 1]),
        ({"kind": "mask", "low": 0.4, "high": 8.0}, [1, 4, 0.5, 0.5, 0, 1]),
        ({"kind": "truncate", "level": "sequence"}, [2, 2, 1 / 16, 1 / 16, 1 / 16, 1]),
        ({"kind": "truncate", "level": "sequence", "low": 0.5, "high": 8.0}, [4, 4, 0.5, 0.5, 0.5, 1]),
        ({"kind": "mask", "level": "sequence"}, [0, 0, 1 / 16, 1 / 16, 1 / 16, 1]),
        ({"kind": "mask", "level": "sequence", "low": 0.5, "high": 8.0}, [4, 4, 0, 0, 0, 1]),
    ],
)
def test_golden_weights(cfg, expected):
    assert weights(**cfg) == expected


LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("rejection", "expected"),
    [  # in nats, by token: k1 = 0, -2, 1, 1, 2, 0 times log 2; k2 = 0, 0.961, 0.240, 0.240, 0.961, 0
        # k3 = w - 1 - log w = 0, 1.614, 0.193, 0.193, 0.636, 0
        ({"measure": "k1", "high": 1.5 * LOG2}, [1, 1, 1, 1, 0, 1]),
        ({"measure": "k1", "low": -1.5 * LOG2}, [1, 0, 1, 1, 1, 1]),
        ({"measure": "k1", "low": -LOG2 / 2, "high": LOG2 / 2}, [1, 0, 0, 0, 0, 1]),
        ({"measure": "k2", "high": 0.5}, [1, 0, 1, 1, 0, 1]),
        ({"measure": "k3", "high": 1.0}, [1, 0, 1, 1, 1, 1]),
        # means of the rows: k1 = -1, 4/3, 0 times log 2; k2 = 0.480, 0.480, 0; k3 = 0.807, 0.341, 0
        ({"measure": "k1", "level": "seq_mean", "high": LOG2}, [1, 1, 0, 0, 0, 1]),
        ({"measure": "k1", "level": "seq_mean", "low": -LOG2 / 2}, [0, 0, 1, 1, 1, 1]),
        ({"measure": "k2", "level": "seq_mean", "high": 0.4}, [0, 0, 0, 0, 0, 1]),
        ({"measure": "k3", "level": "seq_mean", "high": 0.5}, [0, 0, 1, 1, 1, 1]),
        # maxima of the rows: k1 = 0, 2, 0 times log 2; k2 = 0.961, 0.961, 0; k3 = 1.614, 0.636, 0
        ({"measure": "k1", "level": "seq_max", "high": 1.5 * LOG2}, [1, 1, 0, 0, 0, 1]),
        ({"measure": "k2", "level": "seq_max", "high": 0.5}, [0, 0, 0, 0, 0, 1]),
        ({"measure": "k3", "level": "seq_max", "high": 1.0}, [0, 0, 1, 1, 1, 1]),
    ],
)
def test_golden_rejections_with_any_kind(rejection, expected):
    rejected = RejectionConfig(**rejection)
    assert weights(kind="off", rejection=rejected) == expected
    for kind, of_kind in (("truncate", [1, 2, 0.5, 0.5, 0.25, 1]), ("mask", [1, 0, 0.5, 0.5, 0.25, 1])):
        assert weights(kind=kind, rejection=rejected) == [w * e for w, e in zip(of_kind, expected)]


def test_extreme_ratios_stay_finite():
    """A sum of 4,000 log-ratios would overflow or vanish in an exponent."""
    inputs = inputs_of([2.0] * 4000 + [0.5] * 4000, [4000, 4000])
    found, metrics = correct(CorrectionConfig(kind="mask", level="sequence", high=1e9), inputs)
    assert (
        found.isfinite().all() and found[0] == pytest.approx(math.exp(20)) and found[-1] == pytest.approx(math.exp(-20))
    )
    assert all(math.isfinite(m.sum) for m in metrics)


def token_batch(rollout: list[float], old: list[float] | None, advantages: list[float]) -> Batch:
    """One row; loss weights 1."""
    n = len(rollout)
    return Batch(
        **trained_fields(torch.ones(n, dtype=torch.bool), torch.ones(n), [0, n]),
        tokens=torch.zeros(n, dtype=torch.long),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        position_ids=torch.arange(n),
        previous=(torch.arange(n) - 1).clamp(min=0),
        rows=[0],
        parents=[-1],
        offsets=[0],
        mask=torch.ones(n, dtype=torch.bool),
        loss_weight=torch.ones(n),
        temperature=torch.ones(n),
        rollout_logprobs=torch.tensor(rollout),
        old_logprobs=None if old is None else torch.tensor(old),
        advantages=torch.tensor(advantages),
    )


def run(cfg: AlgoConfig, outputs: Outputs, batch: Batch):
    """Value, gradient by logprobs, and metrics by name."""
    logprobs = outputs.logprobs.clone().requires_grad_()
    value, metrics = make_policy_loss(cfg)(dataclasses.replace(outputs, logprobs=logprobs), batch)
    value.backward()
    return value.detach(), logprobs.grad, {m.name: m for m in metrics}


TRUNCATE = CorrectionConfig(kind="truncate")


def test_with_one_update_the_correction_is_that_of_the_update_itself():
    """old = new: the clipped ratio is 1, the weight is new / rollout without a gradient, cut at 2."""
    new = torch.tensor([-1.0, -1.0, -1.0])
    batch = token_batch([-1.0 - math.log(w) for w in (1.5, 5.0, 0.25)], None, [1.0, 1.0, -2.0])
    value, grad, metrics = run(AlgoConfig(correction=TRUNCATE), Outputs(logprobs=new), batch)
    assert value.item() == pytest.approx(-1.5 - 2.0 + 2 * 0.25, rel=1e-6)
    assert grad.tolist() == pytest.approx([-1.5, -2.0, 0.5], rel=1e-6)
    assert metrics["loss/ratio_mean"].sum == 3.0, "the ratio of the loss is new / old"
    assert metrics["loss/clip_fraction_high"].sum == 0


@pytest.mark.parametrize(
    ("new", "old", "rollout", "value", "gradient"),
    [  # probability ratios; advantage 1, clip at 1.2: the weight is min(old / rollout, 2)
        (1.1, 1.0, 1.0, -1.1, -1.1),
        (1.1, 1.5, 1.0, -1.5 * 1.1 / 1.5, -1.1),  # new / old is below 1, though new / rollout is 1.1
        (3.0, 1.5, 1.0, -1.5 * 1.2, 0.0),  # new / old = 2 is clipped
        (3.0, 3.0, 1.0, -2.0, -2.0),  # new / rollout = 3 would be clipped; new / old = 1 is not, and the weight is cut
        (1.0, 0.5, 1.0, -0.5 * 1.2, 0.0),  # new / rollout = 1 would not be clipped; new / old = 2 is
    ],
)
def test_with_several_updates_the_loss_clips_new_to_old_and_the_correction_is_old_to_rollout(
    new, old, rollout, value, gradient
):
    """Decoupled PPO: three policies. Clipping new / rollout instead, or weighting by it, would also train, but stop the
    update at other tokens."""
    batch = token_batch([math.log(rollout) - 4], [math.log(old) - 4], [1.0])
    got, grad, _ = run(AlgoConfig(correction=TRUNCATE), Outputs(logprobs=torch.tensor([math.log(new) - 4])), batch)
    assert got.item() == pytest.approx(value, rel=1e-5) and grad.item() == pytest.approx(gradient, rel=1e-5)


def packed(dtype: torch.dtype = torch.float32, scale: float = 0.3) -> tuple[Outputs, Batch]:
    """Groups that share prompts, with ratios around 1; outputs in this dtype."""
    samples = random_groups(3, [5, 9], [1, 6, 4])
    rng = np.random.default_rng(8)
    for s in samples:
        noise = scale * rng.standard_normal(len(s)).astype(np.float32)
        s.rollout_logprobs = np.where(s.mask, s.old_logprobs + noise, np.nan).astype(np.float32)
    batch = pack(samples, list(range(len(samples))))
    generator = torch.Generator().manual_seed(0)
    logprobs = batch.old_logprobs.to(dtype) + 0.1 * torch.randn(batch.num_tokens, dtype=dtype, generator=generator)
    logprobs = torch.where(batch.mask, logprobs, -3.0)
    return Outputs(logprobs=logprobs, entropy=logprobs.neg()), batch


FULL = AlgoConfig(
    loss=LossConfig(clip_high=0.28, dual_clip=3.0),
    kl=KlConfig(coef=0.1),
    entropy_coef=0.01,
    correction=CorrectionConfig(kind="off"),
)
CORRECTIONS = [
    CorrectionConfig(kind="truncate", high=1.2),
    CorrectionConfig(kind="mask", low=0.9, high=1.2),
    CorrectionConfig(kind="truncate", level="sequence", low=0.5, high=1.5),
    CorrectionConfig(kind="mask", level="sequence", high=1.5),
    CorrectionConfig(kind="off", rejection=RejectionConfig(measure="k3", level="seq_max", high=0.1)),
    CorrectionConfig(kind="truncate", rejection=RejectionConfig(measure="k1", level="seq_mean", low=-0.1, high=0.1)),
]


def with_correction(correction: CorrectionConfig, cfg: AlgoConfig = FULL) -> AlgoConfig:
    return cfg.model_copy(update={"correction": correction})


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("one_update", [True, False])
def test_equal_logprobs_give_the_bits_of_a_loss_without_correction(correction: CorrectionConfig, one_update: bool):
    """An on-policy run loses no bit to the correction; and `off` ignores the sampler's logprobs."""
    outputs, batch = packed()
    if one_update:
        batch.old_logprobs = None
    off = run(FULL, outputs, dataclasses.replace(batch, rollout_logprobs=torch.full_like(batch.rollout_logprobs, -9.0)))
    batch.rollout_logprobs = outputs.logprobs if batch.old_logprobs is None else batch.old_logprobs
    got = run(with_correction(correction), outputs, batch)
    assert torch.equal(got[0], off[0]) and torch.equal(got[1], off[1])
    assert {n: m for n, m in got[2].items() if n.startswith("loss/")} == {
        n: m for n, m in off[2].items() if n.startswith("loss/")
    }
    values = divide(merge(got[2].values())) | divide(merge(correction_summary(got[2].values())))
    assert (values["correction/weight_mean"], values["correction/effective_sample_size"]) == (1.0, 1.0)
    zero = ["chi_square", "log_ratio_mean", "log_ratio_min", "log_ratio_max", "clipped_fraction", "rejected_fraction"]
    assert [values[f"correction/{name}"] for name in zero] == [0.0] * 6


@pytest.mark.parametrize("loss", [LossConfig(), UserLossConfig(kind="own_algorithms:gspo")])
def test_only_the_policy_term_is_weighted_and_no_loss_can_ignore_the_weight(loss):
    """The policy term with its loss_weights times the importance weights, plus KL and entropy terms as before."""
    outputs, batch = packed(torch.float64)
    ratio = (batch.old_logprobs.double() - batch.rollout_logprobs.double()).exp().clamp(0.9, 1.2)
    assert len(ratio[batch.mask].unique()) > 5
    terms = FULL.model_copy(update={"loss": loss})
    plain = terms.model_copy(update={"kl": KlConfig(), "entropy_coef": 0.0})
    got = run(with_correction(CorrectionConfig(kind="truncate", low=0.9, high=1.2), terms), outputs, batch)
    of_terms, without = run(terms, outputs, batch), run(plain, outputs, batch)
    scaled = torch.where(batch.mask, batch.loss_weight.double() * ratio, 0.0)
    weighted = run(plain, outputs, dataclasses.replace(batch, loss_weight=scaled))
    assert got[0].item() == pytest.approx((weighted[0] + of_terms[0] - without[0]).item(), rel=1e-12)
    torch.testing.assert_close(got[1], weighted[1] + of_terms[1] - without[1], rtol=1e-12, atol=1e-15)
    assert got[0].item() != of_terms[0].item()
    assert got[2]["loss/kl"] == of_terms[2]["loss/kl"] and got[2]["loss/entropy"] == of_terms[2]["loss/entropy"]
    assert got[2]["loss/policy"].sum == pytest.approx(weighted[0].item(), rel=1e-12)


def test_rejected_tokens_stay_in_the_denominator():
    """Two of three tokens are rejected: the loss is a third of the other token's, not all of it."""
    batch = token_batch([-1.0 - math.log(w) for w in (4.0, 1.0, 8.0)], None, [1.0, 3.0, 1.0])
    batch.loss_weight = torch.full([3], 1 / 3)
    cfg = AlgoConfig(correction=CorrectionConfig(kind="mask"))
    value, grad, metrics = run(cfg, Outputs(logprobs=torch.full([3], -1.0)), batch)
    assert value.item() == -1.0 and grad.tolist() == [0.0, -1.0, 0.0]
    assert divide(metrics)["loss/policy"] == pytest.approx(-1.0)
    assert divide(metrics)["correction/rejected_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["off", "truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_without_a_finite_rollout_logprob_is_not_trained_and_counted(broken: float, kind: str, level: str):
    """NaN would make the loss of the step NaN, which is skipped; -inf, a probability of 0, would look like a large
    ratio and be trained with weight `high`. Under `off` nothing reads it."""
    ratios = list(RATIOS)
    inputs = inputs_of(ratios, LENGTHS)
    inputs.rollout_logprobs[3] = broken
    found, metrics = correct(CorrectionConfig(kind=kind, level=level), inputs)
    clean, _ = correct(CorrectionConfig(kind=kind, level=level), inputs_of(ratios, LENGTHS))
    by_name = {m.name: m for m in metrics}
    assert by_name["correction/tokens_without_ratio"].sum == 1
    assert by_name["correction/weight_mean"].weight == 5
    assert all(math.isfinite(m.sum) for m in by_name.values())
    if kind == "off":
        assert found is None
        return
    lost = [3] if level == "token" else [2, 3, 4]
    assert [found[i].item() for i in lost] == [0.0] * len(lost)
    others = [i for i in range(6) if i not in lost]
    assert found[others].tolist() == clean[others].tolist()
    assert by_name["correction/rejected_fraction"].sum == (found == 0).sum()


@pytest.mark.parametrize("level", ["token", "seq_mean", "seq_max"])
def test_a_row_without_a_finite_measure_is_rejected(level: str):
    inputs = inputs_of([1.0] * 6, LENGTHS)
    inputs.rollout_logprobs[3] = math.nan
    cfg = CorrectionConfig(kind="off", rejection=RejectionConfig(measure="k2", level=level, high=5.0))
    found, _ = correct(cfg, inputs)
    assert found.tolist() == ([1, 1, 1, 0, 1, 1] if level == "token" else [1, 1, 0, 0, 0, 1])


def test_a_broken_rollout_logprob_does_not_reach_the_gradient_and_a_broken_trainer_does():
    outputs, batch = packed()
    at = int(batch.mask.nonzero()[2, 0])
    batch.rollout_logprobs[at] = math.nan
    value, grad, _ = run(with_correction(TRUNCATE), outputs, batch)
    assert value.isfinite() and grad.isfinite().all()
    outputs.logprobs[at] = math.nan
    value, grad, _ = run(with_correction(TRUNCATE), outputs, batch)
    assert value.isnan(), "weight 0 must not hide that the trainer itself is broken: the step is skipped with a note"


def test_metrics_golden():
    _, metrics = correct(CorrectionConfig(kind="truncate", low=0.3), inputs_of(RATIOS, LENGTHS, torch.float64))
    read = [*metrics]
    values = divide(merge([*read, *correction_summary(read)]))
    total, squares = sum(RATIOS), sum(r * r for r in RATIOS)
    assert values == pytest.approx(
        {
            "correction/weight_mean": total / 6,
            "correction/chi_square": squares / 6 - 1,
            "correction/effective_sample_size": total**2 / (6 * squares),
            "correction/log_ratio_mean": -LOG2 * 2 / 6,
            "correction/log_ratio_min": -2 * LOG2,
            "correction/log_ratio_max": 2 * LOG2,
            "correction/clipped_fraction": 2 / 6,
            "correction/rejected_fraction": 0,
            "correction/tokens_without_ratio": 0,
        }
    )


def test_metrics_only_measure_when_the_correction_is_off():
    _, off = correct(CorrectionConfig(kind="off"), inputs_of(RATIOS, LENGTHS))
    _, truncated = correct(CorrectionConfig(kind="truncate"), inputs_of(RATIOS, LENGTHS))
    assert [*off] == [*truncated]


def test_auto_corrects_logprobs_of_an_accelerator():
    """There the embedded sampler's exactness was not shown; meta tensors stand for those of the accelerator."""
    inputs = inputs_of(RATIOS, LENGTHS)
    fields = ("logprobs", "old_logprobs", "rollout_logprobs")
    elsewhere = dataclasses.replace(inputs, **{name: getattr(inputs, name).to(META) for name in fields})
    with DeviceCalls():
        weight, _ = correct(CorrectionConfig(), elsewhere)
    assert weight is not None and weight.device == META
    assert correct(CorrectionConfig(), inputs)[0] is None


def test_without_a_token_there_is_no_effective_sample_size():
    assert correction_summary([]) == []
    _, metrics = correct(TRUNCATE, inputs_of([math.nan, math.nan], [2]))
    read = [*metrics]
    assert correction_summary(read) == [] and "correction/log_ratio_max" not in {m.name for m in read}


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_weights_and_metrics_do_not_depend_on_the_partition(correction: CorrectionConfig):
    """Rows one by one, or all in a pack. A mean or a product over a micro-batch would pass every golden value
    of a single row. The effective sample size is no sum, so it is computed from the sums of all parts."""
    samples = random_groups(5, [4, 7], [3, 9, 1])
    rng = np.random.default_rng(1)
    for s in samples:
        s.rollout_logprobs = (s.old_logprobs + 0.3 * rng.standard_normal(len(s))).astype(np.float32)
    loss = make_policy_loss(with_correction(correction, AlgoConfig()))

    def part(rows: list[int]):
        batch = pack([samples[i] for i in rows], rows)
        logprobs = torch.where(batch.mask, batch.old_logprobs.double() + 0.05, 0.0)
        value, metrics = loss(Outputs(logprobs=logprobs), batch)
        return value, [*metrics]

    together, metrics = part([0, 1, 2, 3, 4, 5])
    expected = divide(merge([*metrics, *correction_summary(metrics)]))
    for cuts in ([0, 1, 2, 3, 4, 5, 6], [0, 2, 6]):
        parts = [part(list(range(a, b))) for a, b in itertools.pairwise(cuts)]
        assert sum(value for value, _ in parts).item() == pytest.approx(together.item(), rel=1e-12)
        joined = [m for _, found in parts for m in found]
        assert divide(merge([*joined, *correction_summary(joined)])) == pytest.approx(expected, rel=1e-12)
