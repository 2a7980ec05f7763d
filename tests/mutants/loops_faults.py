"""Faults of a training step and of the schedules: proofs, probes, staleness, evaluations, resumed groups."""

from __future__ import annotations

from fault import Fault

_LOOPS = "tests/contract/test_loops.py::"
_REPLACED = "tests/unit/loops/test_replaced_groups.py::"
_BUFFER = "tests/unit/loops/test_buffer.py::"
_EVALUATED_PROMPTS = "tests/unit/loops/test_evaluated_prompts.py::"
_JOB_STATE = "tests/unit/loops/test_job_state.py::"
_PROBE = "tests/unit/loops/test_sync_probe.py::"
_STALE = "tests/faults/test_stale_copies.py::test_a_stale_copy_ends_the_run_before_the_next_update"
_RESUMED_GROUPS = "tests/unit/loops/test_resumed_groups.py::"
_SAMPLER_PROOF = "tests/unit/loops/test_sampler_proof.py::"
_STEP_METRICS = "tests/unit/loops/test_step_metrics.py::"
_RUN_RECORD = "tests/unit/run/test_run_record.py::"

FAULTS = [
    Fault(
        "rows with advantage 0 have no part in the loss that balances experts",
        "meshrl/loops/train_step.py::_planned",
        "balances = cfg.train.router_aux_loss_coef > 0 => balances = False",
        "tests/e2e/test_mixture_run.py::"
        "test_a_run_replays_and_balances_its_routers_and_samples_from_the_trainers_weights",
    ),
    Fault(
        "samplers that have finished are idle until the trainer has finished",
        "meshrl/loops/buffer.py::GroupBuffer.take",
        "self._finished |= {*taken, *late}; self.fill() => self._finished |= {*taken, *late}",
        _BUFFER + "test_samplers_work_while_the_trainer_trains",
    ),
    Fault(
        "a resumed run forgets which later groups were trained",
        "meshrl/loops/buffer.py::GroupBuffer.cursor",
        "sorted(self._finished) => []",
        _RESUMED_GROUPS + "test_a_run_continues_with_the_groups_that_are_not_trained",
    ),
    Fault(
        "a run that returned to a checkpoint trains groups of weights that it has lost",
        "meshrl/loops/buffer.py::GroupBuffer.__init__",
        "max(_versions(group), default=0) <= job.trainer.version => True",
        _RESUMED_GROUPS + "test_groups_of_lost_weights_are_sampled_again",
    ),
    Fault(
        "scored groups are used again although they can not all be trained in time",
        "meshrl/loops/buffer.py::GroupBuffer.fill",
        "self.limits.is_in_time(oldest, version) => True",
        _RESUMED_GROUPS + "test_groups_that_can_not_all_be_trained_in_time_are_sampled_again",
    ),
    Fault(
        "a group that is used again is as old as its newest token",
        "meshrl/loops/buffer.py::GroupBuffer.fill",
        "min(_versions(again), default=version) => max(_versions(again), default=version)",
        _RESUMED_GROUPS + "test_groups_that_can_not_all_be_trained_in_time_are_sampled_again[turns5-2]",
    ),
    Fault(
        "a group that is used again counts as a new one",
        "meshrl/loops/buffer.py::GroupBuffer.fill",
        "self.limits.start(prompt.ordinal, oldest) => self.limits.start(prompt.ordinal, version)",
        _RESUMED_GROUPS + "test_a_group_that_is_used_again_is_trained_before_newer_ones",
    ),
    Fault(
        "an evaluation accepts answers of old weights",
        "meshrl/loops/evaluate.py::evaluate_if_due",
        "job.trainer.version => 0",
        _EVALUATED_PROMPTS + "test_an_evaluation_asks_for_the_weights_of_the_trainer",
    ),
    Fault(
        "an evaluation counts failed gradings as wrong answers",
        "meshrl/loops/evaluate.py::evaluate_prompts",
        "check_failures(cfg, scorer, trajectories) => pass",
        _EVALUATED_PROMPTS + "test_an_evaluation_whose_grader_fails_ends_the_run",
    ),
    Fault(
        "a run that on_step ends is not evaluated",
        "meshrl/loops/evaluate.py::evaluate_if_due",
        "job.is_over => job.step == job.cfg.loop.num_steps",
        "tests/e2e/test_python_api.py::test_false_from_on_step_ends_the_run_as_after_its_last_step",
    ),
    Fault(
        "a best model whose export was interrupted is never written",
        "meshrl/loops/evaluate.py::evaluate_if_due",
        "done and job.cfg.loop.save_best => False",
        _RUN_RECORD + "test_a_best_model_whose_export_was_interrupted_is_written_after_the_resume",
    ),
    Fault(
        "groups are started without a limit of staleness",
        "meshrl/loops/buffer.py::GroupLimits.may_start",
        "self._step + self._staleness + 1 => self._step + self._staleness + 2",
        _BUFFER + "test_in_any_order_no_group_is_too_old_and_none_is_lost",
    ),
    Fault(
        "a step does not wait for groups that become too old",
        "meshrl/loops/buffer.py::GroupLimits.take",
        "position > num_steps * self._per_step + self._spare => False",
        _BUFFER + "test_a_slow_group_is_waited_for_before_it_is_too_old",
    ),
    Fault(
        "a step lets more groups age than later steps can train",
        "meshrl/loops/buffer.py::GroupLimits.take",
        "position > num_steps * self._per_step + self._spare => num_steps == 0 and position > self._spare",
        _BUFFER + "test_in_any_order_no_group_is_too_old_and_none_is_lost",
    ),
    Fault(
        "a step takes the newest groups",
        "meshrl/loops/buffer.py::GroupLimits.take",
        "sorted(self.versions, key=self.versions.__getitem__) => sorted(self.versions, reverse=True)",
        _BUFFER + "test_the_oldest_groups_are_trained_first",
    ),
    Fault(
        "with staleness 0 spare groups start while the trainer trains",
        "meshrl/loops/buffer.py::GroupLimits.may_start",
        "self._staleness == 0 and self._has_taken => False",
        _BUFFER + "test_with_staleness_0_no_group_starts_while_the_trainer_trains",
    ),
    Fault(
        "the number of groups falls after a wait that ended with more than the step takes",
        "meshrl/loops/buffer.py::GroupLimits.take",
        "max(1, step // 2) => max(1, step // 2) * (len(self.scored) == step)",
        _BUFFER + "test_the_number_of_groups_rises_after_a_wait_that_ended_with_more_groups_than_the_step_takes",
    ),
    Fault(
        "a run that continues as another schedule trains prompts twice",
        "meshrl/loops/job.py::Job.next_prompts",
        "[prompt for prompt in drawn if prompt.ordinal not in finished] => drawn",
        _RESUMED_GROUPS + "test_another_schedule_leaves_out_prompts_that_were_trained",
    ),
    Fault(
        "a resume with another dtype has the limit of the earlier one",
        "meshrl/loops/job.py::Job.restore",
        'saved["proof_threshold"] if is_same else None => saved["proof_threshold"]',
        _RUN_RECORD + "test_a_resumed_run_has_no_result_before_it_ends_and_may_change_its_dtype",
    ),
    Fault(
        "a resume with another sampler has the limit of the earlier one",
        "meshrl/loops/job.py::Job.restore",
        '("model", "rollout") => ("model",)',
        _JOB_STATE + "test_the_limit_of_the_proof_is_measured_again_when_model_or_sampler_changes[changes5-None]",
    ),
    Fault(
        "a resumed run reads its data from the start",
        "meshrl/loops/job.py::Job.restore",
        'self.feed.load_state(saved["data"]) => pass',
        "tests/e2e/test_resume.py::test_a_resumed_run_equals_one_that_was_not_interrupted[mid-epoch]",
    ),
    Fault(
        "a resumed run samples the prompts of replaced groups again",
        "meshrl/loops/buffer.py::GroupBuffer._ended",
        "self._finished.add(ordinal) => pass",
        _REPLACED + "test_a_run_that_continues_before_a_group_that_was_not_trained_leaves_out_replaced_ones",
    ),
    Fault(
        "an attempt that failed passes where the lowest score is the full one",
        "meshrl/loops/evaluate.py::eval_metrics",
        "not _has_failed(t, cfg.eval_term) => True",
        "tests/unit/loops/test_eval_metrics.py::test_an_answer_passes_by_the_terms_that_apply_to_it",
    ),
    Fault(
        "a group of equal rewards counts as one with a gradient",
        "meshrl/loops/collect.py::GroupFilter.accepts",
        "min(len(rewards), len(scores)) > 1 => min(len(rewards), len(scores)) > 0",
        _REPLACED + "test_a_group_is_accepted_if_its_rewards_differ_or_the_limit_is_reached",
    ),
    Fault(
        "a one-step-off run resumes after the batch that was sampled ahead",
        "meshrl/loops/collect.py::next_batch",
        "prompts, batch.cursor = job.next_prompts(missing)"
        " => prompts, _ = job.next_prompts(missing); "
        'batch.cursor = {**job.feed.state(), "next_ordinal": job.feed.state()["next_ordinal"] + len(prompts)}',
        _LOOPS + "test_a_run_that_ended_early_continues_with_the_next_prompts",
    ),
    Fault(
        "the proof takes one mean over all samplers",
        "meshrl/loops/sync_and_probe.py::SamplerProof.check",
        "{name: _mean(rows[names == name]) for name in dict.fromkeys(engines)} => {engines[-1]: _mean(rows)}",
        _SAMPLER_PROOF + "test_one_stale_engine_among_many_is_named",
    ),
    Fault(
        "one engine of many may sample with other weights",
        "meshrl/loops/sync_and_probe.py::SamplerProof.check",
        "row / ROW_MARGIN => 0.0",
        _SAMPLER_PROOF + "test_one_stale_row_among_many_ends_the_run",
    ),
    Fault(
        "a sampler may stay above the limit for ever",
        "meshrl/loops/sync_and_probe.py::SamplerProof.check",
        "self.num_above >= PERSISTENT => False",
        _SAMPLER_PROOF + "test_a_difference_that_lasts_ends_the_run",
    ),
    Fault(
        "a step without a token to train is taken",
        "meshrl/loops/train_step.py::update",
        "continue => pass",
        "tests/e2e/test_own_algorithm_run.py::test_steps_with_only_truncated_answers_do_not_change_the_model",
    ),
    Fault(
        "a probe asks only for the first token, in which no cache has a part",
        "meshrl/loops/sync_and_probe.py::_probe",
        "PROBED_TOKENS => 1",
        _PROBE + "test_a_probe_is_a_request_of_the_run_and_urgent",
    ),
    Fault(
        "a run whose engine refuses every answer ends as a success",
        "meshrl/loops/train_step.py::train_step",
        "job.num_refused_steps == _MAX_REFUSED_STEPS => False",
        "tests/unit/loops/test_refused_answers.py::test_three_steps_without_an_answer_end_the_run_with_the_reason",
    ),
    Fault(
        "no probe after a sync",
        "meshrl/loops/sync_and_probe.py::_start_probe",
        "job.probed is not None => False",
        _LOOPS + "test_a_sampler_with_old_weights_is_caught_within_its_step",
    ),
    Fault(
        "the probe has the contexts of one group",
        "meshrl/loops/sync_and_probe.py::contexts_to_probe",
        "NUM_PROBES // 2 => 1",
        _PROBE + "test_the_shortest_contexts_of_different_groups_are_probed",
    ),
    Fault(
        "requests continue with keys and values of the old weights",
        "meshrl/rollout/embedded/engine.py::EmbeddedEngine.step",
        "self._cached_version != self._state.version => False",
        _STALE + "[keys_and_values-fully_async]",
    ),
    Fault(
        "a probe waits for the answers of a busy sampler",
        "meshrl/rollout/embedded/scheduler.py::Scheduler.admit",
        "self.waiting[0].request.is_urgent => False",
        "tests/unit/rollout/test_embedded_generation.py::"
        "test_an_urgent_request_waits_for_no_other_and_the_others_keep_their_rows",
    ),
    Fault(
        "a probe that compares nothing counts as a proof",
        "meshrl/loops/sync_and_probe.py::_probe",
        "not turns or num_compared < len(turns) => False",
        _PROBE + "test_a_probe_that_compares_nothing_is_an_error",
    ),
    Fault(
        "a sync that changes no element reports no fraction",
        "meshrl/loops/sync_and_probe.py::_changes",
        "ack.num_changed_elements is not None => ack.num_changed_elements",
        _STEP_METRICS + "test_a_sync_that_changes_nothing_is_reported_as_zero_and_an_unknown_number_is_not_reported"
        "[counts3-expected3]",
    ),
    Fault(
        "a step whose messages are not JSON is repeated after a resume",
        "meshrl/loops/finish_step.py::finish_step",
        "job.step += 1 => job.step += error is None",
        _STEP_METRICS + "test_a_step_whose_messages_are_not_json_is_counted_before_the_error",
    ),
    Fault(
        "samplers do not release their memory",
        "meshrl/loops/train_step.py::train_step",
        "job.rollouts.releases_memory => False",
        "tests/e2e/test_release_memory.py::test_the_memory_is_free_while_the_gradient_is_computed",
    ),
    Fault(
        "the optimizer steps before the sampler's proof",
        "meshrl/loops/train_step.py::update",
        "metrics += report.metrics => metrics += report.metrics; await job.trainer.optim_step('policy', 1e-6)",
        "tests/contract/test_executors.py::test_a_sampler_that_kept_its_old_weights_is_caught_within_the_step",
    ),
    Fault(
        "a resumed run begins the schedule of the learning rate again",
        "meshrl/loops/train_step.py::update",
        "job.step * cfg.train.updates_per_step => 0",
        "tests/e2e/test_changes_at_resume.py::"
        "test_after_a_resume_a_day_later_with_other_updates_date_and_learning_rate_are_those_of_the_step[linear-1]",
    ),
]
