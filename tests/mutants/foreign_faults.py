"""Faults of engines whose server is another process: what arrives there, what it holds, and how it ends."""

from __future__ import annotations

from fault import Fault

_FOREIGN = "tests/unit/rollout/"
_SGLANG = _FOREIGN + "test_sglang_engine.py::"
_ENDPOINT = _FOREIGN + "test_endpoint_engine.py::"
_ECHO = "sent 20 ids and echoed 21 ids"

FOREIGN_FAULTS = [
    Fault(
        "a worker that puts tensors together compares no bucket's digest",
        "meshrl/rollout/foreign/arrival.py",
        "            if arrived != said:",
        "            if arrived is None:",
        (_FOREIGN + "test_rollout_arrival.py::test_a_stream_with_a_fault_is_refused[bit-digest-sharded]",),
    ),
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
        "changes go to the wrong places of what is kept for a server",
        "meshrl/rollout/foreign/kept.py",
        "            raw = payload[piece.at : piece.at + piece.stop - piece.start]",
        "            raw = payload[: piece.stop - piece.start]",
        ("tests/contract/test_weight_sync.py::test_shards_arrive_and_then_changes_alone[sglang]",),
    ),
    Fault(
        "who is left of a broken broadcast keeps its group",
        "meshrl/sync/group_ring.py",
        "        if self._meeting is not None and occasion == self._meeting.occasion:",
        "        if self._meeting is not None:",
        (
            "tests/contract/test_sync_transports.py::"
            "test_a_fault_on_the_way_is_caught_and_the_next_full_sync_heals_it[broadcast-dropped-full]",
        ),
    ),
    Fault(
        "a turn that was to begin anew goes on from tokens of old weights",
        "meshrl/cluster/groups.py",
        '            if self.in_flight == "restart":',
        '            if self.in_flight == "anew":',
        ("tests/unit/cluster/test_in_flight.py::test_turns_under_way_are_kept_moved_or_begun_anew[restart]",),
    ),
]
