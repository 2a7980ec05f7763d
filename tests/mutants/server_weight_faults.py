"""Faults of engines with a server in another process: received weights, read-back, answers, and the server's end."""

from __future__ import annotations

from fault import Fault

_ROLLOUT = "tests/unit/rollout/"
_SGLANG = _ROLLOUT + "test_sglang_engine.py::"
_ENDPOINT = _ROLLOUT + "test_endpoint_engine.py::"
_TRANSPORTS = "tests/contract/test_sync_transports.py::"
_ECHO = "sent 20 ids and echoed 21 ids"

SERVER_WEIGHT_FAULTS = [
    Fault(
        "a server worker's parameters are not compared with the received weights",
        "meshrl/rollout/server/worker_weights.py",
        "elif (held := _digest(patch.of_parameter(param).to(self._dtypes[name]))) != self._values[key]:",
        "elif (held := self._values[key]) != self._values[key]:",
        (
            _ROLLOUT + "test_name_map.py::test_the_read_back_compares_each_block[one bit]",
            _ROLLOUT + "test_name_map.py::test_the_read_back_compares_each_block[stale]",
        ),
    ),
    Fault(
        "a server's workers outlive a parent that is killed",
        "meshrl/process/guard.py",
        "    kill_descendants(os.getpid())\n    if folder",
        "    if folder",
        (_ROLLOUT + "test_rollout_server.py::test_no_process_or_folder_outlives_a_killed_parent[SIGKILL]",),
    ),
    Fault(
        "an abort ends every request with the same beginning of its id",
        "meshrl/rollout/sglang/dialect.py",
        "-{self._num_rids:012d}",
        "-{self._num_rids}",
        (_SGLANG + "test_an_abort_ends_no_other_request",),
    ),
    Fault(
        "tokens of mixed weights count as tokens of the last version",
        "meshrl/rollout/server/answer.py",
        'versions = versions[: span["start"]]',
        'versions[span["start"] : span["end"]] = max(self._versions.values())',
        (_SGLANG + "test_tokens_of_mixed_weights_are_left_out",),
    ),
    Fault(
        "a prompt that the server rendered again goes unnoticed",
        "meshrl/rollout/server/answer.py",
        "if part.context != sent and not (self._has_context and part.context is None):",
        "if part.context is None and not self._has_context:",
        (
            f"{_SGLANG}test_an_incomplete_answer_is_refused[wrong_echo-RequestError-{_ECHO}]",
            f"{_ENDPOINT}test_a_server_that_returns_no_ids_or_logprobs_is_refused[wrong_echo-RequestError-{_ECHO}]",
        ),
    ),
    Fault(
        "a folder that the server did not load counts as a version",
        "meshrl/rollout/completions.py",
        'if not isinstance(answer, dict) or answer.get("success") is not True:',
        "if not isinstance(answer, dict):",
        (_ENDPOINT + "test_an_answer_other_than_success_is_no_success",),
    ),
    Fault(
        "in_flight=restart continues a turn from tokens of old weights",
        "meshrl/cluster/groups.py",
        '            if self.in_flight == "restart":',
        '            if self.in_flight == "never":',
        ("tests/unit/cluster/test_in_flight.py::test_running_turns_are_kept_aborted_or_restarted_at_a_sync[restart]",),
    ),
    Fault(
        "a worker that assembles tensors compares no digest",
        "meshrl/rollout/server/assembly.py",
        "self._progress.require(delivery.digests[number], arrived, delivery.transfer, part)",
        "self._progress.require(arrived, arrived, delivery.transfer, part)",
        ("tests/unit/sync/test_sync_slices.py::test_workers_refuse_damaged_transfers",),
    ),
    Fault(
        "after a failed sync ranks reuse their process groups",
        "meshrl/sync/broadcast.py",
        "or connection_id == self._connection_id:",
        "or self._connection_id:",
        (_TRANSPORTS + "test_a_sampler_that_never_connects_is_left_out_of_the_next_sync[own groups]",),
    ),
    Fault(
        "after a failed sync ranks reuse their connections",
        "meshrl/sync/sockets.py",
        "        if connection_id == self._connection_id:",
        "        if self._connection_id:",
        (_TRANSPORTS + "test_a_sampler_that_never_connects_is_left_out_of_the_next_sync[one machine, apart]",),
    ),
]
