"""Faults of engines whose server is another process: what arrives there, what it holds, and how it ends."""

from __future__ import annotations

from fault import Fault

_FOREIGN = "tests/unit/rollout/"
_SGLANG = _FOREIGN + "test_sglang_engine.py::"
_ENDPOINT = _FOREIGN + "test_endpoint_engine.py::"
_TRANSPORTS = "tests/contract/test_sync_transports.py::"
_ECHO = "sent 20 ids and echoed 21 ids"

FOREIGN_FAULTS = [
    Fault(
        "what a foreign engine's worker holds is not compared with what arrived",
        "meshrl/rollout/foreign/resident.py",
        "elif (held := _digest(patch.inside(param).to(self._dtypes[name]))) != self._values[key]:",
        "elif (held := self._values[key]) != self._values[key]:",
        (
            _FOREIGN + "test_name_map.py::test_what_is_read_back_is_compared_block_by_block[one bit]",
            _FOREIGN + "test_name_map.py::test_what_is_read_back_is_compared_block_by_block[stale]",
        ),
    ),
    Fault(
        "a server's workers outlive a parent that is killed",
        "meshrl/process/guard.py",
        "    kill_descendants(os.getpid())\n    if folder",
        "    if folder",
        (_FOREIGN + "test_rollout_server.py::test_nothing_outlives_a_parent_that_is_killed[SIGKILL]",),
    ),
    Fault(
        "an abort takes along every request whose id begins like it",
        "meshrl/rollout/sglang/dialect.py",
        "-{self._num_rids:012d}",
        "-{self._num_rids}",
        (_SGLANG + "test_an_abort_takes_no_other_request_along",),
    ),
    Fault(
        "tokens of mixed weights count as tokens of the last version",
        "meshrl/rollout/server/answer.py",
        'versions = versions[: span["start"]]',
        'versions[span["start"] : span["end"]] = max(self._versions.values())',
        (_SGLANG + "test_what_a_mixture_sampled_is_left_out",),
    ),
    Fault(
        "a prompt that the server rendered again goes unnoticed",
        "meshrl/rollout/server/answer.py",
        "if part.context != sent and not (self._has_context and part.context is None):",
        "if part.context is None and not self._has_context:",
        (
            f"{_SGLANG}test_an_answer_that_is_not_whole_is_refused[wrong_echo-RequestError-{_ECHO}]",
            f"{_ENDPOINT}test_a_server_that_keeps_ids_or_logprobs_to_itself_is_refused[wrong_echo-RequestError-{_ECHO}]",
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
        "a turn that was to begin anew goes on from tokens of old weights",
        "meshrl/cluster/groups.py",
        '            if self.in_flight == "restart":',
        '            if self.in_flight == "anew":',
        ("tests/unit/cluster/test_in_flight.py::test_turns_under_way_are_kept_moved_or_begun_anew[restart]",),
    ),
    Fault(
        "a worker that puts tensors together compares no digest",
        "meshrl/rollout/foreign/assembly.py",
        "self.progress.require(delivery, part, arrived, delivery.digests[number])",
        "self.progress.require(delivery, part, arrived, arrived)",
        ("tests/unit/sync/test_sync_slices.py::test_workers_refuse_damaged_transfers",),
    ),
    Fault(
        "ranks that were left by others keep their groups",
        "meshrl/sync/broadcast.py",
        "or occasion == self._occasion:",
        "or self._occasion:",
        (_TRANSPORTS + "test_a_sampler_that_never_comes_is_left_out_of_the_next_sync[own groups]",),
    ),
    Fault(
        "ranks that were left by others keep their connections",
        "meshrl/sync/sockets.py",
        "        if occasion == self._occasion:",
        "        if self._occasion:",
        (_TRANSPORTS + "test_a_sampler_that_never_comes_is_left_out_of_the_next_sync[one machine, apart]",),
    ),
]
