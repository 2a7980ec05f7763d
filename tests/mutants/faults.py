"""Faults that the tests must catch. Each is one edit of one file, with the tests that must fail for it.

`old` occurs exactly once in the file. Each fault is a trap that users can meet: silent, with plausible results.
"""

from __future__ import annotations

from correction_faults import CORRECTION_FAULTS
from fault import Fault
from reward_faults import REWARD_FAULTS
from run_faults import RUN_FAULTS
from schedule_faults import SCHEDULE_FAULTS
from security_faults import SECURITY_FAULTS
from server_weight_faults import SERVER_WEIGHT_FAULTS
from turn_faults import TURN_FAULTS
from weight_faults import WEIGHT_FAULTS

_EQUALITY = "tests/dist/test_equality.py::"
_STEP = "tests/dist/test_optimizer_step.py::"
_LOGPROB = "tests/unit/model/test_logprob.py::"
_RESHARD = "tests/dist/test_checkpoint_reshard.py::"
_PACKED = "tests/unit/model/test_packed_attention.py::"
_PACKING = "tests/unit/train/test_packing.py::"
_LOSSES = "tests/unit/algo/test_policy_losses.py::"
_OWN_LOSSES = "tests/unit/algo/test_own_losses.py::"
_GROUPS = "tests/unit/algo/test_group_advantages.py::"
_REDUCE = "tests/unit/algo/test_loss_weights.py::"
_FLATTEN = "tests/unit/agent/test_flatten.py::"
_RUN = "tests/contract/test_executors.py::"
_SAMPLER = "tests/unit/rollout/test_embedded_sampler.py::"
_FUZZ_DATA = "tests/fuzz/test_fuzz_data.py::"
_FUZZ_MODEL = "tests/fuzz/test_fuzz_model.py::"
_ENGINE = "tests/unit/rollout/test_embedded_weights.py::"

FAULTS = [
    # ---- numbers
    Fault(
        "logprobs are not shifted by one token",
        "meshrl/train/packing.py",
        "previous = np.arange(-1, cu[-1] - 1)",
        "previous = np.arange(0, cu[-1])",
        ("tests/unit/model/test_causal_model.py::test_the_logprob_of_a_token_comes_from_the_position_before_it",),
    ),
    Fault(
        "the gradient is FSDP's mean over ranks instead of the sum",
        "meshrl/train/engine.py",
        "(total * self.coordinates.loss_scale).backward()",
        "total.backward()",
        (_EQUALITY + "test_the_gradient_does_not_depend_on_ranks_micro_batches_or_packs[2-fp32]",),
    ),
    Fault(
        "each micro-batch has its own denominator",
        "meshrl/algo/losses.py",
        "return (weight * loss).sum(), _sums(terms, weight)",
        "return (weight * loss).sum() / weight.sum(), _sums(terms, weight)",
        (_LOSSES + "test_sums_and_metrics_do_not_depend_on_the_partition",),
    ),
    Fault(
        "the fast decoder reads a position from the device in each step",
        "meshrl/model/fast_decoder.py",
        "if self._num_positions > TABLE_POSITIONS:",
        "if int(position_ids.max()) >= TABLE_POSITIONS:",
        ("tests/unit/rollout/test_engine_on_meta.py::test_a_step_of_decode_waits_for_the_device_once",),
    ),
    Fault(
        "the loss reads the temperatures from the device",
        "meshrl/model/logprob.py",
        'flat = hidden.device.type == "cpu" and bool(',
        "flat = bool(",
        ("tests/unit/model/test_trainer_on_meta.py::test_no_step_of_a_layer_waits_for_the_device",),
    ),
    Fault(
        "each digest of a sync is read from the device by itself",
        "meshrl/sync/digest.py",
        "found = iter(torch.stack(sums).tolist() if sums else ())",
        "found = iter([int(each) for each in sums])",
        ("tests/unit/sync/test_sync_on_meta.py::test_a_sync_in_place_reads_all_digests_of_a_proof_together",),
    ),
    Fault(
        "the products of the head are rounded to bf16 on accelerators",
        "meshrl/model/logprob.py",
        "out = torch.mm(hidden, self.weight.T, out_dtype=wide)",
        "out = torch.mm(hidden, self.weight.T).to(wide)",
        ("tests/unit/model/test_trainer_on_meta.py::test_bf16_rows_take_one_varlen_kernel_a_layer_and_an_fp32_head",),
    ),
    Fault(
        "token_mean divides by the row's own tokens",
        "meshrl/algo/reduce.py",
        "np.full(len(lengths), 1.0 / lengths.sum())",
        "1.0 / lengths",
        (_REDUCE + "test_golden_weights",),
    ),
    Fault(
        "masked positions are multiplied by 0",
        "meshrl/algo/losses.py",
        "trained = (batch.mask & (batch.loss_weight != 0)).nonzero()[:, 0]",
        "trained = torch.arange(batch.num_tokens)",
        (_LOSSES + "test_poison_in_masked_positions_changes_no_bit",),
    ),
    Fault(
        "one metric counts masked positions",
        "meshrl/algo/losses.py",
        "trained = batch.mask.nonzero()[:, 0]",
        "trained = torch.arange(batch.num_tokens)",
        (_LOSSES + "test_sft_golden_value",),
    ),
    Fault(
        "metrics of a user-defined loss get the weights of the loss",
        "meshrl/algo/losses.py",
        "_sums(seen, torch.ones_like(weight))",
        "_sums(seen, weight)",
        (_OWN_LOSSES + "test_sequence_ratios_of_packed_rows_equal_those_of_each_row_alone",),
    ),
    Fault(
        "clip bounds are swapped",
        "meshrl/algo/losses.py",
        "low, high = 1.0 - clip_low, 1.0 + clip_high",
        "low, high = 1.0 - clip_high, 1.0 + clip_low",
        (_LOSSES + "test_ppo_clip_golden_values",),
    ),
    Fault(
        "the KL has the wrong sign",
        "meshrl/algo/kl.py",
        "return KL_ESTIMATORS[kind](ref_logprobs - logprobs)",
        "return KL_ESTIMATORS[kind](logprobs - ref_logprobs)",
        ("tests/unit/algo/test_kl_estimators.py::test_golden_values",),
    ),
    Fault(
        "on-policy old logprobs carry a gradient",
        "meshrl/algo/losses.py",
        "old_logprobs=logprobs.detach() if batch.old_logprobs is None",
        "old_logprobs=logprobs if batch.old_logprobs is None",
        (_LOSSES + "test_on_policy_ratio_is_exactly_one",),
    ),
    Fault(
        "row_mean is the mean of the micro-batch",
        "meshrl/algo/losses.py",
        "[row.mean().expand(len(row)) for row in values.split(self.row_lengths)]",
        "[row.mean().expand(len(row)) for row in values.split(len(values))]",
        ("tests/dist/test_own_losses_equal.py::test_a_loss_of_complete_rows_gives_the_unsharded_gradient[token_mean]",),
    ),
    Fault(
        "masked answers reach a user-defined loss",
        "meshrl/algo/losses.py",
        "(batch.mask & (batch.loss_weight != 0))",
        "batch.mask",
        (_OWN_LOSSES + "test_untrained_tokens_are_never_read",),
    ),
    Fault(
        "masked answers count in the denominator",
        "meshrl/algo/reduce.py",
        "trained = lengths > 0",
        "trained = np.array([sample.mask.any() for sample in samples])",
        (_REDUCE + "test_answers_that_were_cut_off_are_in_no_denominator",),
    ),
    Fault(
        "a step without a token to train is taken",
        "meshrl/loops/step.py",
        "            continue\n        scored =",
        "        scored =",
        ("tests/e2e/test_own_algorithm_run.py::test_steps_with_only_truncated_answers_do_not_change_the_model",),
    ),
    Fault(
        "an unknown key of a user-defined loss is ignored",
        "meshrl/config/algo.py",
        "elif not takes_any:",
        "elif takes_any:",
        (
            "tests/unit/config/test_own_algorithm.py::test_an_algorithm_that_can_not_work_is_refused_with_a_helpful_error",
        ),
    ),
    Fault(
        "a user-defined advantage that writes into the rewards changes the metrics",
        "meshrl/algo/advantages.py",
        "        _assign(groups, function(groups), cfg.advantage)\n",
        "        _assign(groups, function(groups), cfg.advantage)\n"
        "        metrics = _group_metrics(groups, cfg.advantage_eps)\n",
        (
            "tests/unit/algo/test_own_advantages.py::"
            "test_a_function_may_write_into_the_rewards_without_changing_the_metrics",
        ),
    ),
    Fault(
        "a user-defined advantage gets rewards without the KL penalty",
        "meshrl/algo/advantages.py",
        "rewards=np.array([t.reward - t.kl_penalty for t in found], np.float64)",
        "rewards=np.array([t.reward for t in found], np.float64)",
        ("tests/unit/algo/test_own_advantages.py::test_the_function_gets_rewards_less_the_kl",),
    ),
    *CORRECTION_FAULTS,
    *SCHEDULE_FAULTS,
    Fault(
        "eps is added to the variance instead of the deviation",
        "meshrl/algo/advantages.py",
        "return (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)",
        "return (rewards - rewards.mean()) / np.sqrt(rewards.var(ddof=1) + eps)",
        (_GROUPS + "test_eps_is_added_to_the_deviation_and_not_to_the_variance",),
    ),
    Fault(
        "groups are formed by position",
        "meshrl/algo/advantages.py",
        "members.setdefault(trajectory.group_id, []).append(trajectory)",
        "members.setdefault(str(trajectories.index(trajectory) // 4), []).append(trajectory)",
        (_GROUPS + "test_order_changes_no_bit",),
    ),
    Fault(
        "the trainer ignores the temperature",
        "meshrl/model/logprob.py",
        "z.div_(temperature[part, None].to(dtype))",
        "z",
        (_LOGPROB + "test_temperature_divides_the_logits_and_greedy_scores_as_one",),
    ),
    Fault(
        "logits are rounded to bf16",
        "meshrl/model/logprob.py",
        "z = head.logits(hidden[part])",
        "z = head.logits(hidden[part]).bfloat16().float()",
        (_LOGPROB + "test_bf16_models_are_scored_in_fp32",),
    ),
    Fault(
        "rotary buffers are rounded to bf16",
        "meshrl/model/load.py",
        "for p in model.parameters():  # yields a tied tensor once",
        "for p in [*model.parameters(), *model.buffers()]:",
        ("tests/unit/model/test_causal_model.py::test_casting_keeps_buffers_in_fp32_and_ties",),
    ),
    Fault(
        "the optimizer steps with a gradient that is not finite",
        "meshrl/train/engine.py",
        "skipped, bad = not np.isfinite(norm), list[str]()",
        "skipped, bad = False, list[str]()",
        (_STEP + "test_a_norm_that_is_not_finite_skips_the_step_on_every_rank[1-inf-train0]",),
    ),
    # ---- tokens and packs
    Fault(
        "attention runs over the entire pack",
        "meshrl/model/attention.py",
        "self.num_tokens = cu_seqlens[-1]\n",
        "self.num_tokens = cu_seqlens[-1]\n        cu_seqlens, parents = [0, cu_seqlens[-1]], None\n",
        (_PACKED + "test_changing_one_row_changes_no_bit_of_another[qwen2-float32]",),
    ),
    Fault(
        "an answer does not see its shared prompt",
        "meshrl/model/attention.py",
        "self._segments = (cu_seqlens, parents, device)",
        "self._segments = (cu_seqlens, None, device)",
        (_PACKED + "test_answers_after_a_shared_prompt_equal_plain_transformers_one_row_at_a_time[qwen2]",),
    ),
    Fault(
        "answers in one batch all see the prompt of the first",
        "meshrl/model/attention.py",
        "torch.arange(prefixes[s].start, prefixes[s].stop)",
        "torch.arange(prefixes[members[0]].start, prefixes[members[0]].stop)",
        (_PACKED + "test_rows_padded_to_full_vectors_equal_the_definition_in_bf16[prompts_of_equal_length]",),
    ),
    Fault(
        "positions count through the entire pack",
        "meshrl/train/packing.py",
        "np.concatenate([np.arange(p.start, p.stop) for p in pieces])",
        "np.arange(cu[-1])",
        (_PACKING + "test_rows_lie_end_to_end_and_each_starts_at_position_0",),
    ),
    Fault(
        "a dummy micro-batch trains",
        "meshrl/train/packing.py",
        '"dummy", [0, 0], scored=False',
        '"dummy", [0, 0], scored=True',
        (_PACKING + "test_a_dummy_is_a_batch_that_trains_nothing",),
    ),
    Fault(
        "the token budget does not count a shared prompt",
        "meshrl/train/batch_plan.py",
        "return row.length - (row.prefix if self.groups.get(row.group) else 0)",
        "return row.length - row.prefix",
        (_PACKING + "test_a_plan_of_groups_counts_each_prompt_once_in_a_micro_batch",),
    ),
    Fault(
        "supervised rows do not train their end token",
        "meshrl/data/chat.py",
        "mask[len(head) : end] = True",
        "mask[len(head) : end - 1] = True",
        ("tests/unit/data/test_chat.py::test_sft_trains_the_answer_and_its_end_token_and_nothing_after",),
    ),
    Fault(
        "sampled end tokens are not trained",
        "meshrl/agent/flatten.py",
        "mask[end - r : end] = i not in trained_before",
        "mask[end - r : end - 1] = i not in trained_before",
        (_FLATTEN + "test_every_sampled_token_is_trained_whatever_its_value",),
    ),
    Fault(
        "the prompt is trained",
        "meshrl/agent/flatten.py",
        "mask[end - r : end] = i not in trained_before",
        "mask[1:end] = i not in trained_before",
        (_FLATTEN + "test_one_turn_becomes_the_row_of_the_worked_example",),
    ),
    # ---- the sampler
    Fault(
        "seeds do not depend on the sample's index",
        "meshrl/core/types.py",
        "for part in (ordinal, index, turn):",
        "for part in (ordinal, turn):",
        ("tests/unit/agent/test_agents.py::test_seeds_follow_run_ordinal_index_and_turn_and_nothing_else",),
    ),
    Fault(
        "all rows are drawn with one seed",
        "meshrl/rollout/embedded/sampler.py",
        "bits = mix64(seeds ^ mix64(positions.astype(np.uint64)))",
        "bits = mix64(seeds[:1] ^ mix64(positions.astype(np.uint64)))",
        (_SAMPLER + "test_a_draw_does_not_depend_on_the_other_rows",),
    ),
    Fault(
        "the sampler's logprobs ignore the temperature",
        "meshrl/rollout/embedded/sampler.py",
        "    logprobs = (z.gather(1, tokens[:, None]) - lse)[:, 0].clamp_(max=0)\n",
        "    logprobs = torch.log_softmax(z * rows.temperature, -1).gather(1, tokens[:, None])[:, 0]\n",
        (_SAMPLER + "test_logprobs_are_those_of_the_tempered_distribution_and_draws_follow_it",),
    ),
    Fault(
        "KV caches of old weights are used after a sync",
        "meshrl/rollout/embedded/engine.py",
        "        self._flush()\n        self._weights.begin(header)",
        "        self._weights.begin(header)",
        (_ENGINE + "test_weights_may_change_under_running_requests",),
    ),
    Fault(
        "answers wait for the next decoding step",
        "meshrl/rollout/embedded/engine.py",
        "                await asyncio.sleep(0)\n                await asyncio.sleep(0)",
        "                await asyncio.sleep(0)",
        (_ENGINE + "test_answers_are_sent_before_the_next_step",),
    ),
    Fault(
        "the acknowledgement of a sync waits for a decoding step",
        "meshrl/rollout/embedded/engine.py",
        "            while version != self._weights.version:",
        "            while version is None:",
        (_ENGINE + "test_answers_are_sent_before_the_next_step",),
    ),
    *WEIGHT_FAULTS,
    # ---- runs
    Fault(
        "the optimizer steps before the sampler's proof",
        "meshrl/loops/step.py",
        "        metrics += report.metrics\n        if len(updates) == 1:",
        "        metrics += report.metrics\n        await job.trainer.optim_step(1e-6)\n        if len(updates) == 1:",
        (_RUN + "test_a_sampler_that_kept_its_old_weights_is_caught_within_the_step",),
    ),
    Fault(
        "the sampler's proof accepts NaN",
        "meshrl/algo/mismatch.py",
        ".nan_to_num(nan=math.inf, posinf=math.inf)",
        ".nan_to_num(nan=0.0, posinf=math.inf)",
        ("tests/unit/loops/test_sampler_proof.py::test_broken_numbers_are_a_mismatch_at_any_step",),
    ),
    Fault(
        "the newest model of a run is chosen alphabetically",
        "meshrl/config/model.py",
        "return max(models, key=lambda path: (len(path.parent.name), path))",
        "return max(models, key=str)",
        (
            "tests/unit/config/test_config_refusals.py::"
            "test_the_folder_of_a_run_in_place_of_a_model_names_the_newest_model[runs/first-runs/first/checkpoints/step_1000000/model]",
        ),
    ),
    Fault(
        "an error recommends to quote null as the name of a column",
        "meshrl/config/load.py",
        'if error["type"] == "string_type" and isinstance(value, (bool, int, float)):',
        'if error["type"] == "string_type":',
        ("tests/unit/config/test_config_refusals.py::test_null_is_not_to_be_quoted_where_text_is_required",),
    ),
    Fault(
        "an unknown config key is ignored",
        "meshrl/config/base.py",
        'extra="forbid"',
        'extra="ignore"',
        (
            "tests/unit/config/test_config_refusals.py::test_all_problems_are_reported_at_once_with_file_line_and_command_line",
        ),
    ),
    Fault(
        "a failed call waits for its deadline",
        "meshrl/cluster/processes.py",
        "for call in rank.pending.values():\n        if not",
        "for call in list(rank.pending.values())[1:]:\n        if not",
        (
            "tests/unit/cluster/test_process_executor.py::test_a_rank_that_fails_in_a_collective_ends_the_run_and_is_named[raise]",
        ),
    ),
    Fault(
        "a block's full parameters are used as this rank's shard",
        "meshrl/parallel/fsdp.py",
        "if isinstance(module, FSDPModule):",
        "if module is root:",
        ("tests/dist/test_streamed_load.py::test_every_sharding_strategy_reads_its_own_shards[SHARD_GRAD_OP]",),
    ),
    Fault(
        "one engine of many may sample with other weights",
        "meshrl/loops/proof.py",
        " or row > ROW_MARGIN * limit",
        "",
        ("tests/unit/loops/test_sampler_proof.py::test_one_stale_row_among_many_ends_the_run",),
    ),
    Fault(
        "the fp32 copy of the head is not replaced by a sync",
        "meshrl/rollout/embedded/runner.py",
        "        self._head = None\n        if",
        "        if",
        ("tests/unit/rollout/test_embedded_weights.py::test_no_copy_of_the_old_weights_survives_a_sync_in_bf16",),
    ),
    Fault(
        "files of a checkpoint are not compared with their hashes",
        "meshrl/train/checkpoint_files.py",
        "    if digest.hexdigest() != fact.blake2b:",
        "    if False:",
        (
            _RESHARD
            + "test_a_damaged_checkpoint_is_refused_by_every_rank_before_anything_is_changed"
            + "[a flipped bit of a tensor]",
        ),
    ),
    Fault(
        "a resumed run reads its data from the start",
        "meshrl/loops/job.py",
        '        self.feed.load_state(saved["data"])\n',
        "",
        ("tests/e2e/test_resume.py::test_a_resumed_run_equals_one_that_was_not_interrupted[mid-epoch]",),
    ),
    # ---- files from outside the run
    Fault(
        "a pipe is read like a file",
        "meshrl/core/files.py",
        "if not stat.S_ISREG(found.st_mode):",
        "if stat.S_ISSOCK(found.st_mode):",
        ("tests/fuzz/test_fuzz_config.py::test_the_command_exits_with_2_and_an_error_for_anything_but_a_config_file",),
    ),
    Fault(
        "a duplicate key of a JSON object is accepted",
        "meshrl/core/files.py",
        "if len(made) != len(pairs):",
        "if len(made) > len(pairs):",
        (_FUZZ_DATA + "test_an_invalid_row_is_reported_with_its_line",),
    ),
    Fault(
        "a line without an end is read without a limit",
        "meshrl/core/files.py",
        "line = file.readline(MAX_LINE_BYTES + 1)",
        "line = file.readline()",
        (_FUZZ_DATA + "test_a_line_above_the_limit_is_not_read_to_its_end",),
    ),
    Fault(
        "an index of weights names files outside its folder",
        "meshrl/model/weight_files.py",
        "isinstance(file, str) and Path(file).name == file and",
        "isinstance(file, str) and",
        (_FUZZ_MODEL + "test_a_damaged_index_is_refused_and_no_file_outside_is_read",),
    ),
    Fault(
        "an adapter's config loads another model",
        "meshrl/model/folder.py",
        "if adapter.exists():",
        "if not folder.exists():",
        (_FUZZ_MODEL + "test_a_folder_does_not_load_another_model",),
    ),
    Fault(
        "YAML aliases expand to any number of values",
        "meshrl/config/source.py",
        "if self._num_values > MAX_VALUES:",
        "if self._num_values < 0:",
        ("tests/fuzz/test_fuzz_config.py::test_hostile_yaml_is_refused_within_seconds_and_runs_nothing",),
    ),
    Fault(
        "a chat template may run for ever",
        "meshrl/data/time_limit.py",
        "if now > deadline:",
        "if now < 0:",
        ("tests/fuzz/test_fuzz_tokenizer.py::test_a_template_that_takes_too_long_is_stopped_and_the_line_named",),
    ),
    Fault(
        "a damaged status file makes `meshrl stop` signal all processes",
        "meshrl/monitor/status.py",
        "if not 1 < status.pid < 1 << 31:",
        "if status.pid > 1 << 31:",
        ("tests/fuzz/test_fuzz_run_folder.py::test_no_process_is_stopped_by_a_damaged_status",),
    ),
    *RUN_FAULTS,
    *REWARD_FAULTS,
    *SECURITY_FAULTS,
    *SERVER_WEIGHT_FAULTS,
    *TURN_FAULTS,
]
