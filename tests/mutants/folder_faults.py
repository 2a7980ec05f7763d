"""Faults of a run's folder: its lease, what a resume moves aside, and when training states are saved."""

from __future__ import annotations

from fault import Fault

_RECORD = "tests/unit/run/test_run_record.py::"
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
        "            if path.name not in stay and not path.name.startswith(EARLIER) and not _is_empty(path):",
        "            if False:",
        (_RECORD + "test_nothing_of_an_earlier_run_is_lost_under_resume_auto_without_a_checkpoint",),
    ),
    Fault(
        "the models of later steps are overwritten",
        "meshrl/run/folder.py",
        "            if number > start.step:",
        "            if False:",
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
        'is_later = "units" not in record and record["step"] >= first_step',
        'is_later = "units" not in record and record["step"] > first_step',
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
        "            if not (may_fall_back and is_own):",
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
]
