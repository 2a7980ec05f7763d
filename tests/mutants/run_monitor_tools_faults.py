"""Faults of a run's folder, checkpoints, resume, verdicts and reported figures."""

from __future__ import annotations

from fault import Fault

_PYTHON_API = "tests/e2e/test_python_api.py::"
_TRAINERS_RESTARTED = "tests/faults/test_trainers_restarted.py::"
_RECORDER = "tests/unit/monitor/test_recorder.py::"
_REWARD_TRIAL = "tests/unit/run/test_reward_trial.py::"
_RUN_FOLDER = "tests/unit/run/test_run_folder.py::"
_SIGNALS = "tests/unit/run/test_signals.py::"
_TOKEN_VALUES = "tests/unit/run/test_token_values.py::"
_REPORT_JUDGEMENT = "tests/unit/tools/test_report_judgement.py::"
_MODEL_CHECK = "tests/unit/tools/test_model_check.py::"
_FAMILIES = "tests/contract/test_model_families.py::test_a_family_has_exactly_what_its_entry_states"
_STEP_TIME = "tests/unit/tools/test_step_time.py::"
_RUN_STATUS = "tests/unit/tools/test_run_status.py::"

_TRACKERS = "tests/unit/monitor/test_trackers.py::"
_CAUSES = "tests/unit/tools/test_causes.py::"

FAULTS = [
    Fault(
        "a run that continues does not know the tests of its earlier evaluations",
        "meshrl/monitor/sinks.py::JsonlSink.__init__",
        'self.curve_of(record.get("evaluation", {})) => pass',
        _TRACKERS + "test_scores_of_another_test_have_names_of_their_own",
    ),
    Fault(
        "an evaluation that repeats a step removes the step's other values from TensorBoard",
        "meshrl/monitor/trackers.py::TensorBoardSink.write",
        "max(step, self._first_step) => step",
        "tests/unit/run/test_run_record.py::"
        "test_a_resume_with_another_test_compares_no_scores_with_the_former_ones[data.eval_path=other.jsonl-rows-0.5]",
    ),
    Fault(
        "diagnose advises a value that the config has already",
        "meshrl/tools/diagnose/diagnosis.py::_is_followed",
        "bool(has) and all(has) => False",
        _CAUSES + "test_what_to_change_depends_on_the_config_of_the_run",
    ),
    Fault(
        "a process that has the id of a rank that ended counts as the rank",
        "meshrl/tools/runs.py::_processes",
        'found and process.name in ("controller", found[0].name) => found',
        _RUN_STATUS + "test_status_lists_the_processes_of_all_machines",
    ),
    Fault(
        "a run that starts at step 0 keeps the files of the earlier run",
        "meshrl/run/folder.py::set_aside",
        "moved += [path for name in _OF_A_RUN if (path := folder / name).exists() and not _is_empty(path)] => pass",
        _RUN_FOLDER + "test_nothing_of_an_earlier_run_is_lost_under_resume_auto_without_a_checkpoint",
    ),
    Fault(
        "the models of later steps are overwritten",
        "meshrl/run/folder.py::set_aside",
        "number > step => number > 1 << 40",
        _RUN_FOLDER + "test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside",
    ),
    Fault(
        "a best score of steps that are repeated is kept",
        "meshrl/run/folder.py::set_aside",
        "restore_best(folder, start.step) => restore_best(folder, 1 << 40)",
        _RUN_FOLDER + "test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside",
    ),
    Fault(
        "a resume by a relative path takes the run's own checkpoint for that of another run",
        "meshrl/run/folder.py::Start.is_of",
        'self.folder.parent.parent.resolve() == (run / "checkpoints").resolve()'
        ' => self.folder.parent.parent == run / "checkpoints"',
        _RUN_FOLDER + "test_the_own_checkpoint_of_a_run_may_be_given_by_a_relative_path",
    ),
    Fault(
        "an evaluation calls on_step as if it were a step",
        "meshrl/run/inputs.py::StepCallback.write",
        "return => pass",
        _PYTHON_API + "test_false_from_on_step_ends_the_run_as_after_its_last_step",
    ),
    Fault(
        "two runs write into one folder",
        "meshrl/run/folder.py::FolderLease.take",
        "fcntl.LOCK_EX => fcntl.LOCK_SH",
        _RUN_FOLDER + "test_two_runs_of_one_process_do_not_share_a_folder",
    ),
    Fault(
        "the lease ends when the run is ready",
        "meshrl/run/folder.py::FolderLease.take",
        "return True => self.release(); return True",
        _RUN_STATUS + "test_another_user_can_neither_hold_the_lease_nor_see_it",
    ),
    Fault(
        "every user may hold the lease",
        "meshrl/run/folder.py::FolderLease.take",
        "0o600 => 0o644",
        _RUN_STATUS + "test_another_user_can_neither_hold_the_lease_nor_see_it",
    ),
    Fault(
        "a requeued job does not wait for the end of the earlier one",
        "meshrl/run/folder.py::wait_for_folder",
        "await asyncio.sleep(_POLL_S) => return",
        _RUN_FOLDER + "test_a_start_with_resume_auto_waits_for_the_end_of_the_run_before_it",
    ),
    Fault(
        "a resumed run keeps the result of its earlier part",
        "meshrl/run/outputs.py::RunOutputs.continue_from",
        '("result.json", STOP_FILE) => (STOP_FILE,)',
        "tests/unit/run/test_run_record.py::test_a_resumed_run_has_no_result_before_it_ends_and_may_change_its_dtype",
    ),
    Fault(
        "a resume truncates files before its checks are done",
        "meshrl/run/outputs.py::live_run",
        "if start is None: out.continue_from(None) => run.continue_from(start)",
        "tests/e2e/test_resume.py::test_a_resume_that_is_refused_changes_nothing",
    ),
    Fault(
        "a run that on_step ends writes no model",
        "meshrl/run/keeper.py::Keeper.save_if_due",
        "job.is_over or every is not None => job.step == self.num_steps or every is not None",
        _PYTHON_API + "test_false_from_on_step_ends_the_run_as_after_its_last_step",
    ),
    Fault(
        "an error of on_step leaves the step uncounted",
        "meshrl/run/outputs.py::RunOutputs.report",
        "self._error = self._error or error => if error: raise error",
        _RUN_FOLDER + "test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved[on_step]",
    ),
    Fault(
        "a run without evaluations never saves its training state",
        "meshrl/run/keeper.py::Keeper.save_if_due",
        "is_due or is_old => is_due",
        _RUN_FOLDER + "test_training_states_are_saved_at_evaluations_and_every_ten_minutes_by_default",
    ),
    Fault(
        "no training state is saved at an evaluation",
        "meshrl/run/keeper.py::Keeper.save_if_due",
        "eval_every if every is None else every => every or 0",
        _RUN_FOLDER + "test_training_states_are_saved_at_evaluations_and_every_ten_minutes_by_default",
    ),
    Fault(
        "an exported model ends only at the first stop id of its run",
        "meshrl/data/chat.py::write_chat",
        "[first, *more] if more else first => first",
        "tests/unit/data/test_chat.py::test_the_files_of_a_written_model_have_exactly_the_stop_ids_of_its_run",
    ),
    Fault(
        "the files of a model are tried only when it is exported",
        "meshrl/run/assemble.py::_note_ready",
        "await keeper.try_export() => pass",
        "tests/e2e/test_template_and_stops.py::"
        "test_a_file_that_no_export_could_write_ends_the_run_before_its_first_step",
    ),
    Fault(
        "the share of the LoRA change is computed without the rounding",
        "meshrl/model/lora.py::RoundedChange.measured",
        "after.to(self.dtype).float().sub_(weight) => change",
        "tests/dist/test_lora.py::test_an_export_in_bf16_states_the_share_of_the_adapters_change_that_it_has",
    ),
    Fault(
        "a model is saved without the chat template of its training",
        "meshrl/run/keeper.py::Keeper._export",
        "write_chat(aside, self._chat) => write_chat(aside, ChatFiles())",
        "tests/e2e/test_template_and_stops.py::test_supervised_training_takes_the_same_keys_and_saves_the_template",
    ),
    Fault(
        "a run with the default save_every_steps is not restarted before its first checkpoint",
        "meshrl/run/restart.py::_next_start",
        "run.save_every_steps == 0 => not run.save_every_steps",
        "tests/unit/run/test_next_start.py::test_a_run_without_a_checkpoint_begins_again_if_it_saves_states[null]",
    ),
    Fault(
        "a run that ends by an error saves nothing",
        "meshrl/run/restart.py::run_to_end",
        "has_begun => False",
        _RUN_FOLDER + "test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved[reward]",
    ),
    Fault(
        "a damaged newest checkpoint ends the resume",
        "meshrl/run/restart.py::_restore",
        "not (may_fall_back and chosen.is_of(run.folder)) => True",
        _RUN_FOLDER + "test_resume_auto_passes_over_damaged_checkpoints_with_a_note",
    ),
    Fault(
        "a state between two steps is saved after an error",
        "meshrl/run/signals.py::Stop.updating",
        "self.trainer_is_valid &= not self._has_changed() or job.step > step => pass",
        _SIGNALS + "test_an_error_in_an_update_leaves_a_state_to_save_unless_it_is_between_two_steps[after it]",
    ),
    Fault(
        "a run without a checkpoint can't begin again",
        "meshrl/run/assemble.py::train",
        "task.train_prompts.state() => {}",
        _TRAINERS_RESTARTED + "test_lost_train_ranks_are_replaced_and_the_run_equals_an_undisturbed_one"
        "[colocated, dead before the first checkpoint]",
    ),
    Fault(
        "the rows of the reward trial are not used for training",
        "meshrl/run/task.py::_first_prompts",
        "feed.load_state(position) => pass",
        _REWARD_TRIAL + "test_the_rows_that_a_function_was_tried_on_are_drawn_again",
    ),
    Fault(
        "rows without an answer are accepted for a reward that needs one",
        "meshrl/run/task.py::load_task",
        "needs_answer(term.kind) => term.kind is None",
        _REWARD_TRIAL + "test_a_map_that_returns_no_answer_is_refused_under_a_reward_that_needs_one",
    ),
    Fault(
        "a score that fell within its interval is worse",
        "meshrl/run/verdict.py::outcome_of",
        "high < 0 => low < 0",
        "tests/unit/run/test_verdict.py::test_a_difference_within_the_interval_is_no_change",
    ),
    Fault(
        "exposed communication counts as computation",
        "meshrl/monitor/recorder.py::Recorder.step_metrics",
        "max(0, train_ns - exposed_ns) => train_ns",
        _RECORDER + "test_the_ratio_is_of_the_training_phases_and_counts_overlapping_collectives_once",
    ),
    Fault(
        "the metrics of repeated steps are lost",
        "meshrl/monitor/sinks.py::split_lines",
        'record["step"] >= first_step => record["step"] > first_step',
        _RUN_FOLDER + "test_what_a_killed_run_wrote_after_its_checkpoint_is_moved_aside",
    ),
    Fault(
        "a damaged status file makes `meshrl stop` signal all processes",
        "meshrl/monitor/status.py::read_status",
        "not 1 < status.pid < 1 << 31 => status.pid > 1 << 31",
        "tests/unit/tools/test_run_status.py::test_no_process_is_stopped_by_a_damaged_status",
    ),
    Fault(
        "the page shows the entropy of the next token",
        "meshrl/monitor/token_log.py::TrainerValues.by_turn",
        'columns["logprobs"], columns["entropies"] = scored'
        ' => columns["logprobs"], columns["entropies"] = scored[0], np.roll(scored[1], -1)',
        _TOKEN_VALUES + "test_the_logged_values_are_those_of_the_weights_before_the_step",
    ),
    Fault(
        "logprobs after the first update stand for those before the step",
        "meshrl/monitor/token_log.py::TrainerValues.by_turn",
        "sample.old_logprobs is not None => sample.old_logprobs is not None and scored is None",
        _TOKEN_VALUES + "test_ranks_return_values_only_for_steps_that_are_logged_and_old_logprobs_are_preferred",
    ),
    Fault(
        "a rank that is the later one in three steps is slow",
        "meshrl/tools/diagnose/measure.py::stragglers",
        "len(times) >= MIN_STEPS => len(times) > 2",
        "tests/unit/tools/test_causes.py::test_three_steps_are_too_few_to_name_a_slow_rank",
    ),
    Fault(
        "a part of a rank's time that overlaps with another one counts twice",
        "meshrl/tools/diagnose/measure.py::divide",
        "without(time, part) => time",
        "tests/unit/tools/test_intervals.py::test_the_time_of_each_rank_adds_up_on_any_trace",
    ),
    Fault(
        "embedded data can end its element",
        "meshrl/tools/page/document.py::data_block",
        r'json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")'
        ' => json.dumps(value, separators=(",", ":"))',
        "tests/unit/tools/test_page_parts.py::test_embedded_data_cannot_end_its_element_and_keeps_every_character",
    ),
    Fault(
        "a reward that rises while the held-out score falls is not suspicious",
        "meshrl/tools/report/page.py::_exploited",
        'run.verdict.outcome != "worse" => run.verdict.outcome == "worse"',
        _REPORT_JUDGEMENT + "test_a_reward_that_rises_while_the_held_out_score_falls_is_suspicious",
    ),
    Fault(
        "`meshrl stop` signals a process that does not hold the lease",
        "meshrl/tools/runs.py::stop",
        "not holds_lease(status.pid, folder) => False",
        _RUN_STATUS + "test_a_process_that_does_not_hold_the_lease_gets_no_signal",
    ),
    Fault(
        "model-check leaves out later kinds of layers",
        "meshrl/tools/model_check/small_model.py::_first_layers",
        "1 + kinds.index(kind) => 1",
        _MODEL_CHECK + "test_layers_of_each_kind_are_taken_with_the_models_own_values",
    ),
    Fault(
        "a check that was not made counts as proven",
        "meshrl/tools/model_check/checks.py::Finding.proven",
        "self.difference <= self.allowed => not self.difference > self.allowed",
        _MODEL_CHECK + "test_a_check_that_fails_and_one_that_raises_are_reported_and_the_others_are_made",
    ),
    Fault(
        "the scale of a head is inverted",
        "meshrl/model/limits.py",
        "1.0 / value => value",
        _FAMILIES + "[granite]",
    ),
    Fault(
        "a resumed run renders the date of the resume",
        "meshrl/run/folder.py::with_date",
        'former.get("run", {}) => {}',
        "tests/e2e/test_changes_at_resume.py::"
        "test_after_a_resume_a_day_later_with_other_updates_date_and_learning_rate_are_those_of_the_step[linear-1]",
    ),
    Fault(
        "rows above max_running decode at once in a predicted step",
        "meshrl/tools/schedule/step_time.py::_Samplers.start",
        "len(slots[sampler]) == most => False",
        _STEP_TIME + "test_the_time_of_sampling",
    ),
    Fault(
        "in a predicted step, a sync computes no contexts again",
        "meshrl/tools/schedule/step_time.py::_Samplers.stop",
        "np.where(tokens > 0, again_s, self.delay_s) => self.delay_s",
        _STEP_TIME + "test_a_sync_computes_the_contexts_of_running_rows_again",
    ),
    Fault(
        "the predicted sides of one_step_off work in turn",
        "meshrl/tools/schedule/step_time.py::steps_of",
        "max(sample_s, s + costs.step_s) => sample_s + s + costs.step_s",
        _STEP_TIME + "test_where_sides_overlap_a_step_is_its_longer_phase",
    ),
]
