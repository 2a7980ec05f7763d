"""Faults around a run's loop: lost ranks, resume, end of a run, other machines."""

from __future__ import annotations

from fault import Fault
from folder_faults import FOLDER_FAULTS
from python_faults import PYTHON_FAULTS
from rank_faults import RANK_FAULTS

_LOST = "tests/unit/cluster/test_lost_trainers.py::"
_SELF_TEST = "tests/unit/reward/test_self_test.py::"
_TRIAL = "tests/unit/run/test_reward_trial.py::"

RUN_FAULTS = [
    Fault(
        "the self-test accepts equal scores for right and wrong answers",
        "meshrl/reward/self_test.py",
        "if not right > wrong:",
        "if right < wrong:",
        (_SELF_TEST + "test_a_math_verify_that_calls_all_answers_equal_or_unequal_ends_the_run[True]",),
    ),
    Fault(
        "the self-test does not use the term's rule",
        "meshrl/reward/self_test.py",
        'rule = term.args.get("rule", "auto")',
        'rule = "gsm8k"',
        (_SELF_TEST + "test_built_in_kinds_pass_with_all_their_rules_without_a_note",),
    ),
    Fault(
        "a reward function that requires a format ends the run in the self-test",
        "meshrl/reward/self_test.py",
        ' and "NoneType" not in message',
        "",
        (_SELF_TEST + "test_functions_that_raise_without_a_required_form_do_not_end_the_run[boxed-NoneType]",),
    ),
    Fault(
        "functions are not tried where no row has an answer",
        "meshrl/reward/self_test.py",
        "without_answers = bool(prompts) and all(prompt.answer is None for prompt in prompts)",
        "without_answers = False",
        (_SELF_TEST + "test_functions_that_grade_alike_without_any_answer_get_a_note_each",),
    ),
    Fault(
        "the rows of the reward trial are not used for training",
        "meshrl/run/task.py",
        "    feed.load_state(position)\n",
        "",
        (_TRIAL + "test_the_rows_that_a_function_was_tried_on_are_drawn_again",),
    ),
    Fault(
        "after an evaluation there is no note about a run without a learning signal",
        "meshrl/loops/step_notes.py",
        ' if "reward/groups_without_signal" in line.metrics]',
        "]",
        (_TRIAL + "test_a_run_whose_rewards_are_all_alike_gets_a_note_after_the_first_such_step_and_at_its_end",),
    ),
    Fault(
        "the config check leaves out a user's reward functions",
        "meshrl/reward/check.py",
        "not (term.kind in REWARDS or is_path)",
        "term.kind not in REWARDS",
        (
            "tests/unit/reward/test_reward_check.py::"
            "test_reward_functions_that_can_not_be_called_are_refused_with_key_and_origin",
        ),
    ),
    Fault(
        "the rewards of a user-defined agent are tried on answers without the agent",
        "meshrl/run/task.py",
        "if cfg.agent.kind in AGENTS:",
        "if cfg.agent.kind:",
        (_TRIAL + "test_the_rewards_of_a_users_agent_are_not_tried_on_bare_answers",),
    ),
    Fault(
        "a reward that needs an answer is accepted without an answer column",
        "meshrl/config/data.py",
        "if not terms or data.answer is not None:",
        "if terms or data.answer is not None:",
        (
            "tests/unit/data/test_data_config.py::"
            "test_a_reward_that_compares_with_the_answer_is_refused_where_no_column_has_one",
        ),
    ),
    Fault(
        "rows without an answer are accepted for a reward that needs one",
        "meshrl/run/task.py",
        "if term.kind in NEEDS_ANSWER]",
        "if term.kind is None]",
        (_TRIAL + "test_a_map_that_returns_no_answer_is_refused_under_a_reward_that_needs_one",),
    ),
    Fault(
        "samplers are restarted together with the train ranks",
        "meshrl/cluster/processes.py",
        "lost = self._partners(culprit.rank)",
        "lost = [*self._ranks.values()]",
        (_LOST + "test_a_train_rank_that_dies_while_it_is_idle_ends_the_wait_and_is_replaced",),
    ),
    Fault(
        "samplers continue requests from before a restart of the train ranks",
        "meshrl/cluster/launch.py",
        "            await self.rollouts.invalidate()\n",
        "            pass\n",
        (_LOST + "test_a_train_rank_that_dies_while_it_is_idle_ends_the_wait_and_is_replaced",),
    ),
    Fault(
        "samplers refuse a lower version after a restart of the train ranks",
        "meshrl/cluster/launch.py",
        "            await self.rollouts.reconcile(layout)\n",
        "            pass\n",
        (_LOST + "test_after_a_sync_that_a_lost_rank_interrupted_the_next_full_sync_makes_samplers_usable",),
    ),
    Fault(
        "a new sampler gets new weights under the old version",
        "meshrl/cluster/groups.py",
        "        self.is_synced = False\n        self.num_optim_steps += 1",
        "        self.num_optim_steps += 1",
        (_LOST + "test_a_new_sampler_waits_for_the_sync_while_the_trainer_is_between_two_versions",),
    ),
    Fault(
        "an exception in a sampler is announced as a replacement",
        "meshrl/cluster/groups.py",
        'return failure.kind != "raised" and not self',
        "return not self",
        (_LOST + "test_an_exception_in_a_sampler_ends_the_run_and_nothing_is_replaced",),
    ),
    Fault(
        "samplers are replaced without a limit",
        "meshrl/cluster/groups.py",
        "if self.num_restarts >= self.max_restarts:",
        "if self.num_restarts > self.max_restarts + 9:",
        (_LOST + "test_a_sampler_that_dies_while_it_is_idle_is_replaced_at_once",),
    ),
    Fault(
        "an incomplete update is saved as a step",
        "meshrl/run/signals.py",
        "            self.trainer_is_valid = False\n",
        "",
        ("tests/unit/run/test_signals.py::test_ctrl_c_waits_for_a_long_update_only_for_a_limited_time",),
    ),
    Fault(
        "a signal does not interrupt the computation of a gradient",
        "meshrl/run/signals.py",
        "lambda: job.trainer.num_optim_steps > optim_steps",
        "lambda: job.trainer.num_optim_steps >= optim_steps",
        ("tests/unit/run/test_signals.py::test_an_update_that_has_not_changed_the_weights_ends_at_once",),
    ),
    Fault(
        "a resume truncates files before its checks are done",
        "meshrl/run/live.py",
        "        if start is None:\n            run.continue_from(None)",
        "        run.continue_from(start)",
        ("tests/e2e/test_resume.py::test_a_resume_that_is_refused_changes_nothing",),
    ),
    Fault(
        "a debugger or profiler hangs a run on Python 3.11",
        "meshrl/data/time_limit.py",
        "_deadlines.pop(thread, None)",
        "_deadlines.pop(thread, None), ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)",
        ("tests/e2e/test_debugger.py::test_an_inline_run_under_a_profiler_and_under_a_debugger_ends_as_without",),
    ),
    Fault(
        "several ranks get one device",
        "meshrl/cluster/devices.py",
        "if len(users) <= devices or (",
        "if devices > 0 or (",
        (
            "tests/unit/cluster/test_local_devices.py::test_several_ranks_on_one_device_are_refused",
            "tests/unit/cluster/test_local_devices.py::"
            "test_a_run_with_too_few_devices_ends_before_it_makes_its_folder[None]",
        ),
    ),
    Fault(
        "a rank of the second machine uses its global rank as device index",
        "meshrl/cluster/remote.py",
        "str(spec.local_rank)",
        "str(spec.rank)",
        (
            "tests/unit/cluster/test_remote_executor.py::"
            "test_a_rank_has_its_environment_and_a_sampler_that_died_is_replaced_by_its_node_agent",
        ),
    ),
    Fault(
        "every process that connects is accepted as a rank",
        "meshrl/process/connect.py",
        'if not hmac.compare_digest(proof, _prove(self._token, b"rank", nonce + theirs)):',
        "if False:",
        ("tests/unit/process/test_connect.py::test_a_pickle_from_a_process_without_the_token_is_not_read",),
    ),
    Fault(
        "a single process under torchrun waits for other ranks",
        "meshrl/cluster/torchrun.py",
        ' and int(os.environ["WORLD_SIZE"]) > 1',
        "",
        (
            "tests/unit/cluster/test_launched_by_torchrun.py::"
            "test_rank_0_of_several_is_the_controller_and_the_others_follow",
        ),
    ),
    Fault(
        "an accelerator without a torch.distributed backend is used",
        "meshrl/core/device.py",
        'return found if found in _BACKENDS else "cpu"',
        "return found",
        ("tests/unit/core/test_device.py::test_an_accelerator_is_used_where_ranks_can_communicate_on_it[mps-cpu]",),
    ),
    Fault(
        "there is no notice that separate sampler ranks wait for the trainer",
        "meshrl/config/check.py",
        "        found.append(turns)\n",
        "        pass\n",
        (
            "tests/unit/config/test_config_explain.py::"
            "test_explain_notes_that_train_and_sampler_ranks_wait_for_each_other",
        ),
    ),
    Fault(
        "a log gets no line while one percent of the steps takes hours",
        "meshrl/monitor/sinks.py",
        " and now - self._printed_at < _PRINT_EVERY_S",
        "",
        ("tests/unit/monitor/test_sinks.py::test_a_pipe_gets_a_line_at_least_every_ten_seconds",),
    ),
    *RANK_FAULTS,
    *PYTHON_FAULTS,
    *FOLDER_FAULTS,
]
