"""Cases of test tables that `make test` leaves to `make test-all`.

Of tables of model families `make test` runs some for each mechanism. Of products of axes (ranks, dtypes, strategies,
meshes, transports) it runs a few cases that have most values once and, where two axes can influence each other, their
pairs. The other cases are listed here, not in their files, so that one page shows what `make test` does not run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest


def _all_but(*names: str) -> str:
    return rf"(?!({'|'.join(names)})$).*"


_MIXTURES = _all_but("mixtral", "qwen3_moe", "deepseek_v3", "phimoe", "gpt_oss", "qwen3_next", "minimax")
_SYNC_FAULTS = "test_a_fault_in_transit_is_caught_and_the_next_full_sync_repairs_it"
# file -> test -> regular expression of the ids of cases
SLOW_CASES: dict[str, dict[str, str]] = {
    "tests/contract/test_executors.py": {
        # the runs under torchrun and on Ray are compared with two ranks, too
        "test_the_same_run_gives_the_same_numbers_to_the_bit": "two ranks-.*|split-.*",
        "test_every_run_leaves_the_spans_of_its_newest_steps": "ray|torchrun",
        "test_every_run_shows_how_far_a_phase_is": "ray",
    },
    "tests/contract/test_loops.py": {
        "test_each_prompt_is_trained_once_and_no_sample_is_too_old": "fully_async-1",
        "test_a_run_that_ended_early_continues_with_the_next_prompts": "fully_async",
        "test_a_step_replaces_groups_of_equal_rewards_and_logs_all_answers": "one_step_off",
        "test_running_answers_meet_new_weights_in_each_mode": "restart|abort",
        # one tensor is harder to see
        "test_a_sampler_with_old_weights_is_caught_within_its_step": ".*-all tensors|one_step_off-.*",
        "test_with_staleness_0_every_schedule_is_colocated_to_the_bit": "one_step_off-processes|fully_async-inline",
    },
    "tests/contract/test_sync_transports.py": {
        # each fault once over one transport, in alternating modes, and one fault over each of the others
        _SYNC_FAULTS: "(?!one machine, apart-(digests of another|scrambled|sender ends half-way)-full$)"
        "(?!one machine, apart-(a bit flipped|cut short)-delta$)(?!(machines|one group).*-sender ends half-way-delta$)"
        "(?!(one machine, colocated|all-gather)-a bit flipped-full$).*",
    },
    "tests/dist/test_checkpoint_reshard.py": {
        "test_training_does_not_change_a_state_that_was_copied": "1",
        "test_four_to_two_to_one_to_four_ranks_is_equal_to_the_bit": "untied",
        "test_replicas_are_saved_once_and_another_strategy_reads_them": "NO_SHARD",
        "test_a_damaged_checkpoint_is_refused_by_every_rank_before_anything_is_changed": "a flipped bit of a header"
        "|gone|no manifest|a manifest cut",
        "test_another_model_is_refused": "untied|fewer layers",
    },
    "tests/dist/test_collective_spans.py": {
        "test_the_bytes_of_all_collectives_are_those_of_the_strategy": "(SHARD_GRAD_OP|NO_SHARD).*",
        "test_recording_and_profiling_do_not_change_a_bit": "NO_SHARD",
    },
    "tests/dist/test_compute_dtype.py": {
        "test_a_step_in_bf16_equals_that_of_fsdp2_to_the_bit": "full-checkpointed|LoRA-",
        "test_experts_state_layers_and_windows_in_bf16_equal_fsdp2_to_the_bit": "gemma3_text|ernie4_5_moe|minimax",
        "test_a_step_in_bf16_under_tensor_parallelism_is_near_fsdp2s": "full",
    },
    "tests/dist/test_equality.py": {
        "test_the_gradient_does_not_depend_on_ranks_micro_batches_or_packs": "1-.*|2-fp64|4-fp32",
        "test_a_group_that_shares_its_prompt_gives_the_same_gradient": "1-.*|2-fp64",
        "test_every_sharding_strategy_gives_the_same_gradient": "NO_SHARD|SHARD_GRAD_OP",
        "test_masked_positions_are_never_read": "inf|1000000.0",
    },
    "tests/dist/test_export_shards.py": {
        "test_transformers_reads_a_model_that_each_rank_wrote_one_file_of": "gemma2|glm4_moe",
    },
    "tests/dist/test_lora.py": {
        "test_only_adapters_have_gradients_and_they_equal_the_unsharded_models": "1-.*|2-fp64|4-fp32",
        "test_every_sharding_strategy_gives_the_same_gradient_and_merged_weights": "SHARD_GRAD_OP|NO_SHARD",
        "test_only_adapters_are_trained_and_without_them_the_model_is_the_reference": ".*-fp32",
        "test_merged_weights_equal_pefts_own_merge_for_any_cuts": "[12]",
        "test_a_checkpoint_has_only_the_adapters_and_restores_them_on_other_ranks": "4",
    },
    "tests/dist/test_lora_experts.py": {
        "test_gradients_equal_the_unsharded_models": "1-.*|2-fp64|4-fp32",
        "test_peft_loads_the_exported_adapter_and_a_checkpoint_restores_it_on_other_ranks": "(?!shared experts).*",
    },
    "tests/dist/test_memory_facts.py": {
        "test_the_bytes_of_train_engines_follow_from_config_json": "False-sharded|False-replicated|True-.*",
    },
    "tests/dist/test_mesh_equal.py": {
        # the families below are on two other meshes
        "test_the_gradient_of_packed_rows_does_not_depend_on_the_mesh": "ulysses.*|(shard 2 x )?tp 2|tp 4"
        "|replicate.*ulysses 2",
        # four families, each on one of the meshes
        "test_the_gradient_of_a_family_does_not_depend_on_the_mesh": "(untied head|biases|parallel|fused experts"
        "|shared experts with a gate|attention that counts|norms of all features|post-norms|fused projections).*"
        "|(words|attention sinks).*-shard 2 x tp 2|(norms of heads|latent).*-ulysses 2 x tp 2",
    },
    "tests/dist/test_mesh_state.py": {
        "test_state_moves_from_mesh_to_mesh_and_to_samplers": "adapters.*",
    },
    "tests/dist/test_mixture_out.py": {
        "test_all_proofs_hold_while_a_mixture_is_trained": "shared memory",
        "test_a_sampler_gets_the_experts_of_adapters_merged_and_has_the_trainers_logprobs": "sockets",
    },
    "tests/dist/test_not_finite.py": {
        "test_a_state_that_is_not_finite_is_refused_by_every_rank_before_anything_is_changed": "1-model.|2-optimizer.*",
    },
    "tests/dist/test_on_policy.py": {
        "test_the_first_update_has_ratio_one_and_no_extra_forward": "(?!one update-bf16-checkpointed"
        "|several updates-fp32-$).*",
        "test_the_trainer_scores_at_the_temperature_of_sampling": "1..*",
    },
    "tests/dist/test_optimizer_step.py": {
        "test_norm_and_clipping_equal_those_of_the_unsharded_gradient": "[12]",
        "test_a_norm_that_is_not_finite_skips_the_step_on_every_rank": "(?!4-nan-|2-loss-train5).*",
    },
    "tests/dist/test_own_losses_equal.py": {
        "test_a_loss_of_complete_rows_gives_the_unsharded_gradient": "seq_mean_token_sum|token_mean",
        "test_a_built_in_loss_gives_the_gradient_of_rows_alone": "cispo|sapo",
        "test_masked_truncated_answers_change_nothing": "(?!token_mean).*",
    },
    "tests/dist/test_precision.py": {
        "test_buffers_equal_a_fresh_fp32_models": "bfloat16-role1",
        "test_tied_weights_stay_one_parameter_at_every_stage": "tied-NO_SHARD|untied-FULL_SHARD",
    },
    "tests/dist/test_reads_once.py": {
        "test_a_start_reads_each_byte_once": "replicas|ulysses|bf16 masters|tp",
    },
    "tests/dist/test_routers.py": {
        "test_the_loss_that_balances_experts_does_not_depend_on_micro_batches_and_ranks": "(?!two ranks-one by one"
        "|ulysses-shared prompts).*",
        "test_replayed_experts_compute_with_the_scores_of_the_trainers_router": "one rank|ulysses",
    },
    "tests/dist/test_rows_without_gradient.py": {
        "test_they_are_scored_only_and_nothing_else_changes": "SHARD_GRAD_OP-(one|all)|FULL_SHARD-(some|all)",
    },
    "tests/dist/test_shards_out.py": {
        "test_after_every_sync_the_samplers_hold_the_trainers_weights_to_the_bit": "1-(?!shared|sockets).*"
        "|2-(?!shared).*|4-(shared memory|sockets|broadcast)",
        "test_an_untied_head_gets_its_own_weights": ".*-shared memory",
        # each strategy once, and FULL_SHARD is the default of the tests above
        "test_every_sharding_strategy_sends_each_shard_once": "(?!SHARD_GRAD_OP-shared|HYBRID_SHARD-collective).*",
    },
    "tests/dist/test_start_probe.py": {
        "test_models_that_are_random_in_train_mode_are_trained_without_randomness": ".*-fp32|(opt|mixtral)-bf16",
        "test_a_model_whose_packed_rows_see_each_other_is_refused_at_start": "(?!qwen2-attention-).*-fp32"
        "|(qwen2-attention|qwen3_moe-.*|qwen3_5_text-state)-bf16",
    },
    "tests/dist/test_states_out.py": {
        "test_a_sampler_gets_the_buffers_that_its_forward_reads_and_proves_them": "1-.*",
        "test_a_sampler_gets_what_computes_the_states_and_proves_it": "qwen3_next|minimax",
    },
    "tests/dist/test_streamed_load.py": {
        "test_a_streamed_model_equals_transformers_model_to_the_bit": "2-(?!llama untied).*|1-qwen2 tied",
        "test_every_sharding_strategy_reads_its_own_shards": "SHARD_GRAD_OP|NO_SHARD",
        "test_files_of_any_dtype_and_number_fill_masters_and_references": "float16-1-.*",
        "test_tensors_larger_than_the_bucket_are_read_in_pieces": "1000",
        "test_a_sharded_model_with_transformers_scores_is_accepted": "1-bfloat16|4-float32",
        "test_a_sharded_model_that_scores_differently_is_refused": "qwen3_moe-.*",
    },
    "tests/dist/test_weights_out.py": {
        "test_names_and_values_equal_a_fresh_model_to_the_bit": "1-.*|4-fp32|2-bf16",
        "test_every_sharding_strategy_holds_all_of_the_weights": "SHARD_GRAD_OP|NO_SHARD",
        "test_from_pretrained_of_an_exported_folder_gives_the_same_logits": "qwen2-bf16|gemma2-fp32",
    },
    "tests/e2e/test_changes_at_resume.py": {
        "test_after_a_resume_a_day_later_with_other_updates_date_and_learning_rate_are_those_of_the_step": "cosine.*",
    },
    "tests/e2e/test_python_api.py": {
        "test_ctrl_c_ends_the_run_with_a_checkpoint": "notebook",
    },
    "tests/e2e/test_release_memory.py": {
        "test_a_run_that_releases_memory_is_the_same_to_the_bit": "two ranks|LoRA",
        "test_a_trainer_whose_state_is_on_the_host_while_it_is_not_needed_trains_the_same_to_the_bit": "LoRA|KL",
    },
    "tests/e2e/test_resume.py": {
        # an end at the end of an epoch is in the resume of a finished run, too
        "test_a_resumed_run_equals_one_that_was_not_interrupted": "epoch end|before the last",
    },
    "tests/faults/test_stale_copies.py": {
        # the copy in which the fault was found under each schedule, each other copy under one
        "test_a_stale_copy_ends_the_run_before_the_next_update": "(?!prepacked_head).*-(colocated|one_step_off)",
    },
    "tests/unit/run/test_reward_trial.py": {
        "test_a_run_whose_rewards_are_all_alike_gets_a_note_after_the_first_such_step_and_at_its_end": "0",
    },
    "tests/unit/cluster/test_in_flight.py": {
        "test_running_turns_are_kept_aborted_or_restarted_at_a_sync": "keep",  # tests/contract/test_loops.py has it
    },
    "tests/unit/cluster/test_process_executor.py": {
        "test_a_rank_that_fails_in_a_collective_ends_the_run_and_is_named": "sleep",
        "test_the_loss_of_a_rank_that_only_samples_ends_no_other_rank": "sleep",
    },
    "tests/unit/parallel/test_coordinates.py": {
        "test_each_sender_holds_what_the_layout_sends_from_it": ".*[348].*",
    },
    "tests/unit/reward/test_reward_sandbox.py": {
        "test_a_reply_that_user_code_writes_breaks_the_worker_and_is_no_reward": "(?!forge ..item.: 1, .value.: 7.0.$"
        "|answer_as 2|forge nonsense|forge_bytes).*",
        "test_a_daemon_in_a_session_of_its_own_ends_with_its_worker": "os_exit|close",
        "test_workers_die_with_a_killed_parent": "hang_in_c",
    },
    "tests/unit/rollout/test_embedded_generation.py": {
        "test_logprobs_equal_the_trainers": "qwen2-1..|gemma2-(0.6|1.0)",
    },
    "tests/unit/rollout/test_engine_on_meta.py": {
        "test_a_step_of_decode_stays_within_its_budget": "True-1-.*",
    },
    "tests/unit/run/test_printed_lines.py": {
        "test_a_run_in_a_dtype_that_its_cpu_multiplies_slowly_names_the_faster_one": "bfloat16-0-1|float32-.*",
    },
    "tests/unit/run/test_run_folder.py": {
        "test_an_error_of_the_controller_ends_the_run_with_its_last_finished_step_saved": "reward|sink",
    },
    "tests/unit/run/test_run_record.py": {
        "test_a_resume_with_another_test_compares_no_scores_with_the_former_ones": "data.eval_path.*",
    },
    "tests/unit/run/test_step_costs.py": {
        "test_flops_are_those_of_the_rows_whatever_the_ranks_and_micro_batches": "two processes",
    },
    "tests/unit/model/test_attention_implementations.py": {
        "test_a_model_scores_and_learns_with_each_implementation_as_with_auto": "(?!sdpa-mistral|eager-gemma2).*",
    },
    "tests/unit/model/test_attention_of_families.py": {
        "test_a_folder_of_the_family_is_loaded_and_passes_the_comparison_with_transformers": "gptj|falcon|falcon 3"
        "|bloom|stablelm|llama|phi3",
        "test_greedy_answers_are_those_of_generate": "(falcon|stablelm|llama) .*|bloom|falcon|stablelm|llama",
        # the same comparison as that of a folder which is loaded
        "test_logprobs_and_gradients_are_those_of_transformers_row_by_row": "(?!(granite_swa|bloom 2)-).*-shared"
        "|(gptj|falcon|falcon 3|bloom|stablelm|nemotron)-packed",
    },
    "tests/unit/model/test_logprob.py": {
        "test_values_and_gradients_equal_the_dense_definition": "recomputed-.*-(1|1000)|saved-.*-(7|23)",
    },
    "tests/unit/model/test_routing.py": {
        "test_every_router_is_counted_and_its_selection_recorded": _MIXTURES,
        "test_routers_select_given_experts_with_their_own_scores": _MIXTURES,
        "test_a_router_in_fp32_computes_with_fp32_logits_and_leaves_its_parameters": _MIXTURES,
    },
    "tests/unit/sync/test_sync_layout.py": {
        "test_each_element_is_sent_once_from_every_mesh": "(?!.*-4096$|3 x 2-100$|rows-1048576$).*",
    },
    "tests/unit/sync/test_sync_ranks.py": {
        "test_every_mesh_reaches_every_sampler_to_the_bit": "(?!.*-one sampler-one|one rank-colocated-one|columns-two"
        " samplers-two|rows-one sampler-two|2 x 2-colocated-two|3 x 2-two samplers-one).*",
    },
    "tests/unit/sync/test_sync_sender.py": {
        "test_every_mesh_arrives_to_the_bit_and_changes_are_a_small_part": "columns|2 x 2|fused",
        "test_frozen_tensors_are_read_and_sent_once_and_proven_each_time": "(one rank|rows)-4096-.*|3 x 2-128-.*",
    },
}


def mark_slow_cases(items: Iterable[pytest.Item], all_of_a_test: bool) -> None:
    """Mark the listed cases as slow. all_of_a_test: items has all cases of a test, or none. Then a pattern that matches
    none or all of them is an error."""
    seen, slow = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        file, _, name = test.partition("::")
        pattern = SLOW_CASES.get(file, {}).get(name)
        if pattern is not None:
            seen[file, name] += 1
            if re.fullmatch(pattern, case.removesuffix("]")):
                slow[file, name] += 1
                item.add_marker(pytest.mark.slow)
    wrong = [test for test, count in seen.items() if slow[test] in (0, count)]
    if all_of_a_test and wrong:
        raise pytest.UsageError(f"tests/slow_cases.py: the patterns match none or all of the cases of {wrong}")
