"""P29: whatever a grader does, each item ends as a number or a typed failure, and the next one is graded."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meshrl.core.errors import ConfigError, Failure, RewardError
from meshrl.reward.sandbox import Sandbox

LIMITS = {"num_workers": 1, "timeout_s": 60.0, "max_memory_bytes": 512 << 20}


def payload(completion, answer=None):
    return {
        "completion": completion,
        "answer": answer,
        "prompt": {"id": "p", "messages": [], "env": "default", "meta": {"base": 10.0}},
        "messages": [],
        "stop_reason": "stop",
        "num_tokens": 5,
    }


def grade(completions, kind="sandbox_graders:behave", args=None, answer=None, **limits):
    """Results of these completions, and how many workers were replaced on the way."""

    async def run():
        sandbox = Sandbox({"term": (kind, args or {})}, **LIMITS | limits)
        try:
            return await sandbox.grade([("term", payload(c, answer)) for c in completions]), sandbox.num_replaced
        finally:
            await sandbox.close()

    return asyncio.run(run())


def kinds(results):
    return [result.kind if isinstance(result, Failure) else result for result in results]


def wait_until_dead(pids, seconds=30):
    """The pids of these that still run after at most `seconds`; zombies are dead."""
    end = time.monotonic() + seconds
    alive = list(pids)
    while alive and time.monotonic() < end:
        alive = [p for p in alive if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.02)
    return alive


def test_hangs_end_as_timeouts_and_hit_nobody_else():
    """A Python loop, a C call that holds the interpreter's lock, and a fork: each costs its own item only."""
    hangs = ["loop", "hang_in_c", "fork_and_wait"]
    results, replaced = grade([x for hang in hangs for x in ("fine", hang, "fine")], num_workers=3, timeout_s=1.5)
    assert kinds(results) == [1.0, "timeout", 1.0] * 3
    assert "1.5 s" in results[1].message
    assert replaced == 3


def test_a_large_allocation_fails_alone():
    results, replaced = grade(["fine", "memory", "fine"])
    assert kinds(results) == [1.0, "memory", 1.0] and replaced == 1


def test_what_is_no_finite_number_is_a_failure_that_shows_the_value():
    results, replaced = grade(["nan", "inf", "text", "none", "list", "complex"])
    assert kinds(results) == ["bad_value"] * 6 and replaced == 0
    assert "[1.0, 0.0] (list)" in results[4].message


def test_numbers_of_other_types_count():
    assert grade(["true", "int", "fraction"])[0] == [1.0, 3.0, 0.5]


def test_exceptions_and_exits_are_crashes_that_say_why():
    results, replaced = grade(["raise", "fine", "sys_exit", "os_exit", "fine", "segfault", "fine"])
    assert kinds(results) == ["crash", 1.0, "crash", "crash", 1.0, "crash", 1.0]
    assert "ValueError: invalid literal" in results[0].message and "sandbox_graders.py" in results[0].message
    assert "SystemExit" in results[2].message
    assert "exit status 3" in results[3].message
    assert "SIGSEGV" in results[5].message
    assert replaced == 2  # exceptions leave the worker alive


def test_a_flood_of_output_goes_nowhere(capfd):
    assert grade(["flood", "fine"])[0] == [1.0, 1.0]
    assert capfd.readouterr() == ("", "")


def test_a_forked_child_that_returns_too_answers_nothing():
    results, replaced = grade(["come_back_twice", "fine", "come_back_twice", "nan"])
    assert kinds(results) == [1.0, 1.0, 1.0, "bad_value"] and replaced == 0


def test_a_child_left_behind_is_killed_with_its_worker(tmp_path, monkeypatch):
    pid_file = tmp_path / "pids"
    monkeypatch.setenv("GRADER_PID_FILE", str(pid_file))

    async def run():
        sandbox = Sandbox({"term": ("sandbox_graders:behave", {})}, **LIMITS)
        results = await sandbox.grade([("term", payload(c)) for c in ("leave_a_child", "fine", "leave_a_child")])
        alive = wait_until_dead(map(int, pid_file.read_text().split()))
        await sandbox.close()
        return results, alive, sandbox.num_replaced

    assert asyncio.run(run()) == ([1.0, 1.0, 1.0], [], 1)


def test_order_is_kept_over_batches_and_workers():
    completions = [("int", "true", "fraction")[i % 3] for i in range(200)]
    results, _ = grade(completions, num_workers=2)
    assert results == [(3.0, 1.0, 0.5)[i % 3] for i in range(200)]


def test_workers_load_neither_torch_nor_numpy():
    assert grade(["x"], kind="sandbox_graders:torch_is_loaded")[0] == [0.0]


def test_functions_get_the_keywords_they_name():
    assert grade(["x"], kind="sandbox_graders:offered", args={"bonus": 0.5})[0] == [15.5]
    assert grade(["x"], kind="sandbox_graders:everything")[0] == [1.0]


def test_async_functions_wait_together():
    """None of the eight returns before all eight are waiting: one after the other would never end."""
    assert grade(["x"] * 8, kind="sandbox_graders:meet", answer=8, timeout_s=30.0)[0] == [1.0] * 8


def test_async_timeouts_and_errors_hit_their_own_item():
    results, replaced = grade(
        ["fine", "never", "raise", "fine"], kind="sandbox_graders:slow_or_blocking", timeout_s=1.0
    )
    assert kinds(results) == [1.0, "timeout", "crash", 1.0] and replaced == 0
    assert "ConnectionError: judge is down" in results[2].message


def test_an_async_function_that_blocks_the_loop_fails_alone():
    """It takes its neighbours down with it, so each of them gets another turn by itself."""
    results, replaced = grade(["block", "fine", "fine"], kind="sandbox_graders:slow_or_blocking", timeout_s=0.5)
    assert kinds(results) == ["timeout", 1.0, 1.0] and replaced == 2


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("math_anser", {}, "did you mean 'math_answer'"),
        ("no_such_module:score", {}, "importing 'no_such_module' raised ModuleNotFoundError"),
        ("sandbox_graders:behav", {}, "no function 'behav'; did you mean 'behave'"),
        ("sandbox_graders:no_function", {}, "no function 'no_function'"),
        ("math_answer", {"rul": "exact"}, "no argument 'rul'; allowed: rule; did you mean 'rule'"),
        ("math_answer", {"rule": "exakt"}, "rule is 'exakt'; allowed: auto, gsm8k, exact, math_verify"),
        ("format", {}, "missing a required argument: 'regex'"),
        ("format", {"regex": "(["}, "is not valid"),
        ("format", {"regex": "x", "where": "start"}, "where is 'start'; allowed: full, anywhere"),
    ],
)
def test_a_reward_that_can_not_work_is_refused_at_the_start(kind, args, message):
    with pytest.raises(ConfigError) as refused:
        grade(["x"], kind=kind, args=args)
    assert message in str(refused.value)


def test_a_worker_that_does_not_come_up_says_what_it_printed():
    with pytest.raises(RewardError, match=r"did not start.*exit status"):
        grade(["x"], max_memory_bytes=1 << 20)


def test_closing_ends_a_grading_and_leaves_no_process():
    async def run():
        sandbox = Sandbox({"term": ("sandbox_graders:behave", {})}, **LIMITS)
        await sandbox.start()
        workers = psutil.Process().children(recursive=True)
        grading = asyncio.create_task(sandbox.grade([("term", payload("loop"))]))
        await asyncio.sleep(0.1)
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(RewardError, match="closed"):
            await grading
        with pytest.raises(RewardError, match="closed"):
            await sandbox.grade([("term", payload("fine"))])
        return [worker.pid for worker in workers]

    pids = asyncio.run(run())
    assert len(pids) == 2  # guard and grader
    assert wait_until_dead(pids) == []


PARENT = """
import asyncio, sys
from meshrl.reward.sandbox import Sandbox
from test_reward_sandbox import LIMITS, payload

async def run():
    sandbox = Sandbox({"term": ("sandbox_graders:behave", {})}, **LIMITS)
    await sandbox.start()
    print("ready", flush=True)
    await sandbox.grade([("term", payload("hang_in_c"))])

asyncio.run(run())
"""


def test_workers_die_with_a_killed_parent():
    """P31: even one that hangs in C, where nothing but SIGKILL reaches it."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env)
    assert parent.stdout.readline() == b"ready\n"
    time.sleep(0.2)  # let the grading begin; the test holds without it too
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()
    assert len(children) == 2
    assert wait_until_dead([child.pid for child in children]) == []
