"""Faults of the model and its weights: how they are loaded, probed, kept, sent and read back."""

from __future__ import annotations

from fault import Fault

_BUFFERS = "tests/dist/test_buffers_out.py::"
_NAMES = "tests/unit/model/test_weight_names.py::"
_PROBE = "tests/dist/test_start_probe.py::"
_RUN = "tests/contract/test_executors.py::"
_SHARDS = "tests/unit/sync/test_sync_shards.py::"
_STREAMED = "tests/dist/test_streamed_load.py::"
_SYNC = "tests/unit/sync/test_sync_transaction.py::"

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
        "buffers that the forward reads are not sent",
        "meshrl/train/engine.py",
        "            tensors + buffers,\n",
        "            tensors,\n",
        (_BUFFERS + "test_a_sampler_gets_the_buffers_that_its_forward_reads_and_proves_them[2-deepseek_v3-False]",),
    ),
    Fault(
        "each rank sends the first rows of a buffer",
        "meshrl/train/engine.py",
        "slice(*shard_rows(len(full), mesh.get_local_rank(), mesh.size()))",
        "slice(*shard_rows(len(full), 0, mesh.size()))",
        (_BUFFERS + "test_a_sampler_gets_the_buffers_that_its_forward_reads_and_proves_them[2-deepseek_v3-False]",),
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
        "a tied head with memory of its own is not written",
        "meshrl/sync/receive.py",
        "writes[source].append(self._targets[alias])",
        "pass",
        (_SYNC + "test_a_head_with_memory_of_its_own_is_written_too",),
    ),
    Fault(
        "a tied head is not read back",
        "meshrl/sync/receive.py",
        "return {entry.name: entry.name for entry in self.layout.entries} | self.layout.tied",
        "return {entry.name: entry.name for entry in self.layout.entries}",
        (_SYNC + "test_a_tied_head_left_behind_is_named_with_the_version_it_still_has",),
    ),
    Fault(
        "a dropped bucket passes",
        "meshrl/sync/order.py",
        "if arrived < stream.num_buckets:",
        "if arrived < 0:",
        (_SYNC + "test_a_stream_that_was_damaged_is_refused_and_named",),
    ),
    Fault(
        "a bucket's digest is not checked",
        "meshrl/sync/receive.py",
        "if arrived != bucket.digest:",
        "if arrived == -1:",
        (_SYNC + "test_a_stream_that_was_damaged_is_refused_and_named",),
    ),
    Fault(
        "the version is visible before the proof",
        "meshrl/sync/receive.py",
        "began = time.perf_counter()\n        if read_back is None:",
        'began, self._committed, self._phase = 0.0, expected, "idle"\n        if read_back is None:',
        (_SYNC + "test_the_new_version_is_visible_only_after_its_proof",),
    ),
    Fault(
        "a piece's digest is not checked",
        "meshrl/sync/receive.py",
        "if wanted is not None and arrived != wanted:",
        "if wanted is not None and arrived == -1:",
        (_SHARDS + "test_a_damaged_stream_is_refused_and_named",),
    ),
    Fault(
        "a delta lands on any base",
        "meshrl/sync/receive.py",
        "if header.base_version is not None and header.base_version != had:",
        "if header.base_version is not None and header.base_version > header.version:",
        (_SHARDS + "test_a_delta_on_another_base_is_refused_and_everything_heals",),
    ),
    Fault(
        "what was sent is not remembered",
        "meshrl/sync/shards.py",
        "            bits_of(base).scatter_(0, found, bits)\n",
        "",
        (_SHARDS + "test_shards_and_then_changes_arrive_to_the_bit",),
    ),
    Fault(
        "places of changes count from the wrong start",
        "meshrl/sync/shards.py",
        "places.append((found + low[1]).int())",
        "places.append(found.int())",
        (_SHARDS + "test_changes_far_inside_a_large_tensor_land_where_they_belong",),
    ),
    Fault(
        "changes are told by value and not by bit",
        "meshrl/sync/shards.py",
        "found, bits = _differing(bits_of(now), bits_of(base))",
        "found = (now != base).nonzero()[:, 0]\n            bits = bits_of(now)[found]",
        (_SHARDS + "test_changes_are_exact_in_other_dtypes",),
    ),
    Fault(
        "an interrupted sender keeps its base",
        "meshrl/sync/shards.py",
        "        self.base_version = None\n        return {entry.name",
        "        return {entry.name",
        (_SHARDS + "test_a_sender_that_was_interrupted_has_no_base",),
    ),
    Fault(
        "a tensor of another place counts as read because its name was",
        "meshrl/sync/expected.py",
        "if source not in read or read[source][0]() is not tensor:",
        "if source not in read:",
        (
            "tests/unit/sync/test_sync_transaction.py::test_a_tied_head_left_behind_is_named_with_the_version_it_still_has",
        ),
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
        "an adapter is added without its scale",
        "meshrl/rollout/foreign/adapted.py",
        "Adapter(held[a], held[b], self._scale)",
        "Adapter(held[a], held[b], 1.0)",
        ("tests/unit/rollout/test_adapted_weights.py::test_adapters_alone_come_and_the_sum_goes_on",),
    ),
    Fault(
        "adapters are added to a base that a release took away",
        "meshrl/rollout/foreign/adapted.py",
        """            self._held.cancel()
        super().drop()""",
        "            pass\n        super().drop()",
        ("tests/unit/rollout/test_adapted_weights.py::test_adapters_alone_are_refused_while_no_base_is_there",),
    ),
    Fault(
        "nothing is lent",
        "meshrl/loops/colocated.py",
        "metrics += await lend(job)",
        "metrics += []",
        ("tests/e2e/test_release_memory.py::test_the_memory_is_free_while_the_gradient_is_computed",),
    ),
    Fault(
        "a bucket without changes has no place",
        "meshrl/sync/transport.py",
        "if bucket.payload.numel() and bucket.payload.data_ptr()",
        "if bucket.payload.data_ptr()",
        ("tests/e2e/test_lora_run.py::test_adapters_alone_travel_and_the_sampler_is_the_trainer[split]",),
    ),
    Fault(
        "the base of an adapter is sent each time",
        "meshrl/train/outgoing.py",
        "frozen = frozenset() if self._merged else self._trainer.frozen",
        "frozen = frozenset()",
        ("tests/e2e/test_lora_run.py::test_adapters_alone_travel_and_the_sampler_is_the_trainer[one process]",),
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
        "every replica sends its shard",
        "meshrl/train/outgoing.py",
        'if self._trainer.mesh["dp_replicate"].get_local_rank():',
        'if self._trainer.mesh["dp_replicate"].get_local_rank() < 0:',
        ("tests/dist/test_shards_out.py::test_every_sharding_strategy_sends_each_shard_once[NO_SHARD-rings]",),
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
]
