"""Faults of the weight sync: layout, sender, transports, receiver, digests."""

from __future__ import annotations

from fault import Fault

_SYNC_TRANSPORTS = "tests/contract/test_sync_transports.py::"
_SYNC_LAYOUT = "tests/unit/sync/test_sync_layout.py::"
_SYNC_RANKS = "tests/unit/sync/test_sync_ranks.py::"
_SYNC_RECEIVER = "tests/unit/sync/test_sync_receiver.py::"
_SERVER_WEIGHTS = "tests/unit/rollout/test_server_weights.py::"
_EMBEDDED_WEIGHTS = "tests/unit/rollout/test_embedded_weights.py::"
_SYNC_SENDER = "tests/unit/sync/test_sync_sender.py::"

FAULTS = [
    Fault(
        "after a failed sync ranks reuse their process groups",
        "meshrl/sync/collectives.py::Collectives.connect",
        "connection_id == self._connection_id => self._connection_id",
        _SYNC_TRANSPORTS + "test_a_sampler_that_never_connects_is_left_out_of_the_next_sync[one group]",
    ),
    Fault(
        "the changes of a part are read at the offset of the full part",
        "meshrl/sync/delivery.py::Delivery.sections",
        "section.numel() => part.num_bytes",
        _SYNC_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",
    ),
    Fault(
        "changes of a tensor that is not contiguous are lost",
        "meshrl/sync/delivery.py::write_changes",
        "target.copy_(bits.view(target.dtype).view(target.shape)) => pass",
        _SYNC_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",
    ),
    Fault(
        "a dropped transfer is accepted",
        "meshrl/sync/delivery.py::Progress.check_complete",
        "self._next < len(transfers) => self._next < 0",
        _SYNC_RECEIVER + "test_damaged_transfers_are_refused_and_named[last one dropped-everything]",
    ),
    Fault(
        "a transfer out of order is accepted",
        "meshrl/sync/delivery.py::Progress.check",
        "transfer != expected => transfer not in transfers",
        _SYNC_RECEIVER + "test_damaged_transfers_are_refused_and_named[twice-changes]",
    ),
    Fault(
        "the digest of a transfer of changes is not checked",
        "meshrl/sync/delivery.py::Progress.check",
        "self.require(delivery.payload_digest, arrived, transfer) => self.require(arrived, arrived, transfer)",
        _SYNC_RECEIVER + "test_damaged_transfers_are_refused_and_named[a bit flipped-changes]",
    ),
    Fault(
        "the digest of a part is not checked",
        "meshrl/sync/delivery.py::Progress.require",
        "arrived != sent => arrived == -1",
        _SYNC_RECEIVER + "test_damaged_transfers_are_refused_and_named[a bit flipped-everything]",
    ),
    Fault(
        "each digest of a sync is read from the device by itself",
        "meshrl/sync/digest.py::Sums.read",
        "torch.cat(self._totals).tolist() if self._totals else () => [int(n) for each in self._totals for n in each]",
        "tests/unit/sync/test_sync_on_meta.py::test_a_sync_in_place_reads_all_digests_of_a_proof_together",
    ),
    Fault(
        "a box is sent by each rank that holds it",
        "meshrl/sync/layout.py::make_layout",
        "senders[sender_of[box]].append(box)"
        " => for own, boxes in zip(senders, held): own.extend([box] * (box in boxes))",
        _SYNC_LAYOUT + "test_the_first_rank_sends_what_several_hold",
    ),
    Fault(
        "overlapping boxes are accepted",
        "meshrl/sync/layout.py::_require_cover",
        "overlap(box[1:], later[1:]) => box is later",
        _SYNC_LAYOUT + "test_boxes_that_leave_something_out_or_do_not_fit_are_refused",
    ),
    Fault(
        "a part of a tensor that no rank holds is accepted",
        "meshrl/sync/layout.py::_require_cover",
        "count != math.prod(shape) => count > math.prod(shape)",
        _SYNC_LAYOUT + "test_boxes_that_leave_something_out_or_do_not_fit_are_refused",
    ),
    Fault(
        "the parts of a box have swapped offsets",
        "meshrl/sync/layout.py::_cut",
        "(*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :])"
        " => (*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :])[::-1]",
        _SYNC_LAYOUT + "test_each_element_of_any_partition_is_sent_once_within_the_limits",
    ),
    Fault(
        "transfers of all senders together exceed the limit",
        "meshrl/sync/layout.py::_windows",
        "layout.transfer_bytes // max(num_senders, 1) => layout.transfer_bytes",
        _SYNC_LAYOUT + "test_each_element_of_any_partition_is_sent_once_within_the_limits",
    ),
    Fault(
        "senders of one tensor each wait for each other",
        "meshrl/sync/layout.py::_interleaved",
        "zip_longest(*of_sender.values()) => of_sender.values()",
        _SYNC_LAYOUT + "test_senders_alternate_where_each_tensor_has_one_sender",
    ),
    Fault(
        "a tied head with separate memory is not written",
        "meshrl/sync/receiver.py::_bind",
        "writes[source].append(targets[alias]) => pass",
        _SYNC_SENDER + "test_an_alias_with_memory_of_its_own_is_written_from_its_source",
    ),
    Fault(
        "the version is visible before the proof",
        "meshrl/sync/transaction.py::WeightState.step",
        'self.state = "incomplete" => self.state, self._last = then, header.version',
        _SYNC_RECEIVER + "test_the_new_version_is_visible_only_after_its_proof",
    ),
    Fault(
        "an answer after the cancel completes the sync",
        "meshrl/sync/transaction.py::WeightState.step",
        "self._header is not header => header is None",
        _SERVER_WEIGHTS + "test_an_answer_after_the_cancel_does_not_resume_the_sync[commit]",
    ),
    Fault(
        "weights that a sync has replaced count as those of the model folder",
        "meshrl/sync/transaction.py::WeightState.trust",
        'self.state != "loaded" => False',
        _EMBEDDED_WEIGHTS + "test_a_cancelled_sync_aborts_requests_and_new_ones_are_refused_until_the_next_sync",
    ),
    Fault(
        "a delta is applied to any base",
        "meshrl/sync/transaction.py::WeightState.begin",
        "header.base_version != had => header.base_version > header.version",
        _SYNC_SENDER + "test_a_delta_on_another_base_is_refused_and_a_full_sync_repairs_it",
    ),
    Fault(
        "a tensor that is not read back counts as proven",
        "meshrl/sync/receiver.py::Incoming._differing",
        'faults + [f"{name} was not read back" for name in left] => faults',
        _SYNC_RECEIVER + "test_an_incomplete_read_back_proves_nothing",
    ),
    Fault(
        "a tensor at another address counts as read back because its name was",
        "meshrl/sync/receiver.py::Incoming._differing",
        "digests[source, id(tensor)] => next(found for key, found in digests.items() if key[0] == source)",
        _SYNC_RECEIVER + "test_a_tied_head_with_old_values_is_named_with_their_version",
    ),
    Fault(
        "the digest of a part is that of another",
        "meshrl/sync/sender.py::WeightSender.fill",
        "values(list(running.values())) => values(list(running.values()))[::-1]",
        _SYNC_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",
    ),
    Fault(
        "sent values are not stored in the base",
        "meshrl/sync/sender.py::WeightSender._find_changes",
        "bits_of(before).scatter_(0, changed, bits) => pass",
        _SYNC_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",
    ),
    Fault(
        "parts are compared with the first elements of the base",
        "meshrl/sync/sender.py::WeightSender._chunks",
        "base[part.first + low : part.first + high] => base[low:high]",
        _SYNC_SENDER + "test_any_partition_arrives_to_the_bit_and_then_its_changes_do",
    ),
    Fault(
        "places of changes count from the wrong start",
        "meshrl/sync/sender.py::WeightSender._find_changes",
        "changed + low => changed",
        _SYNC_SENDER + "test_changes_far_inside_a_large_tensor_have_the_right_indices",
    ),
    Fault(
        "changes are found by value and not by bit",
        "meshrl/sync/sender.py::WeightSender._find_changes",
        "changed, bits = _differing(bits_of(now), bits_of(before))"
        " => changed = (now != before).nonzero()[:, 0]; bits = bits_of(now)[changed]",
        _SYNC_SENDER + "test_changes_are_exact_in_other_dtypes",
    ),
    Fault(
        "an interrupted sender keeps its base",
        "meshrl/sync/sender.py::WeightSender.begin",
        "self.base_version = None => pass",
        _SYNC_SENDER + "test_an_interrupted_sender_has_no_base",
    ),
    Fault(
        "gaps of a transfer contain old bytes",
        "meshrl/sync/sender.py::WeightSender.fill",
        "payload[end:at].zero_() => pass",
        _SYNC_SENDER + "test_gaps_between_parts_are_zero",
    ),
    Fault(
        "a slot is filled again before it was read",
        "meshrl/sync/sockets.py::Sockets.buffer",
        "self._slots_in_use[slot] => self._slots_in_use[slot] and slot < 0",
        _SYNC_RANKS + "test_a_slot_is_not_filled_again_before_it_is_released",
    ),
    Fault(
        "a receiver needs no token",
        "meshrl/sync/sockets.py::Sockets._greet",
        "hmac.compare_digest(token, self._token.encode()) => True",
        _SYNC_RANKS + "test_receivers_without_the_token_or_of_an_earlier_sync_get_nothing",
    ),
    Fault(
        "weights between ranks of one machine are offered to other machines",
        "meshrl/sync/sockets.py::Sockets.__init__",
        'listening_socket(host) => listening_socket("")',
        "tests/e2e/test_open_ports.py::test_what_listens_is_what_the_page_about_security_lists[processes]",
    ),
    Fault(
        "after a failed sync ranks reuse their connections",
        "meshrl/sync/sockets.py::Sockets.connect",
        "connection_id == self._connection_id => self._connection_id",
        _SYNC_TRANSPORTS + "test_a_sampler_that_never_connects_is_left_out_of_the_next_sync[one machine, apart]",
    ),
    Fault(
        "changes are sent to a sampler of another version",
        "meshrl/sync/transaction.py::make_header",
        "versions |= {state.version for state in states if state.version is not None} => pass",
        _SYNC_RANKS + "test_only_changes_are_sent_if_all_senders_and_samplers_hold_one_version",
    ),
    Fault(
        "the facts of a gathered transfer are lost",
        "meshrl/sync/collectives.py::Collectives._facts",
        "self._gather(facts.to(device)) => self._gather(facts.to(device).zero_())",
        "tests/unit/sync/test_all_gather.py::test_every_rank_gets_each_window_at_once_where_its_server_can_open_it",
    ),
    Fault(
        "the workers of a server open the memory of another rank's device",
        "meshrl/sync/collectives.py::AllGather.connect",
        "texts[self._first : self._first + self._num_workers] => texts[: self._num_workers]",
        "tests/unit/sync/test_all_gather.py::test_the_workers_of_a_server_open_the_memory_of_their_own_devices",
    ),
]
