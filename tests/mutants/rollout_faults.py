"""Faults of the samplers: drawn tokens, versions, stop strings, received weights, released memory."""

from __future__ import annotations

from fault import Fault

_EMBEDDED_SAMPLER = "tests/unit/rollout/test_embedded_sampler.py::"
_STATE_ROWS = "tests/unit/rollout/test_state_rows.py::"
_EMBEDDED_WEIGHTS = "tests/unit/rollout/test_embedded_weights.py::"
_ENDPOINT_ENGINE = "tests/unit/rollout/test_endpoint_engine.py::"
_NAME_MAP = "tests/unit/rollout/test_name_map.py::"
_SGLANG_CLIENT = "tests/unit/rollout/test_sglang_client.py::"
_STOP_STRINGS = "tests/unit/rollout/test_stop_strings.py::"
_VLLM_MEMORY = "tests/unit/rollout/test_vllm_memory.py::"

_ROUTES = "tests/unit/rollout/test_recorded_routes.py::"

FAULTS = [
    Fault(
        "recorded experts do not move with their row",
        "meshrl/rollout/embedded/kv_cache.py::KVStore.copy_rows",
        "source.layers.items() => [item for item in source.layers.items() if item[0] >= 0]",
        _ROUTES + "test_each_token_has_the_experts_that_computed_it",
    ),
    Fault(
        "an aborted turn has the experts of the row that moved to its place",
        "meshrl/rollout/embedded/engine.py::EmbeddedEngine._routes_of",
        "self._scheduler.running.index(s) => len(self._scheduler.running) - 1",
        _ROUTES + "test_an_aborted_and_continued_turn_has_them_except_at_the_last_token_of_each_part",
    ),
    Fault(
        "a continued turn has the experts of its prefix as those of its output",
        "meshrl/rollout/embedded/engine.py::EmbeddedEngine._routes_of",
        "np.delete(padded, slice(first, first + s.first_position), axis=0) => padded[: len(padded) - s.first_position]",
        _ROUTES + "test_an_aborted_and_continued_turn_has_them_except_at_the_last_token_of_each_part",
    ),
    Fault(
        "experts are recorded in 8 bits",
        "meshrl/model/routing.py::Routing._route",
        "selected.to(torch.int16) => selected.to(torch.uint8).to(torch.int16)",
        _ROUTES + "test_each_token_has_the_experts_that_computed_it",
    ),
    Fault(
        "an embedded engine ignores model.router_dtype",
        "meshrl/rollout/embedded/engine.py::build_embedded_engine",
        "DTYPES.get(model_cfg.router_dtype) => None",
        "tests/dist/test_routers.py::test_routers_in_fp32_are_the_same_in_trainer_and_sampler",
    ),
    Fault(
        "a continued turn of an endpoint repeats its random numbers",
        "meshrl/rollout/completions.py::CompletionsDialect._events",
        "continuation_seed(request) => request.seed",
        _ENDPOINT_ENGINE + "test_a_continuation_is_sampled_with_another_seed",
    ),
    Fault(
        "a folder that the server did not load counts as a version",
        "meshrl/rollout/completions.py::CompletionsDialect._reload",
        'answer.get("success") is not True => False',
        _ENDPOINT_ENGINE + "test_a_folder_that_is_not_loaded_ends_the_sync[reload1-success]",
    ),
    Fault(
        "KV caches of old weights are used after a sync",
        "meshrl/rollout/embedded/engine.py::EmbeddedEngine.begin",
        "self.drop_caches() => pass",
        _EMBEDDED_WEIGHTS + "test_weights_may_change_under_running_requests",
    ),
    Fault(
        "answers wait for the next decoding step",
        "meshrl/rollout/embedded/engine.py::EmbeddedEngine._run",
        "await asyncio.sleep(0); await asyncio.sleep(0) => await asyncio.sleep(0)",
        _EMBEDDED_WEIGHTS + "test_answers_are_sent_before_the_next_step",
    ),
    Fault(
        "the acknowledgement of a sync waits for a decoding step",
        "meshrl/rollout/embedded/engine.py::EmbeddedEngine._run",
        "version != self._state.version => version is None",
        _EMBEDDED_WEIGHTS + "test_answers_are_sent_before_the_next_step",
    ),
    Fault(
        "the fp32 copy of the head is not replaced by a sync",
        "meshrl/rollout/embedded/runner.py::Runner.flush",
        "self._head = None => pass",
        _EMBEDDED_WEIGHTS + "test_no_copy_of_the_old_weights_survives_a_sync_in_bf16",
    ),
    Fault(
        "running requests keep their states through a sync",
        "meshrl/rollout/embedded/engine.py::EmbeddedEngine.begin",
        "self.drop_caches() => pass",
        _STATE_ROWS + "test_no_state_survives_a_sync[mamba2]",
    ),
    Fault(
        "the states of a row stay behind when it moves",
        "meshrl/rollout/embedded/kv_cache.py::KVStore.copy_states",
        "target[new_rows] = taken[old_rows] => pass",
        _STATE_ROWS + "test_rows_keep_their_states_when_they_move[lfm2]",
    ),
    Fault(
        "a row has the states of another row",
        "meshrl/rollout/embedded/cached_attention.py::PrefillAttention.mix",
        "enumerate(members) => enumerate(reversed(members))",
        _STATE_ROWS + "test_rows_keep_their_states_when_they_move[mamba2]",
    ),
    Fault(
        "the states after a context are those after its padding",
        "meshrl/rollout/embedded/cached_attention.py::PrefillAttention.mix",
        "torch.stack([contexts[i] for i in members]) => torch.nn.functional.pad(torch.stack([contexts[i] for i in "
        "members]), (0, 0, 0, 1))",
        _STATE_ROWS + "test_rows_keep_their_states_when_they_move[qwen3_next]",
    ),
    Fault(
        "released memory keeps the states",
        "meshrl/rollout/embedded/kv_cache.py::KVStore.clear",
        "self.layers, self.states = {}, {} => self.layers = {}",
        _STATE_ROWS + "test_the_memory_of_states_is_counted_and_freed",
    ),
    Fault(
        "all rows are drawn with one seed",
        "meshrl/rollout/embedded/sampler.py::uniforms",
        "seeds ^ mix64(positions.astype(np.uint64)) => seeds[:1] ^ mix64(positions.astype(np.uint64))",
        _EMBEDDED_SAMPLER + "test_a_draw_does_not_depend_on_the_other_rows",
    ),
    Fault(
        "the sampler's logprobs ignore the temperature",
        "meshrl/rollout/embedded/sampler.py::draw",
        "(z.gather(1, tokens[:, None]) - lse)[:, 0].clamp_(max=0)"
        " => torch.log_softmax(z * rows.temperature, -1).gather(1, tokens[:, None])[:, 0]",
        _EMBEDDED_SAMPLER + "test_logprobs_are_those_of_the_tempered_distribution_and_draws_follow_it",
    ),
    Fault(
        "released weights stay in the fused matrices",
        "meshrl/rollout/embedded/weights.py::EngineWeights.release",
        "self._fast.split() => pass",
        _EMBEDDED_WEIGHTS + "test_released_weights_are_freed_and_restored_into_the_fused_tensors",
    ),
    Fault(
        "restored weights are not fused again",
        "meshrl/rollout/embedded/weights.py::EngineWeights.restore",
        "self._fast.fuse() => pass",
        _EMBEDDED_WEIGHTS + "test_released_weights_are_freed_and_restored_into_the_fused_tensors",
    ),
    Fault(
        "no check finds a parameter that the computation does not use",
        "meshrl/rollout/embedded/weights.py::EngineWeights.read_back",
        "joint.get(id(p), p).data_ptr() != p.data_ptr() => False",
        _EMBEDDED_WEIGHTS + "test_a_parameter_outside_its_fused_tensor_is_found_at_commit[weight]",
    ),
    Fault(
        "tokens of mixed weights count as tokens of the last version",
        "meshrl/rollout/server/answer.py::ServerAnswer._token_versions",
        'versions = versions[: span["start"]] => versions[span["start"] : span["end"]] = max(self._versions.values())',
        "tests/unit/rollout/test_server_answer.py::test_tokens_of_mixed_weights_are_dropped_with_their_most_likely_tokens",
    ),
    Fault(
        "a prompt that the server rendered again goes unnoticed",
        "meshrl/rollout/server/answer.py::ServerAnswer._check_context",
        "part.context != sent and not (self._has_context and part.context is None)"
        " => part.context is None and not self._has_context",
        _SGLANG_CLIENT + "test_an_incomplete_answer_is_refused[echo]",
    ),
    Fault(
        "tokens that a server samples after a stop string are trained",
        "meshrl/rollout/server/answer.py::ServerAnswer.add",
        "part.tokens[:num_output] => part.tokens",
        _SGLANG_CLIENT + "test_tokens_after_a_stop_string_are_not_part_of_the_turn",
    ),
    Fault(
        "a worker that assembles tensors compares no digest",
        "meshrl/rollout/server/worker_weights.py::Assembly.take",
        "self.require(digest, arrived, transfer, part) => self.require(arrived, arrived, transfer, part)",
        "tests/unit/sync/test_sync_slices.py::test_workers_refuse_damaged_transfers",
    ),
    Fault(
        "a server computes with restored weights that have no values yet",
        "meshrl/rollout/server/engine.py::ServerEngine._resume_if_allowed",
        "self._state.awaits_sync => False",
        _SGLANG_CLIENT + "test_a_server_stays_paused_until_its_restored_weights_have_values",
    ),
    Fault(
        "requests are sent to a server whose cache is released",
        "meshrl/rollout/server/engine.py::ServerEngine._resume_if_allowed",
        "self._released or self._state.awaits_sync => self._state.awaits_sync",
        _SGLANG_CLIENT + "test_nothing_reaches_a_server_without_its_cache",
    ),
    Fault(
        "weights of another client count as a version of this one",
        "meshrl/rollout/server/engine.py::ServerEngine._label",
        'f"{self._run}:{version}" => f"{version}"',
        _SGLANG_CLIENT + "test_labels_of_another_client_are_no_versions_of_this_one",
    ),
    Fault(
        "errors of the second tensor-parallel worker are ignored",
        "meshrl/rollout/server/weights.py::ServerWeights._call",
        '[answer["error"] for answer in answers if "error" in answer]'
        ' => [answer["error"] for answer in answers[:1] if "error" in answer]',
        "tests/unit/rollout/test_server_weights.py::"
        "test_every_worker_of_a_server_must_prove_its_shard[begin-answer0-begin failed]",
    ),
    Fault(
        "an adapter is added without its scale",
        "meshrl/rollout/server/weights.py::_HostCopy.deliveries",
        "self._scale => 1.0",
        "tests/unit/rollout/test_server_copy.py::test_adapters_are_sent_alone_and_the_server_gets_merged_weights",
    ),
    Fault(
        "a server's tensor of another dtype is compared without a cast",
        "meshrl/rollout/server/worker_weights.py::WorkerWeights.differing",
        "patch.of_parameter(param).to(sent) => patch.of_parameter(param)",
        _NAME_MAP + "test_a_buffer_is_loaded_and_read_back_in_the_dtype_that_was_sent",
    ),
    Fault(
        "a server worker's parameters are not compared with the received weights",
        "meshrl/rollout/server/worker_weights.py::WorkerWeights.differing",
        "_digest(patch.of_parameter(param).to(sent)) => self._digests._digests[name][number]",
        _NAME_MAP + "test_the_read_back_compares_each_block[one bit]",
    ),
    Fault(
        "an abort ends every request with the same beginning of its id",
        "meshrl/rollout/sglang/dialect.py::SglangDialect.stream",
        "secrets.token_hex(8) => request.id",
        _SGLANG_CLIENT + "test_no_id_of_a_request_begins_with_another_one",
    ),
    Fault(
        "an update of an SGLang server is not ended",
        "meshrl/rollout/sglang/dialect.py::SglangDialect.call_workers",
        'step in ("reconcile", "commit") => step == "reconcile"',
        _SGLANG_CLIENT + "test_every_update_is_ended_before_the_server_samples_again",
    ),
    Fault(
        "an SGLang server keeps the label of the old weights",
        "meshrl/rollout/sglang/dialect.py::SglangDialect.end_update",
        "served != label => False",
        _SGLANG_CLIENT + "test_a_label_that_the_server_does_not_take_ends_the_sync",
    ),
    Fault(
        "an event of an SGLang server's stream is lost",
        "meshrl/rollout/sglang/dialect.py::part_of",
        "0 <= new <= len(ids) => True",
        _SGLANG_CLIENT + "test_lost_tokens_are_detected",
    ),
    Fault(
        "a stop string that spans two tokens is not found",
        "meshrl/rollout/stop_strings.py::StopSearch.ends_with",
        "self._tail += self._token_bytes(token) => self._tail = self._token_bytes(token)",
        _STOP_STRINGS + "test_the_end_is_the_first_token_whose_text_completes_a_stop_string",
    ),
    Fault(
        "a continued turn forgets the beginning of a stop string",
        "meshrl/rollout/stop_strings.py::StopStrings.search",
        "search.skip(request.prefix_output) => pass",
        _STOP_STRINGS + "test_a_continuation_ends_where_the_uninterrupted_turn_ends[3]",
    ),
    Fault(
        "released memory is not freed",
        "meshrl/rollout/vllm/memory.py::CpuMemory.release",
        "storage.resize_(0) => pass",
        _VLLM_MEMORY + "test_on_a_cpu_storages_are_released_and_restored_in_place",
    ),
    Fault(
        "a server's released KV cache wakes up when its weights go to sleep",
        "meshrl/rollout/vllm/memory.py::WorkerMemory._sleep",
        "parts | before => parts",
        _VLLM_MEMORY + "test_parts_are_released_one_by_one",
    ),
]
