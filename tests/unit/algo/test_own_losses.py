"""A user-defined loss: its inputs, the terms that the engine adds, and checks of its result."""

import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from tiny_samples import random_groups, with_trained_fields

from meshrl.algo.losses import LossInputs, make_policy_loss
from meshrl.config.algo import AlgoConfig, KlConfig, UserLossConfig
from meshrl.core.batch import Batch, Outputs
from meshrl.train.packing import pack


def own(name: str, **args) -> AlgoConfig:
    return AlgoConfig(loss=UserLossConfig(kind=f"own_algorithms:{name}", **args), kl=KlConfig(coef=0.1))


def packed(on_policy: bool = False) -> tuple[Outputs, Batch]:
    """Two groups that share their prompts, packed; and outputs in float64 for them."""
    samples = random_groups(3, [5, 9], [1, 6, 4])
    batch = pack(samples, list(range(len(samples))))
    if on_policy:
        batch.old_logprobs = None
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(batch.num_tokens, dtype=torch.float64, generator=generator) * 4
    return Outputs(logprobs=logprobs, entropy=logprobs.neg()), batch


def run(cfg: AlgoConfig, outputs: Outputs, batch: Batch):
    logprobs = outputs.logprobs.clone().requires_grad_()
    value, metrics = make_policy_loss(cfg)(dataclasses.replace(outputs, logprobs=logprobs), batch)
    value.backward()
    return value.detach(), logprobs.grad, {m.name: m for m in metrics}


def inputs_of(values: torch.Tensor, lengths: list[int]) -> LossInputs:
    return LossInputs(
        logprobs=values,
        old_logprobs=values,
        rollout_logprobs=values,
        advantages=values,
        ref_logprobs=None,
        entropy=None,
        row_lengths=lengths,
    )


def test_a_row_is_reduced_over_its_own_tokens_and_so_is_its_gradient():
    values = torch.tensor([1.0, 3.0, 0.0, 0.0, 6.0], dtype=torch.float64, requires_grad=True)
    inputs = inputs_of(values, [2, 3])
    assert inputs.row_mean(values).tolist() == [2, 2, 2, 2, 2]
    assert inputs.row_sum(values).tolist() == [4, 4, 6, 6, 6]
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((weights * inputs.row_mean(values)).sum(), values)
    assert grad.tolist() == [1.5, 1.5, 4, 4, 4]


@pytest.mark.parametrize("on_policy", [False, True])
def test_sequence_ratios_of_packed_rows_equal_those_of_each_row_alone(on_policy: bool):
    """A mean over the complete pack, or over prompt and answer, would be a plausible, but wrong number."""
    outputs, batch = packed(on_policy)
    clip_low, clip_high, weight = 0.3, 0.4, batch.loss_weight
    cfg = AlgoConfig(loss=UserLossConfig(kind="own_algorithms:gspo", clip_low=clip_low, clip_high=clip_high))
    value, grad, metrics = run(cfg, outputs, batch)
    new, total, expected, ratios = outputs.logprobs.numpy(), 0.0, np.zeros(batch.num_tokens), []
    bounds = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        trained = [t for t in range(start, stop) if batch.mask[t]]
        if not trained:
            continue
        old = new if on_policy else batch.old_logprobs.double().numpy()
        s = math.exp(sum(new[t] - old[t] for t in trained) / len(trained))
        advantages = [float(batch.advantages[t]) for t in trained]
        ratios += [s] * len(trained)
        total += sum(
            -float(weight[t]) * min(s * a, min(max(s, 1 - clip_low), 1 + clip_high) * a)
            for t, a in zip(trained, advantages)
        )
        inside = {a: (s < 1 + clip_high) if a > 0 else (s > 1 - clip_low) for a in advantages}
        slope = sum(-float(weight[t]) * a * s * inside[a] for t, a in zip(trained, advantages)) / len(trained)
        expected[trained] = slope
    assert len(set(ratios)) == (1 if on_policy else 6)
    assert value.item() == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-12, atol=1e-15)
    assert metrics["loss/ratio_mean"].sum == pytest.approx(sum(ratios)) and metrics["loss/ratio_mean"].unit == ""
    assert metrics["loss/clipped"].weight == len(ratios)


def test_the_engine_adds_kl_and_entropy_to_any_loss():
    outputs, batch = packed()
    plain = AlgoConfig(loss=UserLossConfig(kind="own_algorithms:of_anything", x=1))
    value, _, metrics = run(plain.model_copy(update={"kl": KlConfig(coef=0.1), "entropy_coef": 0.01}), outputs, batch)
    without, _, _ = run(plain, outputs, batch)
    terms = 0.1 * metrics["loss/kl"].sum - 0.01 * float((batch.loss_weight * outputs.entropy)[batch.mask].sum())
    assert value.item() == pytest.approx(float(without) + terms, rel=1e-9)
    assert metrics["loss/policy"].sum == pytest.approx(float(without), rel=1e-9)


@pytest.mark.parametrize("poison", [math.nan, 1e6])
def test_untrained_tokens_are_never_read(poison: float):
    """Masked positions, and tokens of weight 0, which belong to answers that are left out."""
    outputs, batch = packed()
    out = torch.zeros_like(batch.mask)
    out[int(batch.cu_seqlens[-2]) :] = True
    batch.loss_weight = torch.where(out, 0.0, batch.loss_weight)
    batch = with_trained_fields(batch)
    clean = run(own("gspo"), outputs, batch)
    unread = ~batch.mask | out
    bad = {
        name: torch.where(unread, poison, getattr(batch, name))
        for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    poisoned = Outputs(**{n: torch.where(unread, poison, getattr(outputs, n)) for n in ("logprobs", "entropy")})
    got = run(own("gspo"), poisoned, dataclasses.replace(batch, **bad))
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1]) and got[2] == clean[2]
    assert (got[1][unread] == 0).all() and (got[1][~unread] != 0).any()


def test_a_micro_batch_without_a_trained_token_never_reaches_the_function():
    outputs, batch = packed()
    batch.loss_weight = torch.zeros_like(batch.loss_weight)
    value, grad, metrics = run(own("no_such_function"), outputs, with_trained_fields(batch))
    assert value == 0 and (grad == 0).all() and metrics == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", r"the loss is \[\]; .* here \[22\]"),
        ("bare", "returned a Tensor; it must return the loss of each token and a dict"),
        ("measures_a_mean", r"entropy_mean is \[\]"),
        ("measures_the_engines", r"measures \['kl'\], which are names of the engine's metrics"),
        ("detached", "has no gradient"),
    ],
)
def test_an_invalid_result_of_a_loss_is_refused_with_the_functions_name(name: str, message: str):
    with pytest.raises(ValueError, match=f"algo.loss.kind own_algorithms:{name}.*{message}"):
        run(own(name), *packed())


def test_a_rank_is_sent_the_dotted_path_and_the_arguments():
    outputs, batch = packed()
    loss = make_policy_loss(own("length_scaled", scale=2.0))
    sent = pickle.loads(pickle.dumps(loss))
    assert torch.equal(sent(outputs, batch)[0], loss(outputs, batch)[0])
    assert not torch.equal(
        loss(outputs, batch)[0], make_policy_loss(own("length_scaled", scale=1.0))(outputs, batch)[0]
    )
