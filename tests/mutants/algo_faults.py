"""Faults of the mathematics: losses, advantages, KL, denominators, and the correction of sampled logprobs."""

from __future__ import annotations

from fault import Fault

_ROWS_WITHOUT_GRADIENT = "tests/dist/test_rows_without_gradient.py::"
_CORRECTION = "tests/unit/algo/test_correction.py::"
_GROUP_ADVANTAGES = "tests/unit/algo/test_group_advantages.py::"
_LOSS_WEIGHTS = "tests/unit/algo/test_loss_weights.py::"
_OWN_ADVANTAGES = "tests/unit/algo/test_own_advantages.py::"
_OWN_LOSSES = "tests/unit/algo/test_own_losses.py::"
_POLICY_LOSSES = "tests/unit/algo/test_policy_losses.py::"

FAULTS = [
    Fault(
        "a user-defined advantage that writes into the rewards changes the metrics",
        "meshrl/algo/advantages.py::assign_advantages",
        "_assign(groups, function(groups), cfg.advantage)"
        " => _assign(groups, function(groups), cfg.advantage); metrics = _group_metrics(groups, cfg.advantage_eps)",
        _OWN_ADVANTAGES + "test_a_function_may_write_into_the_rewards_without_changing_the_metrics",
    ),
    Fault(
        "a user-defined advantage gets rewards without the KL penalty",
        "meshrl/algo/advantages.py::assign_advantages",
        "t.reward - t.kl_penalty => t.reward",
        _OWN_ADVANTAGES + "test_the_function_gets_rewards_less_the_kl",
    ),
    Fault(
        "eps is added to the variance instead of the deviation",
        "meshrl/algo/advantages.py::grpo",
        "rewards.std(ddof=1) + eps => np.sqrt(rewards.var(ddof=1) + eps)",
        _GROUP_ADVANTAGES + "test_eps_is_added_to_the_deviation_and_not_to_the_variance",
    ),
    Fault(
        "groups are formed by position",
        "meshrl/algo/advantages.py::assign_advantages",
        "trajectory.group_id => str(trajectories.index(trajectory) // 4)",
        _GROUP_ADVANTAGES + "test_order_changes_no_bit",
    ),
    Fault(
        "the correction weighs by new / rollout",
        "meshrl/algo/correction.py::correct",
        "inputs.old_logprobs.detach() => inputs.logprobs.detach()",
        _CORRECTION + "test_with_several_updates_the_loss_clips_new_to_old_and_the_correction_is_old_to_rollout",
    ),
    Fault(
        "the ratio of a sequence is the product over the micro-batch",
        "meshrl/algo/correction.py::correct",
        "inputs.row_sum(log_ratio) => log_ratio.sum().expand(len(log_ratio))",
        _CORRECTION + "test_weights_and_metrics_do_not_depend_on_the_partition",
    ),
    Fault(
        "a token with a rollout logprob of -inf is trained with the largest weight",
        "meshrl/algo/correction.py::correct",
        "log_ratio.where(log_ratio.isfinite(), torch.nan) => log_ratio",
        _CORRECTION + "test_a_token_without_a_finite_rollout_logprob_is_not_trained_and_counted",
    ),
    Fault(
        "the KL has the wrong sign",
        "meshrl/algo/kl.py::kl_estimate",
        "ref_logprobs - logprobs => logprobs - ref_logprobs",
        "tests/unit/algo/test_kl_estimators.py::test_golden_values",
    ),
    Fault(
        "each micro-batch has its own denominator",
        "meshrl/algo/losses.py::_policy_loss",
        "(weight * loss).sum() => (weight * loss).sum() / weight.sum()",
        _POLICY_LOSSES + "test_sums_and_metrics_do_not_depend_on_the_partition",
    ),
    Fault(
        "masked positions are multiplied by 0",
        "meshrl/algo/losses.py::_policy_loss",
        "batch.trained => torch.arange(batch.num_tokens)",
        _POLICY_LOSSES + "test_poison_in_masked_positions_changes_no_bit",
    ),
    Fault(
        "one metric counts masked positions",
        "meshrl/algo/losses.py::sft_loss",
        "batch.scored => torch.arange(batch.num_tokens)",
        _POLICY_LOSSES + "test_sft_golden_value",
    ),
    Fault(
        "metrics of a user-defined loss get the weights of the loss",
        "meshrl/algo/losses.py::_policy_loss",
        "torch.ones_like(weight) => weight",
        _OWN_LOSSES + "test_sequence_ratios_of_packed_rows_equal_those_of_each_row_alone",
    ),
    Fault(
        "clip bounds are swapped",
        "meshrl/algo/losses.py::_clipped_surrogate",
        "1.0 - clip_low, 1.0 + clip_high => 1.0 - clip_high, 1.0 + clip_low",
        _POLICY_LOSSES + "test_ppo_clip_golden_values",
    ),
    Fault(
        "on-policy old logprobs carry a gradient",
        "meshrl/algo/losses.py::_inputs",
        'inputs["logprobs"].detach() => inputs["logprobs"]',
        _POLICY_LOSSES + "test_on_policy_ratio_is_exactly_one",
    ),
    Fault(
        "row_mean is the mean of the micro-batch",
        "meshrl/algo/losses.py::LossInputs.row_mean",
        "values.split(self.row_lengths) => values.split(len(values))",
        "tests/dist/test_own_losses_equal.py::test_a_loss_of_complete_rows_gives_the_unsharded_gradient[token_mean]",
    ),
    Fault(
        "the ratio of a row is the product of those of its tokens",
        "meshrl/algo/losses.py::gspo",
        "inputs.row_mean => inputs.row_sum",
        _POLICY_LOSSES + "test_gspo_equals_the_objective_of_the_paper_for_complete_answers",
    ),
    Fault(
        "the clipped ratio of cispo has a gradient",
        "meshrl/algo/losses.py::cispo",
        "_ratio(inputs.logprobs - inputs.old_logprobs).detach() => _ratio(inputs.logprobs - inputs.old_logprobs)",
        _POLICY_LOSSES + "test_cispo_golden_values",
    ),
    Fault(
        "sapo has one temperature",
        "meshrl/algo/losses.py::sapo",
        "inputs.advantages > 0 => inputs.advantages != 0",
        _POLICY_LOSSES + "test_sapo_golden_values",
    ),
    Fault(
        "masked answers reach a user-defined loss",
        "meshrl/algo/losses.py::_policy_loss",
        "batch.trained => batch.scored",
        _OWN_LOSSES + "test_untrained_tokens_are_never_read",
    ),
    Fault(
        "the loss clips new / rollout",
        "meshrl/algo/losses.py::ppo_clip",
        "inputs.logprobs - inputs.old_logprobs => inputs.logprobs - inputs.rollout_logprobs",
        _CORRECTION + "test_with_several_updates_the_loss_clips_new_to_old_and_the_correction_is_old_to_rollout",
    ),
    Fault(
        "the weights of each micro-batch are normalized to a mean of 1",
        "meshrl/algo/losses.py::_policy_loss",
        "importance.to(loss.dtype) => (importance / importance.mean()).to(loss.dtype)",
        _CORRECTION + "test_rejected_tokens_stay_in_the_denominator",
    ),
    Fault(
        "an entropy bonus has no gradient at an advantage of 0",
        "meshrl/algo/losses.py::rows_without_gradient",
        "cfg.entropy_coef != 0 => False",
        _ROWS_WITHOUT_GRADIENT + "test_an_advantage_of_zero_is_enough_only_where_nothing_else_is_in_the_loss",
    ),
    Fault(
        "a negative coefficient of the entropy has no effect",
        "meshrl/algo/losses.py::_policy_loss",
        "cfg.entropy_coef != 0 => cfg.entropy_coef > 0",
        _POLICY_LOSSES + "test_a_negative_entropy_coefficient_lowers_the_entropy",
    ),
    Fault(
        "the logprobs of older weights are compared with the trainer's",
        "meshrl/algo/mismatch.py::row_mismatch",
        "sample.mask & (sample.versions == version) => sample.mask",
        "tests/unit/algo/test_sampler_mismatch.py::test_tokens_of_other_versions_are_not_compared",
    ),
    Fault(
        "the sampler's proof accepts NaN",
        "meshrl/algo/mismatch.py::row_mismatch",
        "torch.stack([difference.abs(), kl]).nan_to_num(nan=math.inf, posinf=math.inf)"
        " => torch.stack([difference.abs(), kl]).nan_to_num(nan=0.0, posinf=math.inf)",
        "tests/unit/loops/test_sampler_proof.py::test_broken_numbers_are_a_mismatch_at_any_step",
    ),
    Fault(
        "token_mean divides by the row's own tokens",
        "meshrl/algo/reduce.py",
        "np.full(len(lengths), 1.0 / lengths.sum()) => 1.0 / lengths",
        _LOSS_WEIGHTS + "test_golden_weights",
    ),
    Fault(
        "masked answers count in the denominator",
        "meshrl/algo/reduce.py::assign_loss_weights",
        "lengths > 0 => np.array([sample.mask.any() for sample in samples])",
        _LOSS_WEIGHTS + "test_answers_that_were_cut_off_are_in_no_denominator",
    ),
]
