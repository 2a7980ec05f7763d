"""Faults outside the ranks, for docs/faults.md, each with the test that injects it."""

from __future__ import annotations

# By title: the fault, what the run does, and the test that injects it.
OTHER_FAULTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "The process of the run": (
        (
            "train ranks are lost before the first training state is saved",
            "new ranks begin at step 0; with `loop.save_every_steps: 0` the run ends, and the error names the key",
            "tests/faults/test_trainers_restarted.py::test_lost_train_ranks_are_replaced_and_the_run_equals_an_undisturbed_one",
        ),
        (
            "an exception of a reward, of `on_step` or of a metrics sink",
            "the run ends with the last finished step saved, exit code 1",
            "tests/unit/run/test_run_folder.py::test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved",
        ),
        (
            "the terminal is lost (SIGHUP to all processes of the run)",
            "checkpoint of the last finished step, exit code 129",
            "tests/e2e/test_stop_command.py::test_a_run_that_loses_its_terminal_ends_with_a_checkpoint",
        ),
        (
            "SIGTERM to torchrun in the middle of an update",
            "checkpoint of the last finished step, from which `run.resume=auto` continues",
            "tests/e2e/test_stop_command.py::test_a_sigterm_to_torchrun_in_an_update_ends_the_run_with_a_checkpoint",
        ),
        (
            "Slurm's signal before the time limit",
            "checkpoint of the last finished step, from which the same batch file continues",
            "tests/unit/cluster/test_slurm.py::test_the_batch_file_runs_ends_with_a_checkpoint_at_slurms_signal_and_continues",
        ),
        (
            "a signal while the last state is written",
            "the state is completed first, and the run ends with the signal's exit code",
            "tests/unit/run/test_last_save.py::test_a_signal_during_the_last_save_does_not_lose_it",
        ),
    ),
    "The folder of the run": (
        (
            "two starts in one folder at once",
            "the second ends with a line that names the holder; with `run.resume=auto` it waits up to a minute first",
            "tests/unit/run/test_run_folder.py::test_the_folder_of_a_live_run_is_refused_and_stays_as_it_is",
        ),
        (
            "`run.resume=auto` in a folder without a checkpoint",
            "the run starts at step 0, states this, and moves what was there to `earlier_1`",
            "tests/unit/run/test_run_folder.py::test_nothing_of_an_earlier_run_is_lost_under_resume_auto_without_a_checkpoint",
        ),
        (
            "a resume after steps that were not saved",
            "their metrics, rollouts and models move to `earlier_1`, and the steps are repeated",
            "tests/unit/run/test_run_folder.py::test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside",
        ),
        (
            "the newest checkpoint is damaged",
            "`run.resume=auto` passes over it with a note, and continues from the next older one",
            "tests/unit/run/test_run_folder.py::test_resume_auto_passes_over_damaged_checkpoints_with_a_note",
        ),
        (
            "the clock is set during a run, or the run is in another container",
            "`meshrl status` shows that it runs; `meshrl stop` signals only a process that holds its lease",
            "tests/unit/tools/test_run_status.py::test_a_process_that_does_not_hold_the_lease_gets_no_signal",
        ),
        (
            "`run.folder` can't be created",
            "one line, exit code 1",
            "tests/unit/run/test_failed_outputs.py::test_a_run_folder_that_can_not_be_created_ends_the_run_with_one_line",
        ),
    ),
    "Outputs and disks": (
        (
            "the reader of stdout ends (`\\| head -1`), and `rollouts/` is removed",
            "the run ends with exit code 0 and all its data; the folder is created again",
            "tests/e2e/test_lost_outputs.py::test_a_run_continues_without_the_reader_of_its_output_and_without_its_rollouts",
        ),
        (
            "stdout and stderr on a full disk",
            "the run ends with exit code 0; failed writes are counted",
            "tests/e2e/test_lost_outputs.py::test_a_run_continues_when_its_output_goes_to_a_full_disk",
        ),
        (
            "stdin, stdout and stderr are closed",
            "the run starts its ranks and ends with exit code 0",
            "tests/e2e/test_lost_outputs.py::test_a_run_with_closed_standard_streams_starts_its_ranks_and_ends",
        ),
        (
            "writes to the terminal fail",
            "the run continues",
            "tests/unit/monitor/test_failed_writes.py::test_a_lost_terminal_ends_no_run",
        ),
        (
            "`rollouts/`, `status.json` or `report.html` can't be written",
            "the run continues, with one line when the output works again, and one at the end",
            "tests/unit/run/test_failed_outputs.py::test_a_run_goes_on_without_outputs_that_can_not_be_written_and_lists_them",
        ),
        (
            "the disk is full for TensorBoard",
            "the run continues; later steps are in a new event file",
            "tests/unit/monitor/test_trackers.py::test_failed_writes_of_tensorboard_are_counted_and_a_new_file_has_the_later_steps",
        ),
        (
            "the disk is full at the metrics",
            "the run ends with one line; `run.resume=auto` completes it",
            "tests/unit/run/test_failed_outputs.py::test_a_disk_filled_by_others_ends_the_run_with_one_line_and_a_resume_completes_it",
        ),
        (
            "`metrics.jsonl` is removed or replaced",
            "the run ends with one line",
            "tests/unit/run/test_failed_outputs.py::test_removed_metrics_end_the_run_with_one_line",
        ),
        (
            "`checkpoints/` can't be written",
            "the run ends with one line",
            "tests/unit/run/test_failed_outputs.py::test_checkpoints_that_can_not_be_written_end_the_run_with_one_line",
        ),
        (
            "`run_notes.txt` can't be written",
            "the run continues; the notes are written with the next one that succeeds",
            "tests/unit/monitor/test_notes_file.py::test_a_note_that_can_not_be_written_is_counted_and_written_with_the_next_one",
        ),
    ),
    "Shared memory": (
        (
            "`/dev/shm` is smaller than the samples of a step",
            "the run continues: they are sent over sockets",
            "tests/e2e/test_little_shared_memory.py::test_a_full_dev_shm_ends_no_process_by_a_signal",
        ),
        (
            "`/dev/shm` has no room for a weight sync",
            "the run ends before its first step, exit code 1; the error has the sizes, the key and the remedies",
            "tests/e2e/test_little_shared_memory.py::test_a_full_dev_shm_ends_no_process_by_a_signal",
        ),
        (
            "a rank is killed in a sync",
            "its shared memory is removed when its end is handled; no warning precedes the error",
            "tests/faults/test_named_faults.py::test_a_fault_in_a_rank_ends_the_run_and_is_named",
        ),
        (
            "the controller is killed",
            "the fork server ends the ranks, and removes their shared memory and temporary folders",
            "tests/unit/process/test_fork_server.py::test_temporary_resources_of_killed_processes_are_removed",
        ),
    ),
    "Numbers": (
        (
            "an update makes a weight NaN, infinite or too large for `model.dtype`, in any rank",
            "the run ends with the step, the tensor, the learning rate and the gradient norm; nothing is sent or saved",
            "tests/e2e/test_diverged_run.py::"
            "test_a_weight_that_is_not_finite_in_one_rank_ends_the_run_and_a_poisoned_state_is_refused",
        ),
        (
            "a moment or a parameter is not finite when a state is written",
            "the state is not committed, and the run ends with the name of the tensor",
            "tests/dist/test_not_finite.py::test_a_state_that_is_not_finite_is_not_written",
        ),
        (
            "a saved state has values that are not finite",
            "every rank refuses it before anything is changed; `run.resume=auto` continues from the next older state",
            "tests/dist/test_not_finite.py::"
            "test_a_state_that_is_not_finite_is_refused_by_every_rank_before_anything_is_changed",
        ),
        (
            "a model to export has a value that is not finite in its dtype",
            "it is not written",
            "tests/dist/test_not_finite.py::test_a_model_that_is_not_finite_in_its_dtype_is_not_written",
        ),
        (
            "`model.path` contains NaN or an infinity",
            "refused with file and tensor, exit code 2",
            "tests/e2e/test_diverged_run.py::test_a_model_that_is_not_finite_is_refused_at_the_start",
        ),
        (
            "a reward above 1e12 in size",
            "a failed grading (`bad_value`)",
            "tests/unit/reward/test_reward_sandbox.py::"
            "test_a_number_that_would_overflow_statistics_is_a_failure_with_the_limit",
        ),
        (
            "a reward function writes to its worker's socket",
            "the worker is replaced; the grading fails, and no other answer gets its reward",
            "tests/unit/reward/test_reward_sandbox.py::"
            "test_a_reply_that_user_code_writes_breaks_the_worker_and_is_no_reward",
        ),
        (
            "a sync leaves a stale copy of a weight in a sampler: prepacked, fused, tied, of an adapter or of experts",
            "the run ends before the next optimizer step (`SamplerMismatchError`, `SyncError`), under each schedule",
            "tests/faults/test_stale_copies.py::test_a_stale_copy_ends_the_run_before_the_next_update",
        ),
        (
            "the probe after a sync compares no token of a sampler's answer",
            "the run ends before the next optimizer step (`SamplerMismatchError`)",
            "tests/unit/loops/test_sync_probe.py::test_a_probe_that_compares_nothing_is_an_error",
        ),
    ),
    "Other users of the machine": (
        (
            "torchrun's store has an address that another process has written",
            "each other process ends with an error before it connects",
            "tests/unit/cluster/test_launched_by_torchrun.py::test_a_follower_does_not_connect_to_an_address_that_another_process_has_written",
        ),
        (
            "`run.folder` is not shared, or does not keep owners and permissions",
            "the process ends with an error that names `run.folder` and `MESHRL_TOKEN`",
            "tests/unit/process/test_run_token.py::test_a_file_that_another_process_could_have_made_or_read_is_refused",
        ),
        (
            "another user sends pickles to the controller",
            "they are not read; the run continues",
            "tests/e2e/test_open_ports.py::test_another_user_can_read_the_store_of_torchrun_but_can_not_run_code_in_the_run",
        ),
    ),
    "The start of a run": (
        (
            "more ranks on a machine than it has devices",
            "one line before any process starts, with the keys and both numbers, exit code 2",
            "tests/unit/cluster/test_local_devices.py::test_a_run_with_too_few_devices_ends_before_it_makes_its_folder",
        ),
        (
            "two keys of a config do not fit, and one has a stronger origin (command line, file, `base`)",
            "the weaker key is left out, with a note of the key, its origin and the reason",
            "tests/unit/config/test_config_precedence.py::test_what_the_command_line_makes_void_in_the_file_goes_with_a_note",
        ),
        (
            "a config, or a section of one, of verl, TRL or prime-rl",
            "refused; each key gets the key of meshrl, or what to do instead",
            "tests/unit/config/test_other_frameworks.py::test_each_key_of_a_section_of_another_framework_is_answered_with_its_line",
        ),
        (
            "a reward function takes the lists of a batch, as in TRL",
            "refused; the error states the call and a wrapper",
            "tests/unit/reward/test_reward_kinds.py::test_an_error_about_a_signature_states_the_call",
        ),
        (
            "a model that meshrl does not compute as Transformers does",
            "refused with the reason, such as attention code of its own",
            "tests/contract/test_model_families.py::test_a_family_has_exactly_what_its_entry_states",
        ),
        (
            "the chat template does not show the agent's tools",
            "refused before any process starts",
            "tests/unit/run/test_tools_in_template.py::test_the_error_names_the_template_and_the_tools",
        ),
    ),
    "Agents and tools": (
        (
            "a tool raises an exception",
            "the model gets it as an answer of one line; counted in `rollout/tool_errors`",
            "tests/unit/agent/test_agent_tools.py::test_an_exception_of_a_tool_is_an_answer_in_one_bounded_line",
        ),
        (
            "a tool never returns",
            "other attempts continue; the call ends with the deadline of its phase",
            "tests/unit/agent/test_agent_tools.py::test_a_tool_that_never_returns_does_not_delay_the_end_of_the_run",
        ),
        (
            "an agent raises an exception",
            "its attempt fails and is counted; above `agent.max_failure_fraction` the run ends with examples",
            "tests/e2e/test_python_api.py::test_an_exception_of_an_agent_fails_its_attempt_and_too_many_end_the_run",
        ),
        (
            "an agent catches an error of the engine",
            "the run ends with that error",
            "tests/unit/agent/test_attempt.py::test_errors_of_the_engine_end_the_run_whatever_the_agent_does_with_them",
        ),
        (
            "an agent or a tool calls `sys.exit()`, or waits for a task that was cancelled",
            "the attempt fails and is counted, or the model gets the error as an answer; the run continues",
            "tests/unit/agent/test_attempt.py::test_an_exit_and_an_inner_cancellation_of_an_agent_fail_its_sample",
        ),
        (
            "an agent returns the trajectory of another attempt",
            "the run ends with one line that names the agent",
            "tests/unit/agent/test_attempt.py::test_a_trajectory_of_another_attempt_is_refused",
        ),
    ),
    "Evaluations": (
        (
            "`meshrl eval` is interrupted",
            "the scored answers stay in its folder; its `result.json` has the status `interrupted`",
            "tests/unit/run/test_evaluation.py::test_an_interrupted_evaluation_has_the_answers_that_were_scored_before",
        ),
        (
            "`--model` is a folder without a model or a run",
            "one line, exit code 2",
            "tests/unit/run/test_eval_subject.py::test_a_folder_that_is_neither_a_model_nor_a_run_is_refused",
        ),
        (
            "`--out` exists",
            "one line, exit code 2; the folder stays as it is",
            "tests/unit/run/test_evaluation.py::test_an_existing_folder_is_refused",
        ),
        (
            "the disk is full while answers are appended",
            "the incomplete line is removed; later answers are complete",
            "tests/unit/monitor/test_rollout_log.py::test_what_a_full_disk_leaves_of_appended_lines_is_removed",
        ),
    ),
    "Pages, lists and traces": (
        (
            "a run's folder is damaged, foreign or of a killed run",
            "`meshrl runs` lists the others, and a line states what can't be read",
            "tests/unit/tools/test_runs_list.py::test_damaged_and_foreign_folders_and_evaluations_of_runs_do_not_stop_the_list",
        ),
        (
            "a file of rollouts is damaged in the middle",
            "`meshrl view` prints the answers before the damage, and names file and line",
            "tests/unit/tools/test_rollouts_in_terminal.py::test_the_lines_before_a_damaged_one_are_shown",
        ),
        (
            "the reader of `meshrl view`'s output ends early (`head`)",
            "the command ends normally",
            "tests/unit/tools/test_rollouts_in_terminal.py::test_the_reader_of_a_pipe_may_end_early",
        ),
        (
            "the name of a run is misspelled",
            "refused at once, with the most similar runs",
            "tests/unit/tools/test_runs_list.py::test_a_run_in_python_shows_its_state_and_refuses_a_missing_folder",
        ),
        (
            "values of tokens can't be written",
            "counted as a failed write of rollouts; the run continues, and no values of an earlier run stay",
            "tests/unit/monitor/test_token_log.py::test_a_failed_write_leaves_no_values_of_an_earlier_run",
        ),
        (
            "values of tokens or a line of the rollouts are damaged or missing",
            "`meshrl view` shows what can be read and states what is missing",
            "tests/unit/tools/test_view_page.py::test_what_can_be_read_of_a_damaged_folder_is_shown",
        ),
        (
            "the folder of traces can't be written",
            "counted as failed writes; the run continues",
            "tests/unit/run/test_tracing.py::test_files_that_cant_be_written_are_counted_and_end_no_run",
        ),
        (
            "a rank is lost before traces are written",
            "the files of the others are written",
            "tests/unit/run/test_tracing.py::test_a_lost_rank_is_left_out",
        ),
        (
            "train ranks restart and repeat steps",
            "each step is in the trace once",
            "tests/unit/run/test_tracing.py::test_a_step_that_is_repeated_after_a_restart_is_there_once",
        ),
        (
            "a trace is truncated or damaged",
            "an error or a note names the file, and the rest is shown",
            "tests/unit/monitor/test_trace.py::test_a_damaged_file_is_named",
        ),
        (
            "a reward function prints a GB",
            "all of it is read, at most 64 KiB a second is logged, and the answer is graded",
            "tests/unit/reward/test_reward_sandbox.py::test_a_grader_that_prints_thirty_megabytes_is_graded_and_logged_in_part",
        ),
        (
            "result.json, best.json, run_notes.txt or the rollouts of an evaluation are damaged",
            "the report names the file and shows the rest",
            "tests/unit/tools/test_report_judgement.py::test_a_damaged_file_is_named_and_the_rest_is_shown",
        ),
        (
            "`--attention` names an answer that does not exist, or the run has no model any more",
            "refused, with the answers that exist, or with `model.path`",
            "tests/unit/tools/test_attention_page.py::test_an_answer_that_does_not_exist_is_refused_with_those_that_do",
        ),
        (
            "the peak speed of the device is unknown",
            "no `perf/mfu`, and one note",
            "tests/unit/loops/test_step_speed.py::test_an_unknown_device_is_noted_at_the_first_step_only",
        ),
        (
            "a trace's end, the trace of a rank or `traces/controller.json` is missing",
            "`meshrl diagnose` shows the rest, with a note for each",
            "tests/unit/tools/test_trace_files.py::test_a_run_without_a_ranks_file_shows_the_other_ranks",
        ),
        (
            "a run without traces is diagnosed",
            "one line that names `monitor.trace_steps`, exit code 1",
            "tests/unit/tools/test_trace_files.py::test_a_folder_that_has_no_traces",
        ),
    ),
}
