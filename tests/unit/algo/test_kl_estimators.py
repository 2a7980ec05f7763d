"""Each estimator's value and gradient, proven by enumerating a softmax over six tokens in float64."""

import pytest
import torch

from meshrl.algo.kl import kl_estimate


@pytest.fixture
def softmax6():
    """Logits of a policy (with gradient) and the log-probabilities of a reference, six tokens."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, ref


def expected_gradient(kind, logits, ref):
    """Mean of d k(token) / d logits over tokens drawn from the policy: the gradient of an on-policy loss term."""
    logp = logits.log_softmax(0)
    (logp.detach().exp() * kl_estimate(logp, ref, kind)).sum().backward()
    return logits.grad


def gradient_of(value, logits):
    return torch.autograd.grad(value, logits)[0]


def reverse_kl(logits, ref):
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - ref)).sum()


def forward_kl(logits, ref):
    return (ref.exp() * (ref - logits.log_softmax(0))).sum()


def test_k1_in_the_loss_has_zero_mean_gradient(softmax6):
    logits, ref = softmax6
    assert expected_gradient("k1", logits, ref).abs().max() < 1e-15
    assert gradient_of(reverse_kl(logits, ref), logits).abs().max() > 0.1


def test_k2_in_the_loss_gives_the_reverse_kl_gradient(softmax6):
    logits, ref = softmax6
    torch.testing.assert_close(
        expected_gradient("k2", logits, ref), gradient_of(reverse_kl(logits, ref), logits), rtol=1e-12, atol=1e-14
    )


def test_k3_in_the_loss_gives_the_forward_kl_gradient(softmax6):
    logits, ref = softmax6
    torch.testing.assert_close(
        expected_gradient("k3", logits, ref), gradient_of(forward_kl(logits, ref), logits), rtol=1e-12, atol=1e-14
    )


def test_k1_in_the_reward_gives_the_reverse_kl_gradient(softmax6):
    logits, ref = softmax6
    logp = logits.log_softmax(0)
    penalty = kl_estimate(logp, ref, "k1").detach()
    score_function = (logp.detach().exp() * penalty * logp).sum()
    torch.testing.assert_close(
        gradient_of(score_function, logits), gradient_of(reverse_kl(logits, ref), logits), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind, softmax6):
    logits, ref = softmax6
    logp = logits.detach().log_softmax(0)
    torch.testing.assert_close((logp.exp() * kl_estimate(logp, ref, kind)).sum(), reverse_kl(logits, ref).detach())


@pytest.mark.parametrize(("kind", "golden"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065306597126334)])
def test_golden_values(kind, golden):
    """log p = -1, log p_ref = -1.5, so d = -0.5: k1 = 0.5, k2 = 0.125, k3 = e^-0.5 - 1 + 0.5."""
    value = kl_estimate(torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.5, dtype=torch.float64), kind)
    assert value.item() == pytest.approx(golden, rel=1e-14)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_equal_logprobs_give_exactly_zero(kind):
    """KL(policy, reference) is 0 at step 0."""
    logp = torch.tensor([-0.1, -3.7, -11.0])
    assert kl_estimate(logp, logp.clone(), kind).abs().max() == 0


def test_k3_keeps_its_digits_near_zero_in_float32():
    """Computed directly, e^d - 1 - d is rounding noise below d = 1e-3."""
    d = torch.tensor([1e-4, 3e-4, -2e-4])
    logp = torch.zeros(3)
    torch.testing.assert_close(kl_estimate(logp, d, "k3"), d * d / 2, rtol=2e-3, atol=0)


def test_k3_stays_finite_and_never_pushes_the_wrong_way_for_extreme_ratios():
    logp = torch.tensor([-500.0, -30.0, -1.0], requires_grad=True)
    value = kl_estimate(logp, torch.tensor([-1.0, -1.0, -500.0]), "k3")
    value.sum().backward()
    assert value.isfinite().all() and (value >= 0).all()
    # Where the policy is far below the reference, the gradient must not lower it further; far above, it lowers it.
    assert logp.grad.tolist() == [0.0, 0.0, 1.0]
