"""Faults of loops, agents and restarts at limits: empty comparisons, mixed versions, several failures, null."""

from __future__ import annotations

from fault import Fault

_LOOPS = "tests/unit/loops/"
_RUN = "tests/unit/run/"
_AGENT = "tests/unit/agent/"

LOOP_FAULTS = [
    Fault(
        "a step whose shortest row is long has no row to probe",
        "meshrl/loops/step.py",
        " if end <= _PROBED_TOKENS or s is rows[0]]",
        " if end <= _PROBED_TOKENS]",
        (_LOOPS + "test_probed_rows.py::test_the_shortest_rows_with_trained_tokens_are_picked",),
    ),
    Fault(
        "a probe that compares nothing counts as a proof",
        "meshrl/loops/step.py",
        "    if not answers or num_compared < len(answers):\n",
        "    if False:\n",
        (_LOOPS + "test_probed_rows.py::test_a_probe_that_compares_nothing_is_an_error",),
    ),
    Fault(
        "a group that is used again is as old as its newest token",
        "meshrl/loops/buffer.py",
        "min(_versions(again), default=version)",
        "max(_versions(again), default=version)",
        (
            _LOOPS + "test_resumed_groups.py::"
            "test_groups_that_can_not_all_be_trained_in_time_are_sampled_again[turns5-2]",
        ),
    ),
    Fault(
        "a group that is used again counts as a new one",
        "meshrl/loops/buffer.py",
        "            self.limits.start(prompt.ordinal, oldest)",
        "            self.limits.start(prompt.ordinal, version)",
        (_LOOPS + "test_resumed_groups.py::test_a_group_that_is_used_again_is_trained_before_newer_ones",),
    ),
    Fault(
        "the last error of several groups is raised",
        "meshrl/loops/buffer.py",
        "if self._failed is None and not _is_scored(task):",
        "if not _is_scored(task):",
        (_LOOPS + "test_buffer.py::test_the_first_error_of_several_groups_is_raised",),
    ),
    Fault(
        "the number of groups falls after a wait that ended with more than the step takes",
        "meshrl/loops/group_limits.py",
        "        if self._has_waited:\n            self._window",
        "        if self._has_waited and not num_left:\n            self._window",
        (
            _LOOPS + "test_buffer.py::"
            "test_the_number_of_groups_rises_after_a_wait_that_ended_with_more_groups_than_the_step_takes",
        ),
    ),
    Fault(
        "a resume with another sampler has the limit of the earlier one",
        "meshrl/loops/job.py",
        'for section in ("model", "rollout"))',
        'for section in ("model",))',
        (
            _LOOPS + "test_job_state.py::"
            "test_the_limit_of_the_proof_is_measured_again_when_model_or_sampler_changes[changes5-None]",
        ),
    ),
    Fault(
        "an evaluation accepts answers of old weights",
        "meshrl/loops/evaluate.py",
        "job.scorer, job.trainer.version)",
        "job.scorer, 0)",
        (_LOOPS + "test_evaluated_prompts.py::test_an_evaluation_asks_for_the_weights_of_the_trainer",),
    ),
    Fault(
        "an evaluation counts failed gradings as wrong answers",
        "meshrl/loops/evaluate.py",
        "    check_failures(cfg, scorer, trajectories)\n",
        "",
        (_LOOPS + "test_evaluated_prompts.py::test_an_evaluation_whose_grader_fails_ends_the_run",),
    ),
    Fault(
        "a sync that changes no element reports no fraction",
        "meshrl/loops/step.py",
        "    if ack.num_changed_elements is not None:",
        "    if ack.num_changed_elements:",
        (
            _LOOPS + "test_step_metrics.py::"
            "test_a_sync_that_changes_nothing_is_reported_as_zero_and_an_unknown_number_is_not_reported[counts3-expected3]",
        ),
    ),
    Fault(
        "a step whose messages are not JSON is repeated after a resume",
        "meshrl/loops/step.py",
        "    job.step += 1\n    job.cursor = cursor\n    if error is not None:\n        raise error",
        "    if error is not None:\n        raise error\n    job.step += 1\n    job.cursor = cursor",
        (_LOOPS + "test_step_metrics.py::test_a_step_whose_messages_are_not_json_is_counted_before_the_error",),
    ),
    Fault(
        "a negative coefficient of the entropy has no effect",
        "meshrl/algo/losses.py",
        "if cfg.entropy_coef != 0:",
        "if cfg.entropy_coef > 0:",
        ("tests/unit/algo/test_policy_losses.py::test_a_negative_entropy_coefficient_lowers_the_entropy",),
    ),
    Fault(
        "a run with the default save_every_steps is not restarted before its first checkpoint",
        "meshrl/run/restart.py",
        "start.folder is None and run.save_every_steps == 0:",
        "start.folder is None and not run.save_every_steps:",
        (_RUN + "test_next_start.py::test_a_run_without_a_checkpoint_begins_again_if_it_saves_states[null]",),
    ),
    Fault(
        "a run whose tracker can not be opened has no result",
        "meshrl/run/live.py",
        "    try:\n        if start is None:\n            run.continue_from(None)\n        yield run",
        "    if start is None:\n        run.continue_from(None)\n    try:\n        yield run",
        (_RUN + "test_run_record.py::test_a_run_whose_tracker_can_not_be_opened_reports_its_error",),
    ),
    Fault(
        "a rank that only trains builds a sampler",
        "meshrl/cluster/actors.py",
        "        if spec.samples and spec.rollout is not None:",
        "        if spec.rollout is not None:",
        ("tests/unit/cluster/test_lost_trainers.py::test_a_sampler_that_dies_while_it_is_idle_is_replaced_at_once",),
    ),
    Fault(
        "a tool gets True where its schema requires a number",
        "meshrl/agent/tools.py",
        "is_bool = isinstance(value, bool) and not {bool, object} & {*allowed}",
        "is_bool = False",
        (_AGENT + "test_argument_types.py::test_a_tool_gets_only_values_of_the_type_in_its_schema[number-boolean]",),
    ),
    Fault(
        "a tool whose schema lists several types ends the run",
        "meshrl/agent/tools.py",
        "kinds = [kinds] if isinstance(kinds, str) else kinds",
        "kinds = [kinds]",
        (_AGENT + "test_argument_types.py::test_a_schema_with_several_types_allows_values_of_each[integer]",),
    ),
    Fault(
        "the first context of an agent does not show its tools",
        "meshrl/agent/loop.py",
        "context, new = prompt_ids(prompt, ctx.tokenizer, self.tools), list[Message]()",
        "context, new = prompt_ids(prompt, ctx.tokenizer, []), list[Message]()",
        (_AGENT + "test_first_turns.py::test_the_first_context_of_an_agent_with_tools_shows_them",),
    ),
    Fault(
        "an argument that an agent needs may be missing in its config",
        "meshrl/agent/resolve.py",
        "inspect.signature(kind).bind(*(_PARAMETERS",
        "inspect.signature(kind).bind_partial(*(_PARAMETERS",
        (_AGENT + "test_first_turns.py::test_args_that_an_agent_needs_or_does_not_take_are_config_errors",),
    ),
    Fault(
        "an exception that followed from the death of another rank prevents a restart",
        "meshrl/cluster/processes.py",
        '        if culprit.kind == "raised":',
        '        if first.kind == "raised":',
        (
            "tests/unit/cluster/test_process_executor.py::"
            "test_an_exception_that_another_ranks_death_caused_is_not_reported_as_the_cause",
        ),
    ),
    Fault(
        "a run closes the connection to Ray that its caller has opened",
        "meshrl/cluster/ray.py",
        "        if self._joined:\n            ray.shutdown()",
        "        ray.shutdown()",
        ("tests/unit/cluster/test_ray_machines.py::test_a_run_leaves_the_cluster_only_if_it_has_joined_it_itself",),
    ),
]
