"""Faults of a run's folder: its lease, what a resume moves aside, and when training states are saved."""

from __future__ import annotations

from fault import Fault

_RECORD = "tests/unit/run/test_run_folder.py::"
_SIGNALS = "tests/unit/run/test_signals.py::"
_STATUS = "tests/unit/tools/test_run_status.py::"

FOLDER_FAULTS = [
    Fault(
        "two runs write into one folder",
        "meshrl/run/lease.py",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        (_RECORD + "test_two_runs_of_one_process_do_not_share_a_folder",),
    ),
    Fault(
        "the lease ends when the run is ready",
        "meshrl/run/lease.py",
        "            else:\n                return True",
        "            else:\n                self.release()\n                return True",
        (_STATUS + "test_another_user_can_neither_hold_the_lease_nor_see_it",),
    ),
    Fault(
        "every user may hold the lease",
        "meshrl/run/lease.py",
        "os.O_RDWR | os.O_CREAT, 0o600",
        "os.O_RDWR | os.O_CREAT, 0o644",
        (_STATUS + "test_another_user_can_neither_hold_the_lease_nor_see_it",),
    ),
    Fault(
        "a requeued job does not wait for the end of the earlier one",
        "meshrl/run/lease.py",
        "    while is_leased(folder):",
        "    while False:",
        (_RECORD + "test_a_start_with_resume_auto_waits_for_the_end_of_the_run_before_it",),
    ),
    Fault(
        "`meshrl stop` signals a process that does not hold the lease",
        "meshrl/tools/status.py",
        "if not holds_lease(status.pid, folder):",
        "if False:",
        (_STATUS + "test_a_process_that_does_not_hold_the_lease_gets_no_signal",),
    ),
    Fault(
        "a run that starts at step 0 keeps the files of the earlier run",
        "meshrl/run/folder.py",
        "        moved += [path for name in _OF_A_RUN if (path := folder / name).exists() and not _is_empty(path)]",
        "        pass",
        (_RECORD + "test_nothing_of_an_earlier_run_is_lost_under_resume_auto_without_a_checkpoint",),
    ),
    Fault(
        "the models of later steps are overwritten",
        "meshrl/run/folder.py",
        "for number, path in step_folders(checkpoints) if number > step]",
        "for number, path in step_folders(checkpoints) if number > 1 << 40]",
        (_RECORD + "test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside",),
    ),
    Fault(
        "a best score of steps that are repeated is kept",
        "meshrl/run/folder.py",
        "restore_best(folder, start.step, ",
        "restore_best(folder, 1 << 40, ",
        (_RECORD + "test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside",),
    ),
    Fault(
        "the metrics of repeated steps are lost",
        "meshrl/monitor/sinks.py",
        'first_step is not None and record["step"] >= first_step',
        'first_step is not None and record["step"] > first_step',
        (_RECORD + "test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside",),
    ),
    Fault(
        "a run that ends by an error saves nothing",
        "meshrl/run/restart.py",
        "        if has_begun:\n",
        "        if False:\n",
        (_RECORD + "test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved[reward]",),
    ),
    Fault(
        "an error of on_step leaves the step uncounted",
        "meshrl/run/live.py",
        "        self.sink_error = self.sink_error or error\n",
        "        if error:\n            raise error\n",
        (_RECORD + "test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved[on_step]",),
    ),
    Fault(
        "a state between two steps is saved after an error",
        "meshrl/run/signals.py",
        "self.trainer_is_valid &= not self._has_changed() or job.step > step",
        "pass",
        (_SIGNALS + "test_an_error_in_an_update_leaves_a_state_to_save_unless_it_is_between_two_steps[after it]",),
    ),
    Fault(
        "a run without evaluations never saves its training state",
        "meshrl/run/live.py",
        "is_due = (is_due or is_old) and not self.checkpoints.is_writing",
        "is_due = is_due and not self.checkpoints.is_writing",
        (_RECORD + "test_training_states_are_saved_at_evaluations_and_every_ten_minutes_by_default",),
    ),
    Fault(
        "no training state is saved at an evaluation",
        "meshrl/run/live.py",
        "steps = eval_every if every is None else every",
        "steps = every or 0",
        (_RECORD + "test_training_states_are_saved_at_evaluations_and_every_ten_minutes_by_default",),
    ),
    Fault(
        "a damaged newest checkpoint ends the resume",
        "meshrl/run/restart.py",
        "            if not (may_fall_back and chosen.is_of(run.folder)):",
        "            if True:",
        (_RECORD + "test_resume_auto_passes_over_damaged_checkpoints_with_a_note",),
    ),
    Fault(
        "a run without a checkpoint can't begin again",
        "meshrl/run/start.py",
        "                    cursor=task.train_prompts.state(),\n",
        "",
        (
            "tests/faults/test_trainers_restarted.py::"
            "test_lost_train_ranks_are_replaced_and_the_run_equals_an_undisturbed_one"
            "[colocated, dead before the first checkpoint]",
        ),
    ),
    Fault(
        "a resume by a relative path takes the run's own checkpoint for that of another run",
        "meshrl/run/folder.py",
        'self.folder.parent.parent.resolve() == (run / "checkpoints").resolve()',
        'self.folder.parent.parent == run / "checkpoints"',
        (_RECORD + "test_the_own_checkpoint_of_a_run_may_be_given_by_a_relative_path",),
    ),
    Fault(
        "a signal replaces the error that ends a run",
        "meshrl/run/restart.py",
        "            assert task is not None\n            task.uncancel()",
        "            raise",
        (_RECORD + "test_a_signal_after_an_error_ends_the_run_with_the_error_and_a_saved_step",),
    ),
    Fault(
        "a best model whose export was interrupted is never written",
        "meshrl/loops/evaluate.py",
        "    if done and job.cfg.loop.save_best:",
        "    if False:",
        (
            "tests/unit/run/test_run_record.py::"
            "test_a_best_model_whose_export_was_interrupted_is_written_after_the_resume",
        ),
    ),
    Fault(
        "`meshrl stop` waits for the next run in the folder",
        "meshrl/tools/status.py",
        "    while holds_lease(status.pid, folder):",
        "    while is_running(folder, status):",
        (_STATUS + "test_stop_does_not_wait_for_a_run_that_takes_the_folder_over",),
    ),
]
