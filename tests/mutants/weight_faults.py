"""Faults of the model and its weights: loading, start probe, storage, sync and read-back."""

from __future__ import annotations

from fault import Fault

_BUFFERS = "tests/dist/test_buffers_out.py::"
_HUB = "tests/unit/model/test_hub_names.py::"
_LAYOUT = "tests/unit/sync/test_sync_layout.py::"
_NAMES = "tests/unit/model/test_weight_names.py::"
_PROBE = "tests/dist/test_start_probe.py::"
_RANKS = "tests/unit/sync/test_sync_ranks.py::"
_RECEIVER = "tests/unit/sync/test_sync_receiver.py::"
_RUN = "tests/contract/test_executors.py::"
_SENDER = "tests/unit/sync/test_sync_sender.py::"
_SHARDS = "tests/dist/test_shards_out.py::"
_STREAMED = "tests/dist/test_streamed_load.py::"

WEIGHT_FAULTS = [
    Fault(
        "a policy is trained in train mode",
        "meshrl/train/engine.py",
        "lm.eval()  # for training too",
        "lm.train()  # for training too",
        (_PROBE + "test_models_that_are_random_in_train_mode_are_trained_without_randomness[mixtral-fp32]",),
    ),
    Fault(
        "a model with random scores is accepted",
        "meshrl/train/probe.py",
        "if not np.array_equal(first, again):",
        "if first.shape != again.shape:",
        (_PROBE + "test_a_model_that_scores_at_random_in_eval_mode_is_refused_at_start",),
    ),
    Fault(
        "the start probe accepts leaks between rows of up to ten nats",
        "meshrl/train/probe.py",
        "if not difference <= TOLERANCE_NATS:",
        "if not difference <= 10:",
        (_PROBE + "test_a_model_whose_packed_rows_see_each_other_is_refused_at_start[qwen3_moe-attention-bf16]",),
    ),
    Fault(
        "activation checkpointing keeps every activation",
        "meshrl/model/causal.py",
        "block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        "block.forward = partial(block.forward)",
        (_PROBE + "test_checkpointed_blocks_are_computed_twice_with_a_backward_pass[checkpointed]",),
    ),
    Fault(
        "a server's tensor of another dtype is compared without a cast",
        "meshrl/rollout/server/worker_weights.py",
        "_digest(patch.of_parameter(param).to(self._dtypes[name]))",
        "_digest(patch.of_parameter(param))",
        ("tests/unit/rollout/test_name_map.py::test_a_buffer_is_loaded_and_read_back_in_the_dtype_that_was_sent",),
    ),
    Fault(
        "each rank reads from a wrong row of the files",
        "meshrl/model/stream.py",
        "offsets[0] * step if shape else 0",
        "offsets[0] if shape else 0",
        (_STREAMED + "test_a_streamed_model_equals_transformers_model_to_the_bit[2-llama untied]",),
    ),
    Fault(
        "a tied head gets separate memory when a model leaves the meta device",
        "meshrl/model/load.py",
        "setattr(root.get_submodule(owner), leaf, root.get_parameter(name))",
        "root.get_submodule(owner), leaf",
        (_NAMES + "test_memory_for_a_model_keeps_its_ties_and_buffers[qwen2]",),
    ),
    Fault(
        "rotary buffers are uninitialized memory when a model leaves the meta device",
        "meshrl/model/load.py",
        "module._buffers.update({name: b if b is None else b.to(device) for name, b in saved.items()})",
        "assert saved is not None",
        (
            _NAMES + "test_memory_for_a_model_keeps_its_ties_and_buffers[qwen2]",
            _STREAMED + "test_a_streamed_model_equals_transformers_model_to_the_bit[2-qwen2 tied]",
        ),
    ),
    Fault(
        "each expert of the files is read from the first expert's place",
        "meshrl/model/hub_names.py",
        "starts[dim] - view.offsets[dim]",
        "0 * starts[dim]",
        (
            _NAMES + "test_experts_that_are_separate_in_the_files_are_joined_as_transformers_joins_them",
            "tests/unit/model/test_hub_names.py::test_boxes_of_hub_tensors_are_the_files_that_transformers_writes[glm4_moe]",
        ),
    ),
    Fault(
        "FSDP2 is assumed to shard a tensor before TP",
        "meshrl/parallel/boxes.py",
        "return first + last[::-1]",
        "return sorted(first + last)",
        ("tests/unit/parallel/test_boxes.py::test_ranges_of_fsdp_over_tp_are_chunks_of_chunks_for_any_number_of_rows",),
    ),
    Fault(
        "a sharded model is not compared with Transformers' own forward",
        "meshrl/model/load.py",
        "difference = float(comparison())",
        "difference = 0.0",
        (_STREAMED + "test_a_sharded_model_that_scores_differently_is_refused[llama-leak]",),
    ),
    Fault(
        "released weights stay in the fused matrices",
        "meshrl/rollout/embedded/weights.py",
        "            self._fast.split()\n",
        "            pass\n",
        (
            "tests/unit/rollout/test_embedded_weights.py::"
            "test_released_weights_are_freed_and_restored_into_the_fused_tensors",
        ),
    ),
    Fault(
        "restored weights are not fused again",
        "meshrl/rollout/embedded/weights.py",
        "            self._fast.fuse()\n",
        "            pass\n",
        (
            "tests/unit/rollout/test_embedded_weights.py::"
            "test_released_weights_are_freed_and_restored_into_the_fused_tensors",
        ),
    ),
    Fault(
        "no check finds a parameter that the computation does not use",
        "meshrl/rollout/embedded/weights.py",
        "if joint.get(id(p), p).data_ptr() != p.data_ptr():",
        "if False:",
        (
            "tests/unit/rollout/test_embedded_weights.py::"
            "test_a_parameter_outside_its_fused_tensor_is_found_at_commit[weight]",
        ),
    ),
    Fault(
        "a server's released KV cache wakes up when its weights go to sleep",
        "meshrl/rollout/vllm/memory.py",
        'if "kv_cache" not in parts | before:',
        'if "kv_cache" not in parts:',
        ("tests/unit/rollout/test_vllm_memory.py::test_parts_are_released_one_by_one",),
    ),
    Fault(
        "released memory is not freed",
        "meshrl/rollout/vllm/cpu_build.py",
        "                storage.resize_(0)\n",
        "",
        ("tests/unit/rollout/test_vllm_memory.py::test_on_a_cpu_storages_are_released_and_restored_in_place",),
    ),
    Fault(
        "a server computes with restored weights that have no values yet",
        "meshrl/rollout/server/engine.py",
        "if self._released or self._awaits_sync or",
        "if self._released or",
        ("tests/unit/rollout/test_sglang_engine.py::test_restored_weights_are_used_only_after_their_sync",),
    ),
    Fault(
        "samplers do not release their memory",
        "meshrl/loops/step.py",
        "metrics += await release_samplers(job)",
        "metrics += []",
        ("tests/e2e/test_release_memory.py::test_the_memory_is_free_while_the_gradient_is_computed",),
    ),
    Fault(
        "the fast decoder leaves the adapters out",
        "meshrl/model/fast_decoder.py",
        "            if adapter is not None:\n",
        "            if adapter is not None and start < 0:\n",
        ("tests/unit/model/test_fast_decoder.py::test_a_model_with_adapters_is_computed_as_its_modules_do",),
    ),
    Fault(
        "adapters are merged without their scale",
        "meshrl/model/lora.py",
        "self._a, alpha=self._scale)",
        "self._a)",
        ("tests/dist/test_lora.py::test_merged_weights_equal_pefts_own_merge_for_any_cuts[2]",),
    ),
    Fault(
        "the reference model has the adapters too",
        "meshrl/train/engine.py",
        "nullcontext() if adapter else without_adapters(self.model.lm)",
        "nullcontext()",
        (
            "tests/dist/test_lora.py::test_only_adapters_are_trained_and_without_them_the_model_is_the_reference[1-fp32]",
        ),
    ),
    Fault(
        "the version does not rise",
        "meshrl/cluster/weight_sync.py",
        "trainer.version, trainer.is_synced = version, True",
        "trainer.is_synced = True",
        (
            _RUN
            + "test_a_step_asks_for_no_forward_that_the_algorithm_does_not_need[train.updates_per_step=1-forwards0]",
        ),
    ),
    Fault(
        "replicas count twice in the disk space of a checkpoint",
        "meshrl/train/state.py",
        "for p in trained_weights(lm).values() if replica(p)[0] == 0",
        "for p in trained_weights(lm).values() if replica(p)[0] >= 0",
        (
            "tests/dist/test_checkpoint_reshard.py::test_replicas_are_saved_once_and_another_strategy_reads_them[NO_SHARD]",
        ),
    ),
    Fault(
        "buffers that the forward reads are not sent",
        "meshrl/train/weights.py",
        "for name, full in [*parameters.items(), *buffers.items()]:",
        "for name, full in parameters.items():",
        (_BUFFERS + "test_a_sampler_gets_the_buffers_that_its_forward_reads_and_proves_them[2-deepseek_v3-False]",),
    ),
    Fault(
        "every replica sends its shard",
        "meshrl/cluster/rank_sync.py",
        "if replica and not self._colocated:",
        "if replica < 0:",
        (_SHARDS + "test_every_sharding_strategy_sends_each_shard_once[NO_SHARD-sockets]",),
    ),
    Fault(
        "the base of an adapter is sent each time",
        "meshrl/cluster/rank_sync.py",
        "frozen = self._trainer.frozen() if takes_adapters(self._cfg) else frozenset()",
        "frozen = frozenset[str]()",
        ("tests/e2e/test_lora_run.py::test_only_adapters_are_sent_and_the_sampler_equals_the_trainer[one process]",),
    ),
    Fault(
        "an adapter is added without its scale",
        "meshrl/rollout/server/weights.py",
        "MergedElements(weight, self._held[a], self._held[b], self._scale)",
        "MergedElements(weight, self._held[a], self._held[b], 1.0)",
        ("tests/unit/rollout/test_server_copy.py::test_adapters_are_sent_alone_and_the_server_gets_merged_weights",),
    ),
    Fault(
        "a box is sent by each rank that holds it",
        "meshrl/sync/layout.py",
        "        senders[sender_of[box]].append(box)\n",
        "        for own, boxes in zip(senders, held):\n            own.extend([box] * (box in boxes))\n",
        (_LAYOUT + "test_the_first_rank_sends_what_several_hold",),
    ),
    Fault(
        "overlapping boxes are accepted",
        "meshrl/sync/layout.py",
        "if all(a < b + m and b < a + n for a, n, b, m in zip(box[1], box[2], other[1], other[2])):",
        "if box is other:",
        (_LAYOUT + "test_boxes_that_leave_something_out_or_do_not_fit_are_refused",),
    ),
    Fault(
        "a part of a tensor that no rank holds is accepted",
        "meshrl/sync/layout.py",
        "if held != math.prod(shape):",
        "if held > math.prod(shape):",
        (_LAYOUT + "test_boxes_that_leave_something_out_or_do_not_fit_are_refused",),
    ),
    Fault(
        "the parts of a box have swapped offsets",
        "meshrl/sync/layout.py",
        "start = tuple(a + b for a, b in zip(box.offsets, (*outer, low)))",
        "start = tuple(a + b for a, b in zip(box.offsets, (*outer, low)[::-1]))",
        (_LAYOUT + "test_each_element_of_any_partition_is_sent_once_within_the_limits",),
    ),
    Fault(
        "transfers of all senders together exceed the limit",
        "meshrl/sync/layout.py",
        "layout.transfer_bytes // max(num_senders, 1) // ALIGNMENT_BYTES",
        "layout.transfer_bytes // ALIGNMENT_BYTES",
        (_LAYOUT + "test_each_element_of_any_partition_is_sent_once_within_the_limits",),
    ),
    Fault(
        "senders of one tensor each wait for each other",
        "meshrl/sync/layout.py",
        "for turn in zip_longest(*of_sender.values()) for name in turn if",
        "for turn in of_sender.values() for name in turn if",
        (_LAYOUT + "test_senders_alternate_where_each_tensor_has_one_sender",),
    ),
    Fault(
        "the digest of a part is that of another",
        "meshrl/sync/sender.py",
        "zip(running, values(list(running.values())), strict=True)",
        "zip(running, values(list(running.values()))[::-1], strict=True)",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "sent values are not stored in the base",
        "meshrl/sync/sender.py",
        "            bits_of(before).scatter_(0, found, bits)\n",
        "",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "parts are compared with the first elements of the base",
        "meshrl/sync/sender.py",
        "base[part.first + low : part.first + high]",
        "base[low:high]",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "places of changes count from the wrong start",
        "meshrl/sync/sender.py",
        "indices.append((found + low).int())",
        "indices.append(found.int())",
        (_SENDER + "test_changes_far_inside_a_large_tensor_have_the_right_indices",),
    ),
    Fault(
        "changes are found by value and not by bit",
        "meshrl/sync/sender.py",
        "found, bits = _differing(bits_of(now), bits_of(before))",
        "found = (now != before).nonzero()[:, 0]\n            bits = bits_of(now)[found]",
        (_SENDER + "test_changes_are_exact_in_other_dtypes",),
    ),
    Fault(
        "an interrupted sender keeps its base",
        "meshrl/sync/sender.py",
        "        self.base_version = None  # until the last transfer, the base is a mix of two versions\n",
        "",
        (_SENDER + "test_an_interrupted_sender_has_no_base",),
    ),
    Fault(
        "gaps of a transfer contain old bytes",
        "meshrl/sync/sender.py",
        "            payload[end:at].zero_()\n",
        "",
        (_SENDER + "test_gaps_between_parts_are_zero",),
    ),
    Fault(
        "the changes of a part are read at the offset of the full part",
        "meshrl/sync/delivery.py",
        "            at += aligned(section.numel())\n",
        "            at += aligned(part.num_bytes)\n",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "changes of a tensor that is not contiguous are lost",
        "meshrl/sync/delivery.py",
        "        target.copy_(bits.view(target.dtype).view(target.shape))",
        "        pass",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "a tied head with separate memory is not written",
        "meshrl/sync/receiver.py",
        "writes[source].append(targets[alias])",
        "pass",
        (_SENDER + "test_an_alias_with_memory_of_its_own_is_written_from_its_source",),
    ),
    Fault(
        "a dropped transfer is accepted",
        "meshrl/sync/delivery.py",
        "if self._next < len(transfers):",
        "if self._next < 0:",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[last one dropped-everything]",),
    ),
    Fault(
        "a transfer out of order is accepted",
        "meshrl/sync/delivery.py",
        "number != self._next or number >= len(transfers) or",
        "number >= len(transfers) or",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[twice-changes]",),
    ),
    Fault(
        "the digest of a transfer of changes is not checked",
        "meshrl/sync/delivery.py",
        "self.require(delivery.payload_digest, arrived, delivery.transfer)",
        "self.require(arrived, arrived, delivery.transfer)",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[a bit flipped-changes]",),
    ),
    Fault(
        "the digest of a part is not checked",
        "meshrl/sync/delivery.py",
        "if arrived != sent:",
        "if arrived == -1:",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[a bit flipped-everything]",),
    ),
    Fault(
        "the version is visible before the proof",
        "meshrl/sync/receiver.py",
        "        names = {name: name for name in self.layout.by_name}\n",
        '        names, self._last, self._phase = dict(zip(*[self.layout.by_name] * 2)), expected.version, "idle"\n',
        (_RECEIVER + "test_the_new_version_is_visible_only_after_its_proof",),
    ),
    Fault(
        "a delta is applied to any base",
        "meshrl/sync/receiver.py",
        "if header.base_version is not None and header.base_version != had:",
        "if header.base_version is not None and header.base_version > header.version:",
        (_SENDER + "test_a_delta_on_another_base_is_refused_and_a_full_sync_repairs_it",),
    ),
    Fault(
        "a tensor that is not read back counts as proven",
        "meshrl/sync/receiver.py",
        'return faults + [f"{name} was not read back" for name in left]',
        "return faults",
        (_RECEIVER + "test_an_incomplete_read_back_proves_nothing",),
    ),
    Fault(
        "a tensor at another address counts as read back because its name was",
        "meshrl/sync/receiver.py",
        "if source not in read or read[source][0]() is not tensor:",
        "if source not in read:",
        (_RECEIVER + "test_a_tied_head_with_old_values_is_named_with_their_version",),
    ),
    Fault(
        "a slot is filled again before it was read",
        "meshrl/sync/sockets.py",
        "if self._slots_in_use[slot]:",
        "if self._slots_in_use[slot] and slot < 0:",
        (_RANKS + "test_a_slot_is_not_filled_again_before_it_is_released",),
    ),
    Fault(
        "a receiver needs no token",
        "meshrl/sync/sockets.py",
        "if hmac.compare_digest(token, self._token.encode()) and theirs",
        "if theirs",
        (_RANKS + "test_receivers_without_the_token_or_of_an_earlier_sync_get_nothing",),
    ),
    Fault(
        "changes are sent to a sampler of another version",
        "meshrl/sync/transaction.py",
        "    versions |= {state.version for state in states if state.version is not None}\n",
        "",
        (_RANKS + "test_only_changes_are_sent_if_all_senders_and_samplers_hold_one_version",),
    ),
    Fault(
        "the names of gate and up are swapped",
        "meshrl/model/hub_names.py",
        "_view(hub_name, tensor, shapes[source])",
        '_view(hub_name.replace("gate_p", "?").replace("up_p", "gate_p").replace("?", "up_p"), tensor, shapes[source])',
        (_HUB + "test_boxes_of_hub_tensors_are_the_files_that_transformers_writes",),
    ),
    Fault(
        "each expert is sent as the first of its box",
        "meshrl/model/hub_names.py",
        "part = local[index_of(shared, offsets)]",
        "part = local[index_of(shared, starts)]",
        (_HUB + "test_a_box_of_several_experts_is_cut_at_its_own_borders",),
    ),
]
