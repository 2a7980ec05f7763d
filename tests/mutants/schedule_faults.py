"""Faults of the overlapping schedules."""

from __future__ import annotations

from fault import Fault
from loop_faults import LOOP_FAULTS
from see_faults import SEE_FAULTS

_LOOPS = "tests/contract/test_loops.py::"
_OLD = _LOOPS + "test_each_prompt_is_trained_once_and_no_sample_is_too_old"
_STALE = _LOOPS + "test_a_sampler_with_old_weights_is_caught_within_its_step"
_FAULTS = "tests/faults/test_schedules.py::"
_RECORD = "tests/unit/run/test_run_record.py::"

SCHEDULE_FAULTS = [
    Fault(
        "groups are started without a limit of staleness",
        "meshrl/loops/group_limits.py",
        "limit = min(self._step + self._staleness + 1, self._num_steps)",
        "limit = min(self._step + self._staleness + 2, self._num_steps)",
        ("tests/unit/loops/test_buffer.py::test_in_any_order_no_group_is_too_old_and_none_is_lost",),
    ),
    Fault(
        "a step does not wait for groups that become too old",
        "meshrl/loops/group_limits.py",
        "            if position > num_steps * self._per_step + self._spare:\n",
        "            if False:\n",
        ("tests/unit/loops/test_buffer.py::test_a_slow_group_is_waited_for_before_it_is_too_old",),
    ),
    Fault(
        "a step lets more groups age than later steps can train",
        "meshrl/loops/group_limits.py",
        "if position > num_steps * self._per_step + self._spare:",
        "if num_steps == 0 and position > self._spare:",
        ("tests/unit/loops/test_buffer.py::test_in_any_order_no_group_is_too_old_and_none_is_lost",),
    ),
    Fault(
        "a step takes the newest groups",
        "meshrl/loops/group_limits.py",
        "by_age = sorted(self.versions, key=self.versions.__getitem__)",
        "by_age = sorted(self.versions, reverse=True)",
        ("tests/unit/loops/test_buffer.py::test_the_oldest_groups_are_trained_first",),
    ),
    Fault(
        "samplers that have finished are idle until the trainer has finished",
        "meshrl/loops/buffer.py",
        "        self.fill()  # if no request runs",
        "        # if no request runs",
        ("tests/unit/loops/test_buffer.py::test_samplers_work_while_the_trainer_trains",),
    ),
    Fault(
        "a resumed run forgets which later groups were trained",
        "meshrl/loops/buffer.py",
        '        return {**state, "finished": sorted(self._finished)}',
        '        return {**state, "finished": []}',
        ("tests/unit/loops/test_resumed_groups.py::test_a_run_continues_with_the_groups_that_are_not_trained",),
    ),
    Fault(
        "a run that returned to a checkpoint trains groups of weights that it has lost",
        "meshrl/loops/buffer.py",
        "return max(_versions(group), default=0) <= job.trainer.version",
        "return True",
        ("tests/unit/loops/test_resumed_groups.py::test_groups_of_lost_weights_are_sampled_again",),
    ),
    Fault(
        "scored groups are used again although they can not all be trained in time",
        "meshrl/loops/buffer.py",
        "if again is not None and self.limits.is_in_time(oldest, version):",
        "if again is not None:",
        ("tests/unit/loops/test_resumed_groups.py::test_groups_that_can_not_all_be_trained_in_time_are_sampled_again",),
    ),
    Fault(
        "with staleness 0 spare groups start while the trainer trains",
        "meshrl/loops/group_limits.py",
        "if self._staleness == 0 and self._has_taken:",
        "if False:",
        ("tests/unit/loops/test_buffer.py::test_with_staleness_0_no_group_starts_while_the_trainer_trains",),
    ),
    Fault(
        "a run that continues as another schedule trains prompts twice",
        "meshrl/loops/job.py",
        "prompts += [prompt for prompt in found if prompt.ordinal not in finished]",
        "prompts += found",
        ("tests/unit/loops/test_resumed_groups.py::test_another_schedule_leaves_out_prompts_that_were_trained",),
    ),
    Fault(
        "a probe compares the rows of a later step",
        "meshrl/loops/step.py",
        "    for row, logprobs, of_samplers in zip(rows, ours,",
        "    for row, logprobs, of_samplers in zip(job.probed, ours,",
        (
            "tests/unit/loops/test_probed_rows.py::test_a_probe_compares_its_own_rows_when_a_later_step_has_chosen_others",
        ),
    ),
    Fault(
        "a run whose engine refuses every answer ends as a success",
        "meshrl/loops/step.py",
        "    if job.num_refused_steps == _MAX_REFUSED_STEPS:\n",
        "    if False:\n",
        ("tests/unit/loops/test_refused_answers.py::test_three_steps_without_an_answer_end_the_run_with_the_reason",),
    ),
    Fault(
        "a resume with another dtype has the limit of the earlier one",
        "meshrl/loops/job.py",
        'saved["proof_threshold"] if is_same else None',
        'saved["proof_threshold"]',
        (_RECORD + "test_a_resumed_run_has_no_result_before_it_ends_and_may_change_its_dtype",),
    ),
    Fault(
        "a resumed run keeps the result of its earlier part",
        "meshrl/run/live.py",
        '            (self.folder / "result.json").unlink(missing_ok=True)',
        "            ",
        (_RECORD + "test_a_resumed_run_has_no_result_before_it_ends_and_may_change_its_dtype",),
    ),
    Fault(
        "a continued turn of an endpoint repeats its random numbers",
        "meshrl/rollout/completions.py",
        '"seed": continuation_seed(request),',
        '"seed": request.seed,',
        ("tests/contract/test_rollout_engines.py::test_abort_and_continuation_make_one_turn[endpoint]",),
    ),
    Fault(
        "a one-step-off run resumes after the batch that was sampled ahead",
        "meshrl/loops/one_step_off.py",
        "    prompts, cursor = job.next_prompts()\n",
        "    prompts, cursor = job.next_prompts()\n"
        "    cursor = {**job.feed.state(), 'next_ordinal': job.feed.state()['next_ordinal'] + len(prompts)}\n",
        (_LOOPS + "test_a_run_that_ended_early_continues_with_the_next_prompts",),
    ),
    Fault(
        "a replaced sampler waits for a sync that waits for its answers",
        "meshrl/cluster/groups.py",
        "        self.needs_sync.set()\n",
        "",
        (_FAULTS + "test_the_run_continues_and_trains_each_prompt_once",),
    ),
    Fault(
        "no probe after a sync",
        "meshrl/loops/step.py",
        "    if job.probed is not None:\n",
        "    if False:\n",
        (_STALE,),
    ),
    Fault(
        "the logprobs of older weights are compared with the trainer's",
        "meshrl/algo/mismatch.py",
        "checked = sample.mask & (sample.versions == version)",
        "checked = sample.mask",
        (_OLD, "tests/unit/algo/test_sampler_mismatch.py::test_tokens_of_other_versions_are_not_compared"),
    ),
    Fault(
        "the proof takes one mean over all samplers",
        "meshrl/loops/proof.py",
        "means = {name: _mean(rows[names == name]) for name in dict.fromkeys(engines)}",
        "means = {engines[-1]: _mean(rows)}",
        ("tests/unit/loops/test_sampler_proof.py::test_one_stale_engine_among_many_is_named",),
    ),
    *LOOP_FAULTS,
    *SEE_FAULTS,
]
