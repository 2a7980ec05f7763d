"""Faults of the fork server and of the ranks that it forks."""

from __future__ import annotations

from fault import Fault

_FORKS = "tests/unit/process/test_fork_server.py::"
_SERVER, _STARTER = "meshrl/process/fork_server.py", "meshrl/process/spawn.py"

RANK_FAULTS = [
    Fault(
        "a forked rank outlives its fork server",
        _STARTER,
        "    end_with_parent(parent)\n",
        "",
        (_FORKS + "test_a_killed_fork_server_ends_its_ranks_and_a_restart_starts_another",),
    ),
    Fault(
        "forked ranks draw the same random numbers",
        _SERVER,
        "            np.random.seed()",
        "            pass",
        (_FORKS + "test_forked_ranks_draw_different_random_numbers",),
    ),
    Fault(
        "a forked rank writes its output to the fork server's output",
        _SERVER,
        "            os.dup2(out, 1)\n",
        "",
        (_FORKS + "test_a_rank_has_the_current_stdout_and_stderr_of_its_controller",),
    ),
    Fault(
        "a forked rank does not get its environment variables",
        _SERVER,
        "            os.environ.update(environment)\n",
        "",
        (_FORKS + "test_a_forked_rank_has_and_computes_what_a_new_interpreter_would",),
    ),
    Fault(
        "a forked rank keeps descriptors of the fork server",
        _SERVER,
        "                os.close(key.fd)",
        "                pass",
        (_FORKS + "test_a_forked_rank_has_and_computes_what_a_new_interpreter_would",),
    ),
    Fault(
        "ranks are forked by a fork server with another environment",
        _STARTER,
        " or _server.inherited != inherited",
        "",
        (_FORKS + "test_a_forked_rank_has_and_computes_what_a_new_interpreter_would",),
    ),
    Fault(
        "a replaced fork server remains as a zombie",
        _STARTER,
        "        threading.Thread(target=_server.process.wait, daemon=True).start()  # else a zombie is left\n",
        "",
        (_FORKS + "test_a_fork_server_with_other_threads_executes_a_new_interpreter_for_each_rank",),
    ),
    Fault(
        "a fork server ends with a child whose end no process waits for",
        _SERVER,
        "        if status.fileno() >= 0:  # else `send_signal` has closed it\n            self.close(status)",
        "        self.close(status)",
        (_FORKS + "test_a_fork_server_outlives_a_child_whose_end_no_process_waits_for",),
    ),
    Fault(
        "a fork server with several threads forks",
        _SERVER,
        'len(os.listdir("/proc/self/task")) == 1 and ',
        "",
        (_FORKS + "test_a_process_with_other_threads_or_an_open_device_must_not_fork[thread]",),
    ),
    Fault(
        "a fork server that has initialised a device forks",
        _SERVER,
        " and not _open_devices()",
        "",
        (_FORKS + "test_a_process_with_other_threads_or_an_open_device_must_not_fork[device]",),
    ),
    Fault(
        "the fork server ends with the thread that started it",
        _SERVER,
        "    end_with_parent(None)",
        "    pass",
        (_FORKS + "test_the_fork_server_has_one_thread_and_no_device_and_outlives_the_thread_that_started_it",),
    ),
    Fault(
        "a fork server continues to import after the process that started it has ended",
        _SERVER,
        "    end_with_parent(starter)\n",
        "",
        (_FORKS + "test_a_fork_server_that_still_imports_ends_with_the_process_that_started_it[SIGKILL]",),
    ),
]
