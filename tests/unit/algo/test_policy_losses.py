"""Golden values, poison, on-policy exactness and partition of metrics of the loss functions."""

import dataclasses
import itertools
import math
import pickle

import own_algorithms
import pytest
import torch
from tiny_samples import trained_fields, with_trained_fields

from meshrl.algo.losses import LOSSES, LossInputs, gspo, make_policy_loss, sapo, sft_loss
from meshrl.config.algo import LOSS_ARGS, AlgoConfig, KlConfig, LossConfig
from meshrl.core.batch import Batch, Outputs

FULL = AlgoConfig(
    loss=LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0), kl=KlConfig(coef=0.1), entropy_coef=0.01
)


def make_batch(length, **fields):
    """One row; each given per-token field is a list or tensor over its tokens."""
    tensors = {k: torch.as_tensor(v, dtype=torch.bool if k == "mask" else torch.float32) for k, v in fields.items()}
    mask, loss_weight = tensors.pop("mask", torch.ones(length, dtype=torch.bool)), tensors.pop("loss_weight", None)
    loss_weight = torch.ones(length) if loss_weight is None else loss_weight
    return Batch(
        **trained_fields(mask, loss_weight, [0, length]),
        tokens=torch.zeros(length, dtype=torch.long),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        position_ids=torch.arange(length),
        previous=(torch.arange(length) - 1).clamp(min=0),
        rows=[0],
        parents=[-1],
        offsets=[0],
        mask=mask,
        loss_weight=loss_weight,
        temperature=torch.ones(length),
        rollout_logprobs=torch.zeros(length),
        **tensors,
    )


def one_token(advantage, ratio, loss=None, **cfg):
    """Loss, d loss / d logprob and metrics of one token at this probability ratio."""
    new = torch.tensor([-1.0], requires_grad=True)
    batch = make_batch(1, advantages=[advantage], old_logprobs=[-1.0 - math.log(ratio)])
    value, metrics = make_policy_loss(AlgoConfig(loss=loss or LossConfig(), **cfg))(Outputs(logprobs=new), batch)
    value.backward()
    return value.item(), new.grad.item(), {m.name: m for m in metrics}


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "gradient", "clipped"),
    [  # clip_low 0.2, clip_high 0.28
        (2.0, 1.0, -2.0, -2.0, ""),
        (2.0, 1.25, -2.5, -2.5, ""),  # inside: above 1.2, the symmetric bound
        (2.0, 1.5, -2.56, 0.0, "high"),  # -2 * 1.28
        (2.0, 0.5, -1.0, -1.0, ""),  # a good token that became less likely is raised without a limit
        (-2.0, 0.5, 1.6, 0.0, "low"),  # 2 * 0.8
        (-2.0, 0.9, 1.8, 1.8, ""),
        (-2.0, 1.5, 3.0, 3.0, ""),  # a bad token that became more likely is lowered
        (0.0, 1.5, 0.0, 0.0, ""),
    ],
)
def test_ppo_clip_golden_values(advantage, ratio, value, gradient, clipped):
    got, grad, metrics = one_token(advantage, ratio, LossConfig(clip_low=0.2, clip_high=0.28))
    assert (got, grad) == (pytest.approx(value, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    assert metrics["loss/clip_fraction_low"].sum == (clipped == "low")
    assert metrics["loss/clip_fraction_high"].sum == (clipped == "high")


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "gradient", "clipped"),
    [
        (-2.0, 5.0, 6.0, 0.0, 1),  # 2 * min(5, c = 3)
        (-2.0, 2.0, 4.0, 4.0, 0),
        (2.0, 5.0, -2.4, 0.0, 0),  # only negative advantages are bounded
    ],
)
def test_dual_clip_golden_values(advantage, ratio, value, gradient, clipped):
    got, grad, metrics = one_token(advantage, ratio, LossConfig(dual_clip=3.0))
    assert (got, grad) == (pytest.approx(value, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    assert metrics["loss/clip_fraction_dual"].sum == clipped


def test_without_dual_clip_the_loss_is_unbounded_and_has_no_dual_clip_metric():
    got, _, metrics = one_token(-2.0, 5.0)
    assert got == pytest.approx(10.0, rel=1e-5) and "loss/clip_fraction_dual" not in metrics


def test_gspo_equals_the_objective_of_the_paper_for_complete_answers():
    """Value and gradient of equation 5, whose ratio has a gradient through the mean; some answers are clipped."""
    g = torch.Generator().manual_seed(0)
    lengths, log_ratios = [1, 3, 5, 2, 4], torch.tensor([0.3, 0.05, -0.05, -0.3, 0.3], dtype=torch.float64)
    rows = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    old = -torch.rand(15, generator=g, dtype=torch.float64)
    new = old + log_ratios[rows] + 0.01 * torch.randn(15, generator=g, dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5, -1.0, -1.0], dtype=torch.float64)[rows]
    weight = 1 / (5 * torch.tensor(lengths, dtype=torch.float64)[rows])  # seq_mean_token_mean
    results = []
    for loss_of in (gspo, own_algorithms.gspo):
        logprobs = new.clone().requires_grad_()
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=old,
            advantages=advantages,
            ref_logprobs=None,
            entropy=None,
            row_lengths=lengths,
        )
        loss, seen = loss_of(inputs, clip_low=0.2, clip_high=0.2)
        (weight * loss).sum().backward()
        results.append((loss.detach(), logprobs.grad, seen["ratio_mean"].detach()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert {i for i in range(5) if (results[0][1][rows == i] == 0).all()} == {0, 3}, "outside the bounds, and better"


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight", "clipped"),
    [  # clip_low 0.2, clip_high 0.28; log-probability -1
        (2.0, 1.0, 1.0, ""),
        (2.0, 1.5, 1.28, "high"),
        (-2.0, 1.5, 1.28, "high"),
        (2.0, 0.5, 0.8, "low"),
        (-2.0, 0.9, 0.9, ""),
    ],
)
def test_cispo_golden_values(advantage, ratio, weight, clipped):
    loss = LossConfig(kind="cispo", clip_low=0.2, clip_high=0.28)
    got, grad, metrics = one_token(advantage, ratio, loss)
    assert got == pytest.approx(advantage * weight, rel=1e-5) and grad == pytest.approx(-advantage * weight, rel=1e-5)
    assert metrics["loss/clip_fraction_low"].sum == (clipped == "low")
    assert metrics["loss/clip_fraction_high"].sum == (clipped == "high")


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "gradient"),
    [  # tau_pos 1, tau_neg 2
        (2.0, 1.0, -4.0, -2.0),  # -2 * 4 / 1 * sigmoid(0)
        (2.0, 1.5, -4.979675, -2.820045),  # sigmoid(0.5) = 0.622459
        (-2.0, 1.0, 2.0, 2.0),
        (-2.0, 1.5, 2.924234, 2.359343),  # sigmoid(1) = 0.731059
        (-2.0, 0.5, 1.075766, 0.786448),  # sigmoid(-1) = 0.268941
    ],
)
def test_sapo_golden_values(advantage, ratio, value, gradient):
    got, grad, metrics = one_token(advantage, ratio, LossConfig(kind="sapo", tau_neg=2.0))
    assert (got, grad) == (pytest.approx(value, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    assert metrics["loss/ratio_mean"].sum == pytest.approx(ratio)


def test_sapo_is_exact_in_fp64():
    """tau and 4 / tau in fp32 would give an error of 1e-8."""
    new, tau = torch.tensor([-1.0, -2.0], dtype=torch.float64), (0.3, 0.7)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    old = {"old_logprobs": new - 0.1, "rollout_logprobs": new, "ref_logprobs": None, "entropy": None}
    inputs = LossInputs(logprobs=new, advantages=advantages, row_lengths=[2], **old)
    got, _ = sapo(inputs, tau_pos=tau[0], tau_neg=tau[1])
    ratio = math.exp(0.1)
    expected = [-a * 4 / t / (1 + math.exp(-t * (ratio - 1))) for a, t in zip((1, -1), tau)]
    assert got.dtype == torch.float64 and got.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(kind):
    """-A for each token, to the bit except for sapo's division by tau."""
    new = torch.tensor([-0.3, -7.1, -0.011], requires_grad=True)
    batch = make_batch(3, advantages=[1.5, -0.5, 0.25])
    value, _ = make_policy_loss(AlgoConfig(loss=LossConfig(kind=kind)))(Outputs(logprobs=new), batch)
    value.backward()
    torch.testing.assert_close(new.grad, -batch.advantages, rtol=1e-6 if kind == "sapo" else 0, atol=0)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
def test_at_an_extreme_ratio_value_and_gradient_are_finite(kind, log_ratio):
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = make_batch(2, advantages=[1.0, -1.0], old_logprobs=[-1.0 - log_ratio] * 2)
    value, metrics = make_policy_loss(AlgoConfig(loss=LossConfig(kind=kind)))(Outputs(logprobs=new), batch)
    value.backward()
    assert value.isfinite() and new.grad.isfinite().all() and all(math.isfinite(m.sum) for m in metrics)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_token_without_probability_leaves_the_loss_finite(kind, advantage):
    new = torch.tensor([-math.inf, -1.0], requires_grad=True)
    batch = make_batch(2, advantages=[advantage, 1.0], old_logprobs=[-1.0, -1.0])
    value, _ = make_policy_loss(AlgoConfig(loss=LossConfig(kind=kind)))(Outputs(logprobs=new), batch)
    value.backward()
    assert value.isfinite() and new.grad.isfinite().all()


def test_an_extreme_ratio_stays_finite():
    """The log-ratio of 200 would be inf in float32; cut at 20 it is finite and gives no gradient."""
    new = torch.tensor([-1.0], requires_grad=True)
    value, metrics = make_policy_loss(AlgoConfig())(
        Outputs(logprobs=new), make_batch(1, advantages=[-1.0], old_logprobs=[-201.0])
    )
    value.backward()
    assert value.item() == pytest.approx(math.exp(20), rel=1e-5) and new.grad.item() == 0
    assert all(math.isfinite(m.sum) for m in metrics)


def test_on_policy_ratio_is_exactly_one():
    """Without old_logprobs r = 1 to the bit, nothing is clipped, and the gradient is -A."""
    new = torch.tensor([-0.3, -7.1, -0.011], requires_grad=True)
    batch = make_batch(3, advantages=[1.5, -0.5, 0.25])
    value, metrics = make_policy_loss(AlgoConfig(loss=LossConfig(dual_clip=2.0)))(Outputs(logprobs=new), batch)
    value.backward()
    found = {m.name: m for m in metrics}
    assert value.item() == -1.25 and new.grad.tolist() == [-1.5, 0.5, -0.25]
    assert (found["loss/ratio_mean"].sum, found["loss/ratio_mean"].weight) == (3.0, 3.0)
    assert found["loss/ratio_max"].sum == 1.0
    zero = ["loss/clip_fraction_low", "loss/clip_fraction_high", "loss/clip_fraction_dual", "loss/approx_kl"]
    assert [found[name].sum for name in zero] == [0.0] * 4


def test_kl_and_entropy_terms_golden():
    """One token: A = 0 leaves 0.1 * k3(d = -0.5) - 0.01 * 1.7; with k1 it is 0.1 * 0.5."""
    for estimator, kl in [("k3", 0.1065306597), ("k1", 0.5), ("k2", 0.125)]:
        cfg = AlgoConfig(kl=KlConfig(coef=0.1, estimator=estimator), entropy_coef=0.01)
        entropy = torch.tensor([1.7], requires_grad=True)
        value, metrics = make_policy_loss(cfg)(
            Outputs(logprobs=torch.tensor([-1.0]), entropy=entropy),
            make_batch(1, advantages=[0.0], ref_logprobs=[-1.5]),
        )
        value.backward()
        found = {m.name: m.sum for m in metrics}
        assert value.item() == pytest.approx(0.1 * kl - 0.017, rel=1e-5)
        assert entropy.grad.item() == pytest.approx(-0.01)
        assert found["loss/kl"] == pytest.approx(kl, rel=1e-5) and found["loss/entropy"] == pytest.approx(1.7)


def test_a_negative_entropy_coefficient_lowers_the_entropy():
    """A = 0 leaves -(-0.01) * 1.7."""
    entropy = torch.tensor([1.7], requires_grad=True)
    value, _ = make_policy_loss(AlgoConfig(entropy_coef=-0.01))(
        Outputs(logprobs=torch.tensor([-1.0]), entropy=entropy), make_batch(1, advantages=[0.0])
    )
    value.backward()
    assert value.item() == pytest.approx(0.017, rel=1e-5) and entropy.grad.item() == pytest.approx(0.01)


def test_entropy_is_a_metric_only_when_its_coefficient_is_zero():
    entropy = torch.tensor([1.7], requires_grad=True)
    logprobs = torch.tensor([-1.0], requires_grad=True)
    value, metrics = make_policy_loss(AlgoConfig())(
        Outputs(logprobs=logprobs, entropy=entropy), make_batch(1, advantages=[1.0])
    )
    value.backward()
    assert entropy.grad is None and {m.name: m.sum for m in metrics}["loss/entropy"] == pytest.approx(1.7)


def test_kl_in_the_reward_does_not_enter_the_loss():
    """The KL was already subtracted from the rewards; counting it twice would double the coefficient."""
    cfg = AlgoConfig(kl=KlConfig(coef=0.1, place="reward"))
    batch = make_batch(1, advantages=[1.0], ref_logprobs=[-1.5])
    value, metrics = make_policy_loss(cfg)(Outputs(logprobs=torch.tensor([-1.0])), batch)
    assert value.item() == -1.0 and "loss/kl" not in {m.name for m in metrics}


@pytest.mark.parametrize(
    ("cfg", "fields", "message"),
    [
        (AlgoConfig(), {}, "needs batch.advantages"),
        (AlgoConfig(kl=KlConfig(coef=0.1)), {"advantages": [1.0]}, "no ref_logprobs"),
        (AlgoConfig(entropy_coef=0.1), {"advantages": [1.0]}, "no entropy"),
    ],
)
def test_a_missing_field_is_named(cfg, fields, message):
    with pytest.raises(ValueError, match=message):
        make_policy_loss(cfg)(Outputs(logprobs=torch.tensor([-1.0])), make_batch(1, **fields))


def random_case(length=48, seed=0):
    """Outputs and a batch in which every term has an effect; about half of the tokens are masked."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda scale=1.0: torch.randn(length, generator=g) * scale  # noqa: E731
    logprobs = -draw().abs()
    batch = make_batch(
        length,
        mask=torch.rand(length, generator=g) < 0.5,
        loss_weight=draw().abs() / length,
        advantages=draw(),
        old_logprobs=logprobs + draw(0.4),
        ref_logprobs=logprobs + draw(0.4),
    )
    batch.loss_weight = torch.where(batch.mask, batch.loss_weight, 0.0)
    return Outputs(logprobs=logprobs, entropy=draw().abs()), with_trained_fields(batch)


def run(loss, outputs, batch):
    """Value, gradients by logprobs and entropy, metrics."""
    logprobs = outputs.logprobs.clone().requires_grad_()
    entropy = outputs.entropy.clone().requires_grad_()
    value, metrics = loss(Outputs(logprobs=logprobs, entropy=entropy), batch)
    value.backward()
    return value.detach(), logprobs.grad, entropy.grad, [*metrics]


@pytest.mark.parametrize("poison", [math.nan, 1e6, -1e6, math.inf])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", ["policy", "sft"])
def test_poison_in_masked_positions_changes_no_bit(poison, on_policy, name):
    """Values, gradients and metrics; multiplying by a mask fails this, `where` on the inputs passes."""
    loss = make_policy_loss(FULL) if name == "policy" else sft_loss
    outputs, batch = random_case()
    if on_policy:
        batch.old_logprobs = None
    clean = run(loss, outputs, batch)
    bad = lambda x: None if x is None else torch.where(batch.mask, x, poison)  # noqa: E731
    poisoned_outputs = Outputs(logprobs=bad(outputs.logprobs), entropy=bad(outputs.entropy))
    fields = ["advantages", "old_logprobs", "ref_logprobs", "loss_weight"]
    poisoned = run(loss, poisoned_outputs, dataclasses.replace(batch, **{f: bad(getattr(batch, f)) for f in fields}))
    assert torch.equal(clean[0], poisoned[0]) and clean[0].isfinite()
    assert torch.equal(clean[1], poisoned[1])
    assert (clean[2] is None and poisoned[2] is None) or torch.equal(clean[2], poisoned[2])
    assert clean[3] == poisoned[3]
    assert (clean[1][~batch.mask] == 0).all() and (clean[1][batch.mask] != 0).any()


def part(value, cut):
    """Take the tokens `cut` of a record's [T] tensors."""
    per_token = lambda x: isinstance(x, torch.Tensor) and x.shape == (48,)  # noqa: E731
    chosen = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    value = dataclasses.replace(value, **{k: v[cut] for k, v in chosen.items() if per_token(v)})
    return value if isinstance(value, Outputs) else with_trained_fields(value)


@pytest.mark.parametrize("loss", [make_policy_loss(FULL), sft_loss], ids=["policy", "sft"])
@pytest.mark.parametrize("cuts", [[0, 48], [0, 1, 17, 30, 48], list(range(49))], ids=["one", "four", "each"])
def test_sums_and_metrics_do_not_depend_on_the_partition(loss, cuts):
    """Batches may be cut anywhere, also into parts without trained tokens; sums and weights stay the same."""
    outputs, batch = random_case()
    unsplit, _, _, expected = run(loss, outputs, batch)
    pieces = [run(loss, part(outputs, slice(a, b)), part(batch, slice(a, b))) for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(sum(p[0] for p in pieces), unsplit, rtol=1e-6, atol=1e-7)
    for metric in expected:
        merged = [m for p in pieces for m in p[3] if m.name == metric.name]
        if metric.reduce in ("max", "min"):
            assert {"max": max, "min": min}[metric.reduce](m.sum for m in merged) == metric.sum
            continue
        assert sum(m.sum for m in merged) == pytest.approx(metric.sum, rel=1e-6)
        if metric.reduce == "mean":
            assert sum(m.weight for m in merged) == pytest.approx(metric.weight, rel=1e-12)


@pytest.mark.parametrize("loss", [make_policy_loss(FULL), sft_loss], ids=["policy", "sft"])
def test_token_order_does_not_matter(loss):
    outputs, batch = random_case(seed=5)
    value, grad, _, metrics = run(loss, outputs, batch)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    value2, grad2, _, metrics2 = run(loss, part(outputs, order), part(batch, order))
    torch.testing.assert_close(value2, value)
    assert torch.equal(grad2, grad[order])
    for a, b in zip(metrics, metrics2):
        assert b.sum == pytest.approx(a.sum, rel=1e-6)


def test_an_all_masked_batch_gives_zero_loss_zero_gradient_and_no_weight():
    outputs, batch = random_case()
    batch.mask = torch.zeros(48, dtype=torch.bool)
    value, grad, _, metrics = run(make_policy_loss(FULL), outputs, with_trained_fields(batch))
    assert value == 0 and (grad == 0).all()
    assert all(m.sum == 0 and (m.weight == 0 or m.reduce == "max") for m in metrics)


def test_sft_golden_value():
    """Weights 1/2 on NLLs 1 and 3; the metric is a plain sum over trained tokens."""
    batch = make_batch(3, mask=[0, 1, 1], loss_weight=[0.0, 0.5, 0.5])
    value, metrics = sft_loss(Outputs(logprobs=torch.tensor([math.nan, -1.0, -3.0])), batch)
    assert value.item() == 2.0
    assert [(m.name, m.sum, m.weight) for m in metrics] == [("loss/nll", 4.0, 2.0)]


def test_losses_can_be_sent_to_a_rank():
    outputs, batch = random_case()
    for loss in (make_policy_loss(FULL), sft_loss):
        sent = pickle.loads(pickle.dumps(loss))
        assert torch.equal(sent(outputs, batch)[0], loss(outputs, batch)[0])


def test_every_configured_name_has_its_function():
    assert set(LOSSES) == set(LOSS_ARGS) == set(LossConfig.model_fields["kind"].annotation.__args__)
