"""Faults of the trainer and the model: gradients, packs, attention, logprobs, loading, shards."""

from __future__ import annotations

from fault import Fault

_BUFFERS_OUT = "tests/dist/test_states_out.py::"
_CHECKPOINT_RESHARD = "tests/dist/test_checkpoint_reshard.py::"
_LORA = "tests/dist/test_lora.py::"
_LORA_EXPERTS = "tests/dist/test_lora_experts.py::"
_ROWS_WITHOUT_GRADIENT = "tests/dist/test_rows_without_gradient.py::"
_START_PROBE = "tests/dist/test_start_probe.py::"
_STREAMED_LOAD = "tests/dist/test_streamed_load.py::"
_FAMILIES = "tests/contract/test_model_families.py::test_a_family_has_exactly_what_its_entry_states"
_FUZZ_MODEL = "tests/fuzz/test_fuzz_model.py::"
_CAUSAL_MODEL = "tests/unit/model/test_causal_model.py::"
_HUB_NAMES = "tests/unit/model/test_hub_names.py::"
_LOGPROB = "tests/unit/model/test_logprob.py::"
_IMPLEMENTATIONS = "tests/unit/model/test_attention_implementations.py::"
_OF_FAMILIES = "tests/unit/model/test_attention_of_families.py::"
_PACKED_ATTENTION = "tests/unit/model/test_packed_attention.py::"
_TRAINER_ON_META = "tests/unit/model/test_trainer_on_meta.py::"
_UNLOADED = "tests/dist/test_unloaded_params.py::test_all_faults_of_a_folder_are_in_one_error_of_both_sides"
_READS_ONCE = "tests/dist/test_reads_once.py::test_a_start_reads_each_byte_once"
_WEIGHT_NAMES = "tests/unit/model/test_weight_names.py::"
_PACKING = "tests/unit/train/test_packing.py::"

_ROUTERS = "tests/dist/test_routers.py::"
_BALANCED = _ROUTERS + "test_the_loss_that_balances_experts_does_not_depend_on_micro_batches_and_ranks"
_REPLAYED = _ROUTERS + "test_replayed_experts_compute_with_the_scores_of_the_trainers_router"
_ROUTING = "tests/unit/model/test_routing.py::"

FAULTS = [
    Fault(
        "experts are balanced by the counts of the first micro-batch only",
        "meshrl/train/engine.py::TrainEngine._balance_experts",
        "for batch in batches: self._outputs(batch, entropy=False, counts=True)"
        " => for batch in batches[:1]: self._outputs(batch, entropy=False, counts=True)",
        _BALANCED + "[one rank-one by one]",
    ),
    Fault(
        "experts are balanced by the counts of each rank",
        "meshrl/train/engine.py::TrainEngine._router_sums",
        "dist.all_reduce(total) => None",
        _BALANCED + "[two ranks-one by one]",
    ),
    Fault(
        "a recomputed forward counts again",
        "meshrl/model/routing.py::Routing.end",
        "self._is_counting = False => pass",
        _ROUTING + "test_a_recomputed_forward_counts_nothing",
    ),
    Fault(
        "a shared prompt counts once for all its answers",
        "meshrl/core/batch.py::Batch.rows_of_tokens",
        "(row >= 0) + children[s] => 1",
        _BALANCED + "[one rank-shared prompts]",
    ),
    Fault(
        "each rank of tp adds the full gradient of the loss that balances experts",
        "meshrl/train/engine.py::TrainEngine._balance_experts",
        "self.cfg.router_aux_loss_coef * at.loss_scale / at.num_tp => self.cfg.router_aux_loss_coef * at.loss_scale",
        _BALANCED + "[tp-one by one]",
    ),
    Fault(
        "replayed experts keep the scores of the router's own choice",
        "meshrl/model/routing.py::_Selection.__torch_function__",
        "args[0].gather(-1, index) => out.values",
        _REPLAYED + "[one rank]",
    ),
    Fault(
        "the experts of the first micro-batch are replayed in all",
        "meshrl/model/routing.py::Routing.begin",
        "self._rows, self._replayed, self._is_counting = rows, replayed, counts"
        " => self._rows, self._is_counting = rows, counts; self._replayed = "
        "replayed if self._replayed is None else self._replayed",
        _REPLAYED + "[one rank]",
    ),
    Fault(
        "every rank of ulysses replays the experts of the first tokens",
        "meshrl/train/engine.py::TrainEngine._begin_routing",
        "peers.own_tokens(routes.movedim(0, -1)).movedim(-1, 0) => routes[: peers.chunk(batch.num_tokens)]",
        _REPLAYED + "[ulysses]",
    ),
    Fault(
        "routers that can't replay are accepted",
        "meshrl/model/verify.py::require_replay",
        "difference > 1e-2 or not is_replayed => difference > 1e-2",
        _ROUTING + "test_routers_that_can_not_replay_are_refused",
    ),
    Fault(
        "scores of 0 are accepted as replayed",
        "meshrl/model/verify.py::require_replay",
        "all(bool((out[1] != 0).all()) for out in outputs) => True",
        _ROUTING + "test_group_limited_scores_can_not_be_replayed",
    ),
    Fault(
        "a trainer ignores model.router_dtype",
        "meshrl/train/engine.py::TrainEngine.build",
        "DTYPES.get(model_cfg.router_dtype) => None",
        _ROUTERS + "test_routers_in_fp32_are_the_same_in_trainer_and_sampler",
    ),
    Fault(
        "a router in fp32 computes with the parameters of the compute dtype",
        "meshrl/model/routing.py::Routing._computing",
        "p if p is None else self._widened(p) => p",
        _ROUTING + "test_a_router_in_fp32_computes_with_fp32_logits_and_leaves_its_parameters",
    ),
    Fault(
        "two experts have each other's names",
        "meshrl/model/hub_names.py::HubNames._reverted",
        "_view(hub_name, tensor, shapes[source])"
        ' => _view(hub_name.replace("experts.0.", "?").replace("experts.1.", "experts.0.").replace("?", "experts.1."), '
        "tensor, shapes[source])",
        _HUB_NAMES + "test_boxes_of_hub_tensors_are_the_files_that_transformers_writes",
    ),
    Fault(
        "the last expert of a joint tensor is not sent",
        "meshrl/model/hub_names.py::HubNames.split",
        "self._blocks[key] => self._blocks[key][:-1]",
        "tests/dist/test_mixture_out.py::test_all_proofs_hold_while_a_mixture_is_trained[shared memory]",
    ),
    Fault(
        "the memory of the largest shards is that of the mean",
        "meshrl/model/costs.py::_num_bytes",
        "ceil(p.shape[0] / num_shards) => p.shape[0] // num_shards",
        "tests/dist/test_memory_facts.py::test_the_bytes_of_train_engines_follow_from_config_json[False-FULL_SHARD]",
    ),
    Fault(
        "a step without any gradient has no dummy micro-batch",
        "meshrl/train/batch_plan.py::make_batch_plan",
        "len(first[0]) => len(first[0]) + (not trained)",
        _ROWS_WITHOUT_GRADIENT + "test_they_are_scored_only_and_nothing_else_changes",
    ),
    Fault(
        "the token budget does not count a shared prompt",
        "meshrl/train/batch_plan.py::_Bin.added_tokens",
        "row.prefix if self.groups.get(row.group) else 0 => row.prefix",
        _PACKING + "test_a_plan_of_groups_counts_each_prompt_once_in_a_micro_batch",
    ),
    Fault(
        "several rows that are moved at once are the longest ones",
        "meshrl/train/batch_plan.py::_move",
        "sorted(group) => group",
        _PACKING + "test_rows_of_large_groups_are_moved_to_other_ranks_without_more_micro_batches[512-77]",
    ),
    Fault(
        "files of a checkpoint are not compared with their hashes",
        "meshrl/train/checkpoint_files.py::require_as_written",
        "digest.hexdigest() != fact.blake2b => False",
        _CHECKPOINT_RESHARD + "test_a_damaged_checkpoint_is_refused_by_every_rank_before_anything_is_changed"
        "[a flipped bit of a tensor]",
    ),
    Fault(
        "the gradient is FSDP's mean over ranks instead of the sum",
        "meshrl/train/engine.py::TrainEngine.forward_backward",
        "total * self.coordinates.loss_scale => total",
        "tests/dist/test_equality.py::test_the_gradient_does_not_depend_on_ranks_micro_batches_or_packs[2-fp32]",
    ),
    Fault(
        "rows with an advantage get no backward pass",
        "meshrl/train/engine.py::TrainEngine.forward_backward",
        "at >= num_scored => at > num_scored",
        _ROWS_WITHOUT_GRADIENT + "test_they_are_scored_only_and_nothing_else_changes",
    ),
    Fault(
        "the optimizer steps with a gradient that is not finite",
        "meshrl/train/engine.py::TrainEngine.optim_step",
        "not np.isfinite(norm) => False",
        "tests/dist/test_optimizer_step.py::test_a_norm_that_is_not_finite_skips_the_step_on_every_rank[1-inf-train0]",
    ),
    Fault(
        "a policy is trained in train mode",
        "meshrl/model/recipe.py::skeleton",
        "lm.eval() => lm.train()",
        "tests/unit/model/test_causal_model.py::test_a_folder_loads_as_it_was_saved[tied-fp32]",
    ),
    Fault(
        "the reference model has the adapters too",
        "meshrl/train/engine.py::TrainEngine.forward",
        "nullcontext() if adapter else without_adapters(self.model.lm) => nullcontext()",
        _LORA + "test_only_adapters_are_trained_and_without_them_the_model_is_the_reference[1-fp32]",
    ),
    Fault(
        "tokens without a weight are trained",
        "meshrl/train/packing.py::pack",
        'mask & (columns["loss_weight"].numpy() != 0) => mask',
        _PACKING + "test_trained_tokens_are_in_the_mask_and_have_a_weight",
    ),
    Fault(
        "the host waits for the number of trained tokens",
        "meshrl/algo/losses.py::_policy_loss",
        "batch.trained => (batch.mask & (batch.loss_weight != 0)).nonzero()[:, 0]",
        "tests/unit/train/test_micro_batch_on_meta.py::test_each_micro_batch_adds_the_same",
    ),
    Fault(
        "a step of decode copies each array by itself",
        "meshrl/rollout/embedded/decode_graph.py::StepArrays._sent",
        "upload(self._arrays, self._device) => [x.to(self._device) for x in self._arrays]",
        "tests/unit/rollout/test_engine_on_meta.py::test_rows_in_two_tiles_need_no_further_copy",
    ),
    Fault(
        "logprobs are not shifted by one token",
        "meshrl/train/packing.py::pack",
        "np.arange(-1, cu[-1] - 1) => np.arange(0, cu[-1])",
        _CAUSAL_MODEL + "test_the_logprob_of_a_token_comes_from_the_position_before_it",
    ),
    Fault(
        "the longest list of modules is taken for the blocks",
        "meshrl/model/parts.py::parts_of",
        "next((each for each in lists if len(each) == text.num_hidden_layers), None) => max(lists, key=len)",
        "tests/unit/model/test_parts.py::test_a_list_of_more_modules_than_the_model_has_layers_is_not_taken_for_its_blocks",
    ),
    Fault(
        "positions count through the entire pack",
        "meshrl/train/packing.py::pack",
        "positions(np.array([p.start for p in pieces]), np.array(lengths)) => np.arange(cu[-1])",
        _PACKING + "test_rows_lie_end_to_end_and_each_starts_at_position_0",
    ),
    Fault(
        "a dummy micro-batch trains",
        "meshrl/train/packing.py::pack",
        'bare_row("dummy", [0, 0], scored=False) => bare_row("dummy", [0, 0], scored=True)',
        _PACKING + "test_a_dummy_is_a_batch_that_trains_nothing",
    ),
    Fault(
        "a model with random scores is accepted",
        "meshrl/train/packing.py::require_independent_rows",
        "not np.array_equal(first, again) => first.shape != again.shape",
        _START_PROBE + "test_a_model_that_scores_at_random_in_eval_mode_is_refused_at_start",
    ),
    Fault(
        "the start probe accepts leaks between rows of up to ten nats",
        "meshrl/train/packing.py::require_independent_rows",
        "difference <= TOLERANCE_NATS => difference <= 10",
        _START_PROBE + "test_a_model_whose_packed_rows_see_each_other_is_refused_at_start[qwen3_moe-attention-bf16]",
    ),
    Fault(
        "replicas count twice in the disk space of a checkpoint",
        "meshrl/train/state.py::state_bytes",
        "replica(p)[0] == 0 => replica(p)[0] >= 0",
        _CHECKPOINT_RESHARD + "test_replicas_are_saved_once_and_another_strategy_reads_them[NO_SHARD]",
    ),
    Fault(
        "buffers that the forward reads are not sent",
        "meshrl/train/weights.py::rank_weights",
        "[*parameters.items(), *buffers.items()] => parameters.items()",
        _BUFFERS_OUT + "test_a_sampler_gets_the_buffers_that_its_forward_reads_and_proves_them[2-deepseek_v3-False]",
    ),
    Fault(
        "attention runs over the entire pack",
        "meshrl/model/attention.py::PackedAttention.__init__",
        "self.num_tokens = cu_seqlens[-1]"
        " => self.num_tokens = cu_seqlens[-1]; cu_seqlens, parents = [0, cu_seqlens[-1]], None",
        _PACKED_ATTENTION + "test_changing_one_row_changes_no_bit_of_another[qwen2-float32]",
    ),
    Fault(
        "an answer does not see its shared prompt",
        "meshrl/model/attention.py::PackedAttention.__init__",
        "(cu_seqlens, parents, device) => (cu_seqlens, None, device)",
        _PACKED_ATTENTION + "test_answers_after_a_shared_prompt_equal_plain_transformers_one_row_at_a_time[qwen2]",
    ),
    Fault(
        "answers in one batch all see the prompt of the first",
        "meshrl/model/attention.py::PackedAttention._buckets",
        "torch.arange(prefixes[s].start, prefixes[s].stop)"
        " => torch.arange(prefixes[members[0]].start, prefixes[members[0]].stop)",
        _PACKED_ATTENTION + "test_rows_padded_to_full_vectors_equal_the_definition_in_bf16[prompts_of_equal_length]",
    ),
    Fault(
        "every model.attn_implementation is auto",
        "meshrl/model/attention.py::PackedAttention._choose",
        'return spec.implementation, "" => return "padded", ""',
        _IMPLEMENTATIONS + "test_sdpa_and_eager_run_the_kernels_of_their_names",
    ),
    Fault(
        "a sampled token does not see the attention sink of its head",
        "meshrl/rollout/embedded/cached_attention.py::DecodeAttention.attend",
        "probabilities(scores, spec.sinks, kv_heads) => torch.softmax(scores, dim=-1)",
        _OF_FAMILIES + "test_greedy_answers_are_those_of_generate[granite_swa]",
    ),
    Fault(
        "a position bias counts from the start of a tile",
        "meshrl/rollout/embedded/cached_attention.py::DecodeAttention._scores",
        "torch.arange(columns.start, columns.stop, device=q.device)"
        " => torch.arange(columns.stop - columns.start, device=q.device)",
        _OF_FAMILIES + "test_position_biases_reach_over_the_tiles_of_the_cache",
    ),
    Fault(
        "a layer with a state computes packed rows as one row",
        "meshrl/model/attention.py::PackedAttention.mix",
        "part.unflatten(0, (b.rows, -1)) => part[None]",
        _PACKED_ATTENTION + "test_changing_one_row_changes_no_bit_of_another[lfm2-float32]",
    ),
    Fault(
        "an answer's states do not begin with those of its prompt",
        "meshrl/model/attention.py::PackedAttention.mix",
        "part.unflatten(0, (b.rows, -1)) => part.unflatten(0, (b.rows, -1)) * (torch.arange(b.prefix + b.length) "
        ">= b.prefix)[:, None]",
        _FAMILIES + "[lfm2]",
    ),
    Fault(
        "a block that is computed again has the rows of the newest pack",
        "meshrl/model/attention.py::ContextCache.__init__",
        "self.context = context => ContextCache.context = context",
        _OF_FAMILIES + "test_a_checkpointed_block_is_computed_again_with_the_rows_of_its_own_pack[bloom]",
    ),
    Fault(
        "activation checkpointing keeps every activation",
        "meshrl/parallel/fsdp.py::checkpoint_blocks",
        "partial(checkpoint, block.forward, use_reentrant=False) => partial(block.forward)",
        _START_PROBE + "test_checkpointed_blocks_are_computed_twice_with_a_backward_pass[checkpointed]",
    ),
    Fault(
        "the fast decoder reads a position from the device in each step",
        "meshrl/model/fast_decoder.py::FastDecoder._rotation",
        "self._num_positions > TABLE_POSITIONS => int(position_ids.max()) >= TABLE_POSITIONS",
        "tests/unit/rollout/test_engine_on_meta.py::test_a_step_of_decode_waits_for_the_device_once",
    ),
    Fault(
        "the fast decoder leaves the adapters out",
        "meshrl/model/fast_decoder.py::_FusedLinear.__init__",
        "adapter is not None => adapter is not None and start < 0",
        "tests/unit/model/test_fast_decoder.py::test_a_model_with_adapters_is_computed_as_its_modules_do",
    ),
    Fault(
        "an adapter's config loads another model",
        "meshrl/model/folder.py::check_folder",
        "adapter.exists() => not folder.exists()",
        _FUZZ_MODEL + "test_a_folder_does_not_load_another_model",
    ),
    Fault(
        "each expert of the files is read from the first expert's place",
        "meshrl/model/hub_names.py::_blocks",
        "starts[dim] - view.offsets[dim] => 0 * starts[dim]",
        _HUB_NAMES + "test_boxes_of_hub_tensors_are_the_files_that_transformers_writes[glm4_moe]",
    ),
    Fault(
        "the names of gate and up are swapped",
        "meshrl/model/hub_names.py::HubNames._reverted",
        "_view(hub_name, tensor, shapes[source])"
        ' => _view(hub_name.replace("gate_p", "?").replace("up_p", "gate_p").replace("?", "up_p"), '
        "tensor, shapes[source])",
        _HUB_NAMES + "test_boxes_of_hub_tensors_are_the_files_that_transformers_writes",
    ),
    Fault(
        "each expert is sent as the first of its box",
        "meshrl/model/hub_names.py::_blocks",
        "at - start => 0 * (at - start)",
        _HUB_NAMES + "test_a_box_of_several_experts_is_cut_at_its_own_borders",
    ),
    Fault(
        "rotary buffers are rounded to bf16",
        "meshrl/model/recipe.py::cast_parameters",
        "model.parameters() => [*model.parameters(), *model.buffers()]",
        _CAUSAL_MODEL + "test_casting_keeps_buffers_in_fp32_and_ties",
    ),
    Fault(
        "a tied head gets separate memory when a model leaves the meta device",
        "meshrl/model/recipe.py::_tie",
        "setattr(root.get_submodule(owner), leaf, root.get_parameter(name)) => root.get_submodule(owner), leaf",
        _WEIGHT_NAMES + "test_memory_for_a_model_keeps_its_ties_and_buffers[qwen2]",
    ),
    Fault(
        "rotary buffers are uninitialized memory when a model leaves the meta device",
        "meshrl/model/recipe.py::materialize",
        "saved.items() => ()",
        _WEIGHT_NAMES + "test_memory_for_a_model_keeps_its_ties_and_buffers[qwen2]",
    ),
    Fault(
        "a sharded model is not compared with Transformers' own forward",
        "meshrl/model/recipe.py::verify",
        "require_same(differences, name, facts.path, uncut) => pass",
        _STREAMED_LOAD + "test_a_sharded_model_that_scores_differently_is_refused[llama-leak-gives packed rows]",
    ),
    Fault(
        "the loss reads the temperatures from the device",
        "meshrl/model/logprob.py::_ChunkedLogprob.forward",
        'hidden.device.type == "cpu" => True',
        _TRAINER_ON_META + "test_no_step_of_a_layer_waits_for_the_device",
    ),
    Fault(
        "the products of the head are rounded to bf16 on accelerators",
        "meshrl/model/logprob.py::Head.logits",
        "torch.mm(hidden, self.weight.T, out_dtype=wide) => torch.mm(hidden, self.weight.T).to(wide)",
        _TRAINER_ON_META + "test_bf16_rows_take_one_varlen_kernel_a_layer_and_an_fp32_head",
    ),
    Fault(
        "the trainer ignores the temperature",
        "meshrl/model/logprob.py::_ChunkedLogprob.forward",
        "z.div_(temperature[rows, None].to(dtype)) => z",
        _LOGPROB + "test_temperature_divides_the_logits_and_greedy_scores_as_one",
    ),
    Fault(
        "logits are rounded to bf16",
        "meshrl/model/logprob.py::_ChunkedLogprob.forward",
        "head.logits(hidden[part]) => head.logits(hidden[part]).bfloat16().float()",
        _LOGPROB + "test_bf16_models_are_scored_in_fp32",
    ),
    Fault(
        "adapters are merged without their scale",
        "meshrl/model/lora.py::merged_rows",
        "scale => 1.0",
        _LORA + "test_merged_weights_equal_pefts_own_merge_for_any_cuts[2]",
    ),
    Fault(
        "an expert's B is another expert's",
        "meshrl/model/lora.py::_factors",
        "b.view(b.shape[0], -1, num_experts).permute(2, 0, 1) => b.view(b.shape[0], num_experts, -1).permute(1, 0, 2)",
        _LORA_EXPERTS + "test_logits_and_gradients_equal_pefts_own_adapters_of_parameters",
    ),
    Fault(
        "the experts' merged weights stay after a recomputed forward",
        "meshrl/model/lora.py::_add_to_experts",
        "experts.register_forward_hook(_restore, always_call=True) => experts.register_forward_hook(_restore)",
        _LORA_EXPERTS + "test_a_forward_that_raises_leaves_the_frozen_weights",
    ),
    Fault(
        "each rank reads from a wrong row of the files",
        "meshrl/model/stream.py::_contiguous_parts",
        "offsets[0] * step => offsets[0]",
        _STREAMED_LOAD + "test_a_streamed_model_equals_transformers_model_to_the_bit[2-llama untied]",
    ),
    Fault(
        "an expert more than the model has is left to Transformers",
        "meshrl/model/stream.py::_assign",
        "target not in names.computed => target in names.computed",
        _UNLOADED + "[extra expert]",
    ),
    Fault(
        "only the first kind of a folder's faults is reported",
        "meshrl/model/folder.py::require_fillable",
        "[kind for kind in _FAULTS if faults.get(kind)] => [kind for kind in _FAULTS if faults.get(kind)][:1]",
        _UNLOADED + "[truncated shard]",
    ),
    Fault(
        "each replica reads the files",
        "meshrl/model/stream.py::StoredWeights.fill",
        "replica(tensor)[0] == 0 => True",
        _READS_ONCE + "[replicas]",
    ),
    Fault(
        "replicas keep what their memory contained",
        "meshrl/model/stream.py::StoredWeights.fill",
        "send_to_copies(tensor) => replica(tensor)",
        _READS_ONCE + "[replicas]",
    ),
    Fault(
        "a sampler samples with the random values that it has before the first sync",
        "meshrl/rollout/embedded/engine.py::build_embedded_engine",
        'engine._state.end("invalid") => engine._state.trust(0)',
        _READS_ONCE + "[sharded]",
    ),
    Fault(
        "an index of weights names files outside its folder",
        "meshrl/model/folder.py::_by_index",
        "Path(file).name == file => True",
        _FUZZ_MODEL + "test_a_damaged_index_is_refused_and_no_file_outside_is_read",
    ),
    Fault(
        "FSDP2 is assumed to shard a tensor before TP",
        "meshrl/parallel/boxes.py::_order_of_cuts",
        "first + last[::-1] => sorted(first + last)",
        "tests/unit/parallel/test_boxes.py::test_ranges_of_fsdp_over_tp_are_chunks_of_chunks_for_any_number_of_rows",
    ),
    Fault(
        "a block's full parameters are used as this rank's shard",
        "meshrl/parallel/fsdp.py::reshard",
        "isinstance(module, FSDPModule) => module is root",
        _STREAMED_LOAD + "test_every_sharding_strategy_reads_its_own_shards[SHARD_GRAD_OP]",
    ),
    Fault(
        "a checkpoint has the values of parameters from before they were moved to the host",
        "meshrl/train/offload.py::HostMemory.release",
        "self._buffers[key].copy_(_bytes_of(storage)) => self._buffers[key].zero_()",
        "tests/e2e/test_release_memory.py::"
        "test_a_trainer_whose_state_is_on_the_host_while_it_is_not_needed_trains_the_same_to_the_bit",
    ),
    Fault(
        "training changes a checkpoint that is still being written",
        "meshrl/train/checkpoint.py::stage",
        'values.contiguous().to("cpu", copy=copy) => values.contiguous().to("cpu")',
        _CHECKPOINT_RESHARD + "test_training_does_not_change_a_state_that_was_copied[1]",
    ),
    Fault(
        "one rank computes in bf16 without copies of its blocks",
        "meshrl/parallel/compute_dtype.py::compute_in",
        "_wrap(dtype, block, block.modules()) => None",
        "tests/dist/test_compute_dtype.py::test_a_step_in_bf16_equals_that_of_fsdp2_to_the_bit[full-]",
    ),
    Fault(
        "a resume takes any weights as the reference",
        "meshrl/cluster/actors.py::RankWorker.load",
        "engine.load(folder, self._reference()) => engine.load(folder)",
        "tests/e2e/test_changes_at_resume.py::test_weights_that_were_replaced_below_the_reference_end_the_resume",
    ),
]
