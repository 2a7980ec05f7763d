"""Faults that let other users or machines into a run."""

from __future__ import annotations

from fault import Fault

_TOKEN, _FOLLOWER = "tests/unit/process/test_run_token.py::", "tests/unit/cluster/test_launched_by_torchrun.py::"
_PORTS = "tests/e2e/test_open_ports.py::"
_LISTENS = _PORTS + "test_what_listens_is_what_the_page_about_security_lists"

SECURITY_FAULTS = [
    Fault(
        "the run's token is in torchrun's store",
        "meshrl/process/run_token.py",
        'return f"{address[0]} {address[1]} {self._file_id} {_proof(',
        'return f"{address[0]} {address[1]} {self._file_id} {self.key.hex()} {_proof(',
        (_TOKEN + "test_a_follower_gets_address_and_key_by_a_file_that_only_this_user_can_read",),
    ),
    Fault(
        "a follower connects to an address that another process has written",
        "meshrl/process/run_token.py",
        "    if not hmac.compare_digest(proof, ",
        "    if hmac.compare_digest(proof[:0], ",
        (_FOLLOWER + "test_a_follower_does_not_connect_to_an_address_that_another_process_has_written",),
    ),
    Fault(
        "a token file of another user is accepted",
        "meshrl/process/run_token.py",
        "facts.st_uid != os.geteuid()",
        "facts.st_uid < 0",
        (_TOKEN + "test_a_file_of_another_user_is_refused_although_its_proof_is_right",),
    ),
    Fault(
        "the token stays in run.folder while the run trains",
        "meshrl/cluster/torchrun.py",
        "        self._remove_token()\n        self.address",
        "        self.address",
        (_PORTS + "test_another_user_can_read_the_store_of_torchrun_but_can_not_run_code_in_the_run",),
    ),
    Fault(
        "the secret of the environment is sent over connections without encryption",
        "meshrl/cluster/remote.py",
        "        passed.pop(VARIABLE, None)",
        "        passed.pop('', None)",
        (
            "tests/unit/cluster/test_remote_executor.py::"
            "test_a_rank_has_its_environment_and_a_sampler_that_died_is_replaced_by_its_node_agent",
        ),
    ),
    Fault(
        "an inline run can be reached from other machines",
        "meshrl/cluster/inline.py",
        "        with _on_loopback():",
        "        if True:",
        (_LISTENS + "[inline]",),
    ),
    Fault(
        "weights between ranks of one machine are offered to other machines",
        "meshrl/sync/sockets.py",
        "listening_socket(host)",
        'listening_socket("")',
        (_LISTENS + "[processes]",),
    ),
]
