"""Faults of the model and its weights: how they are loaded, probed, kept, sent and read back."""

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
        (_PROBE + "test_models_that_are_random_in_train_mode_train_the_network_that_is_sampled[mixtral-fp32]",),
    ),
    Fault(
        "a model may score at random",
        "meshrl/train/probe.py",
        "if not np.array_equal(first, again):",
        "if first.shape != again.shape:",
        (_PROBE + "test_a_model_that_scores_at_random_in_eval_mode_is_refused_at_start",),
    ),
    Fault(
        "the start probe overlooks leaks of up to ten nats",
        "meshrl/train/probe.py",
        "if not difference <= SAME_NATS:",
        "if not difference <= 10:",
        (_PROBE + "test_a_model_whose_packed_rows_see_each_other_is_refused_at_start[qwen3_moe-attention-bf16]",),
    ),
    Fault(
        "activation checkpointing keeps every activation",
        "meshrl/model/causal.py",
        "block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        "block.forward = partial(block.forward)",
        (_PROBE + "test_checkpointed_blocks_are_computed_twice_where_there_is_a_backward_pass[checkpointed]",),
    ),
    Fault(
        "what a server keeps in another dtype is compared as it lies",
        "meshrl/rollout/foreign/resident.py",
        "_digest(patch.inside(param).to(self._dtypes[name]))",
        "_digest(patch.inside(param))",
        ("tests/unit/rollout/test_name_map.py::test_a_buffer_is_loaded_and_read_back_in_the_dtype_that_was_sent",),
    ),
    Fault(
        "each rank reads from a wrong row of the files",
        "meshrl/model/stream.py",
        "offsets[0] * step if shape else 0",
        "offsets[0] if shape else 0",
        (_STREAMED + "test_a_streamed_model_equals_the_whole_one_to_the_bit[2-llama untied]",),
    ),
    Fault(
        "a tied head gets memory of its own when a model leaves the meta device",
        "meshrl/model/load.py",
        "setattr(root.get_submodule(module), leaf, root.get_parameter(name))",
        "root.get_submodule(module), leaf",
        (_NAMES + "test_memory_for_a_model_keeps_its_ties_and_buffers[qwen2]",),
    ),
    Fault(
        "rotary buffers are what memory holds when a model leaves the meta device",
        "meshrl/model/load.py",
        "module._buffers.update({name: b if b is None else b.to(device) for name, b in kept.items()})",
        "assert kept is not None",
        (
            _NAMES + "test_memory_for_a_model_keeps_its_ties_and_buffers[qwen2]",
            _STREAMED + "test_a_streamed_model_equals_the_whole_one_to_the_bit[2-qwen2 tied]",
        ),
    ),
    Fault(
        "each expert of the files is read from the first expert's place",
        "meshrl/model/hub_names.py",
        "starts[dim] - view.offsets[dim]",
        "0 * starts[dim]",
        (
            _NAMES + "test_experts_that_lie_apart_in_the_files_are_joined_as_transformers_joins_them",
            "tests/unit/model/test_hub_names.py::test_boxes_of_hub_tensors_are_the_files_that_transformers_writes[glm4_moe]",
        ),
    ),
    Fault(
        "FSDP2 is taken to cut a tensor before TP",
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
        "lent weights stay in the products that join them",
        "meshrl/rollout/embedded/weights.py",
        "            self._lean.split()\n",
        "            pass\n",
        (
            "tests/unit/rollout/test_embedded_weights.py::"
            "test_lent_weights_leave_nothing_behind_and_come_back_into_what_is_computed_with",
        ),
    ),
    Fault(
        "weights that come back are not joined again",
        "meshrl/rollout/embedded/weights.py",
        "            self._lean.fuse()\n",
        "            pass\n",
        (
            "tests/unit/rollout/test_embedded_weights.py::"
            "test_lent_weights_leave_nothing_behind_and_come_back_into_what_is_computed_with",
        ),
    ),
    Fault(
        "nobody looks whether a parameter is what is multiplied",
        "meshrl/rollout/embedded/weights.py",
        "if joint.get(id(p), p).data_ptr() != p.data_ptr():",
        "if False:",
        (
            "tests/unit/rollout/test_embedded_weights.py::"
            "test_a_parameter_that_nothing_multiplies_any_more_is_found_at_commit[weight]",
        ),
    ),
    Fault(
        "a server's released cache wakes up when its weights fall asleep",
        "meshrl/rollout/vllm/memory.py",
        'if "kv_cache" not in parts | before:',
        'if "kv_cache" not in parts:',
        ("tests/unit/rollout/test_vllm_memory.py::test_parts_are_released_one_by_one",),
    ),
    Fault(
        "released memory stays where it is",
        "meshrl/rollout/vllm/cpu_build.py",
        "                storage.resize_(0)\n",
        "",
        ("tests/unit/rollout/test_vllm_memory.py::test_on_a_cpu_tensors_are_emptied_in_place_and_filled_again",),
    ),
    Fault(
        "a server computes with restored weights that have no values yet",
        "meshrl/rollout/server/engine.py",
        "if self._released or self._awaits_sync or",
        "if self._released or",
        ("tests/unit/rollout/test_sglang_engine.py::test_restored_weights_are_computed_with_only_after_their_sync",),
    ),
    Fault(
        "nothing is lent",
        "meshrl/loops/colocated.py",
        "metrics += await lend(job)",
        "metrics += []",
        ("tests/e2e/test_release_memory.py::test_the_memory_is_free_while_the_gradient_is_computed",),
    ),
    Fault(
        "the lean forward leaves the adapters out",
        "meshrl/model/lean.py",
        "            if adapter is not None:\n",
        "            if adapter is not None and start < 0:\n",
        ("tests/unit/model/test_lean_decoder.py::test_an_adapted_model_is_computed_as_its_modules_do",),
    ),
    Fault(
        "adapters are merged without their scale",
        "meshrl/model/lora.py",
        "self._a, alpha=self._scale)",
        "self._a)",
        ("tests/dist/test_lora.py::test_merged_rows_are_those_of_pefts_own_merge_wherever_they_are_cut[2]",),
    ),
    Fault(
        "the reference model has the adapters too",
        "meshrl/train/engine.py",
        "nullcontext() if adapter else without_adapters(self.model.lm)",
        "nullcontext()",
        ("tests/dist/test_lora.py::test_adapters_train_the_base_stays_and_without_them_it_is_the_reference[1-fp32]",),
    ),
    Fault(
        "the version does not rise",
        "meshrl/cluster/groups.py",
        "trainer.version, trainer.is_synced = version, True",
        "trainer.is_synced = True",
        (
            _RUN
            + "test_a_step_asks_for_no_forward_that_the_algorithm_does_not_need[train.updates_per_step=1-forwards0]",
        ),
    ),
    Fault(
        "replicas count twice in the room that a checkpoint takes",
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
        ("tests/e2e/test_lora_run.py::test_adapters_alone_travel_and_the_sampler_is_the_trainer[one process]",),
    ),
    Fault(
        "an adapter is added without its scale",
        "meshrl/rollout/foreign/weights.py",
        "MergedElements(weight, self._held[a], self._held[b], self._scale)",
        "MergedElements(weight, self._held[a], self._held[b], 1.0)",
        ("tests/unit/rollout/test_server_copy.py::test_adapters_come_alone_and_the_server_gets_the_sum",),
    ),
    Fault(
        "a box is sent by each rank that holds it",
        "meshrl/sync/layout.py",
        "        senders[sender_of[box]].append(box)\n",
        "        for own, boxes in zip(senders, held):\n            own.extend([box] * (box in boxes))\n",
        (_LAYOUT + "test_of_replicas_the_first_rank_sends",),
    ),
    Fault(
        "boxes may overlap",
        "meshrl/sync/layout.py",
        "if all(a < b + m and b < a + n for a, n, b, m in zip(box[1], box[2], other[1], other[2])):",
        "if box is other:",
        (_LAYOUT + "test_boxes_that_leave_something_out_or_do_not_fit_are_refused",),
    ),
    Fault(
        "a part of a tensor may be held by no rank",
        "meshrl/sync/layout.py",
        "if held != math.prod(shape):",
        "if held > math.prod(shape):",
        (_LAYOUT + "test_boxes_that_leave_something_out_or_do_not_fit_are_refused",),
    ),
    Fault(
        "the parts of a box lie at swapped offsets",
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
        "            return turns[sender] if alone else 0",
        "            return 0",
        (_LAYOUT + "test_senders_take_turns_where_each_tensor_has_one_sender",),
    ),
    Fault(
        "the digest of a part is that of another",
        "meshrl/sync/sender.py",
        "digests = self._digested(transfer.parts, running).values()",
        "digests = self._digested(transfer.parts, running[::-1]).values()",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "what was sent is not remembered",
        "meshrl/sync/sender.py",
        "            bits_of(before).scatter_(0, found, bits)\n",
        "",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "parts are compared with the first elements of what was sent",
        "meshrl/sync/sender.py",
        "base[part.first + low : part.first + high]",
        "base[low:high]",
        (_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",),
    ),
    Fault(
        "places of changes count from the wrong start",
        "meshrl/sync/sender.py",
        "places.append((found + low).int())",
        "places.append(found.int())",
        (_SENDER + "test_changes_far_inside_a_large_tensor_land_where_they_belong",),
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
        "        self.base_version = None  # until the last transfer, the base is of two versions\n",
        "",
        (_SENDER + "test_a_sender_that_was_interrupted_has_no_base",),
    ),
    Fault(
        "gaps of a transfer carry what lay there before",
        "meshrl/sync/sender.py",
        "            payload[end : part.at].zero_()\n",
        "",
        (_SENDER + "test_gaps_between_parts_carry_zeros_and_not_what_lay_there_before",),
    ),
    Fault(
        "the changes of a part are looked for where the full part would lie",
        "meshrl/sync/delivery.py",
        "at = part.at if self.counts is None else at",
        "at = part.at",
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
        "a tied head with memory of its own is not written",
        "meshrl/sync/receiver.py",
        "writes[source].append(targets[alias])",
        "pass",
        (_SENDER + "test_an_alias_with_memory_of_its_own_is_written_from_its_source",),
    ),
    Fault(
        "a dropped transfer passes",
        "meshrl/sync/receiver.py",
        "if self._next < len(transfers):",
        "if self._next < 0:",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[last one dropped-everything]",),
    ),
    Fault(
        "a transfer may be another than the next one",
        "meshrl/sync/receiver.py",
        "number != self._next or number >= len(transfers) or",
        "number >= len(transfers) or",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[twice-changes]",),
    ),
    Fault(
        "the digest of a transfer of changes is not checked",
        "meshrl/sync/receiver.py",
        "if arrived != delivery.payload_digest:",
        "if arrived == -1:",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[a bit flipped-changes]",),
    ),
    Fault(
        "the digest of a part is not checked",
        "meshrl/sync/receiver.py",
        "if arrived != sent:",
        "if arrived == -1:",
        (_RECEIVER + "test_damaged_transfers_are_refused_and_named[a bit flipped-everything]",),
    ),
    Fault(
        "the version is visible before the proof",
        "meshrl/sync/receiver.py",
        "began = time.perf_counter()\n        if read_back is None:",
        'began, self._committed, self._phase = 0.0, expected, "idle"\n        if read_back is None:',
        (_RECEIVER + "test_the_new_version_is_visible_only_after_its_proof",),
    ),
    Fault(
        "a delta lands on any base",
        "meshrl/sync/receiver.py",
        "if header.base_version is not None and header.base_version != had:",
        "if header.base_version is not None and header.base_version > header.version:",
        (_SENDER + "test_a_delta_on_another_base_is_refused_and_a_full_sync_repairs_it",),
    ),
    Fault(
        "a tensor that is not read back counts as proven",
        "meshrl/sync/expected.py",
        'faults += [f"{name} was not read back" for name in left]',
        "faults += []",
        (_RECEIVER + "test_an_incomplete_read_back_proves_nothing",),
    ),
    Fault(
        "a tensor of another place counts as read because its name was",
        "meshrl/sync/expected.py",
        "if source not in read or read[source][0]() is not tensor:",
        "if source not in read:",
        (_RECEIVER + "test_a_tied_head_left_behind_is_named_with_the_version_it_still_has",),
    ),
    Fault(
        "a slot is filled again before it was taken",
        "meshrl/sync/sockets.py",
        "if self._not_taken[slot]:",
        "if self._not_taken[slot] and slot < 0:",
        (_RANKS + "test_a_slot_is_not_filled_again_before_it_was_taken",),
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
        "gate and up have each other's name",
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
