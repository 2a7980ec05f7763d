"""Faults of the importance correction: each leaves a run whose curves look plausible."""

from __future__ import annotations

from fault import Fault

_FILE = "meshrl/algo/correction.py"
_TESTS = "tests/unit/algo/test_correction.py::"

CORRECTION_FAULTS = [
    Fault(
        "the correction weighs by new / rollout",
        _FILE,
        "log_ratio = inputs.old_logprobs.detach().double()",
        "log_ratio = inputs.logprobs.detach().double()",
        (_TESTS + "test_with_several_updates_the_loss_clips_new_to_old_and_the_correction_is_old_to_rollout",),
    ),
    Fault(
        "the loss clips new / rollout",
        "meshrl/algo/losses.py",
        "ratio = (inputs.logprobs - inputs.old_logprobs)",
        "ratio = (inputs.logprobs - inputs.rollout_logprobs)",
        (_TESTS + "test_with_several_updates_the_loss_clips_new_to_old_and_the_correction_is_old_to_rollout",),
    ),
    Fault(
        "the ratio of a sequence is the product over the micro-batch",
        _FILE,
        "inputs.row_sum(log_ratio))",
        "log_ratio.sum().expand(len(log_ratio)))",
        (
            _TESTS + "test_weights_and_metrics_do_not_depend_on_the_partition",
            "tests/dist/test_correction_equal.py::test_a_correction_of_rows_gives_the_unsharded_gradient_and_metrics",
        ),
    ),
    Fault(
        "the weights of each micro-batch are normalized to a mean of 1",
        "meshrl/algo/losses.py",
        "loss = importance.to(loss.dtype) * loss",
        "loss = (importance / importance.mean()).to(loss.dtype) * loss",
        (_TESTS + "test_rejected_tokens_stay_in_the_denominator",),
    ),
    Fault(
        "a token with a rollout logprob of -inf is trained with the largest weight",
        _FILE,
        "log_ratio.where(log_ratio.isfinite(), torch.nan)",
        "log_ratio",
        (_TESTS + "test_a_token_without_a_finite_rollout_logprob_is_not_trained_and_counted",),
    ),
    Fault(
        "an auto correction reaches the ranks, which do not correct",
        "meshrl/config/load.py",
        'config.algo.correction.kind == "auto":',
        'config.algo.correction.kind == "":',
        (
            "tests/unit/config/test_config_correction.py::"
            "test_a_loaded_config_has_the_kind_that_auto_means_and_explain_shows_why",
        ),
    ),
    *(
        Fault(name, file, old, new, (f"tests/dist/test_rows_without_gradient.py::{test}",))
        for name, file, old, new, test in (
            (
                "rows with an advantage get no backward pass",
                "meshrl/train/engine.py",
                "trains = at >= num_scored",
                "trains = at > num_scored",
                "test_they_are_scored_only_and_nothing_else_changes",
            ),
            (
                "an entropy bonus has no gradient at an advantage of 0",
                "meshrl/algo/losses.py",
                "other_terms = cfg.entropy_coef != 0 or ",
                "other_terms = ",
                "test_an_advantage_of_zero_is_enough_only_where_nothing_else_is_in_the_loss",
            ),
            (
                "a step without any gradient has no dummy micro-batch",
                "meshrl/train/batch_plan.py",
                "len(first[0])",
                "len(first[0]) + (not trained)",
                "test_they_are_scored_only_and_nothing_else_changes",
            ),
        )
    ),
]
