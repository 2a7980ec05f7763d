"""P29: whatever a grader does, each item ends as a number or a typed failure, and the next one is graded."""

import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest
from living_processes import is_living

from meshrl.core.errors import ConfigError, Failure, RewardError
from meshrl.reward.sandbox import Sandbox

TERMS = {name: (f"sandbox_graders:{name}", {}) for name in ("behave", "libraries", "everything", "meet", "slow")}
TERMS["offered"] = ("sandbox_graders:offered", {"bonus": 0.5})
LIMITS = {"num_workers": 1, "timeout_s": 60.0, "max_memory_bytes": 512 << 20}


@pytest.fixture(scope="module")
def patient():
    """A sandbox of one worker that nothing here makes time out."""
    sandbox = Sandbox(TERMS, **LIMITS)
    yield sandbox
    asyncio.run(sandbox.close())


@pytest.fixture
def hasty():
    """A function that makes a sandbox with a short time limit, closed at the end of the test."""
    made = []

    def make(timeout_s, num_workers=1):
        made.append(Sandbox(TERMS, **LIMITS | {"timeout_s": timeout_s, "num_workers": num_workers}))
        return made[-1]

    yield make
    for sandbox in made:
        asyncio.run(sandbox.close())


def payload(completion, answer=None):
    return {
        "completion": completion,
        "answer": answer,
        "prompt": {"id": "p", "messages": [], "env": "default", "meta": {"base": 10.0}},
        "messages": [],
        "stop_reason": "stop",
        "num_tokens": 5,
    }


def grade(sandbox, completions, term="behave", answer=None):
    """Results of these completions, and how many workers had to be killed for them."""
    before = sandbox.num_killed
    results = asyncio.run(sandbox.grade([(term, payload(c, answer)) for c in completions]))
    return results, sandbox.num_killed - before


def kinds(results):
    return [result.kind if isinstance(result, Failure) else result for result in results]


def wait_until_dead(pids, seconds=30):
    """The pids of these that still run after at most `seconds`; zombies are dead."""
    end = time.monotonic() + seconds
    alive = list(pids)
    while alive and time.monotonic() < end:
        alive = [pid for pid in alive if is_living(pid)]
        time.sleep(0.02)
    return alive


def test_hangs_end_as_timeouts_and_hit_nobody_else(hasty):
    """A Python loop, a C call that holds the interpreter's lock, and a fork: each costs its own item only."""
    hangs = ["loop", "hang_in_c", "fork_and_wait"]
    results, killed = grade(hasty(1.5, num_workers=3), [x for hang in hangs for x in ("fine", hang, "fine")])
    assert kinds(results) == [1.0, "timeout", 1.0] * 3
    assert "1.5 s" in results[1].message
    assert killed == 3


def test_a_large_allocation_fails_alone(patient):
    results, killed = grade(patient, ["fine", "memory", "fine"])
    assert kinds(results) == [1.0, "memory", 1.0] and killed == 1


def test_what_is_no_finite_number_is_a_failure_that_shows_the_value(patient):
    results, killed = grade(patient, ["nan", "inf", "text", "none", "list", "complex"])
    assert kinds(results) == ["bad_value"] * 6 and killed == 0
    assert "[1.0, 0.0] (list)" in results[4].message


def test_numbers_of_other_types_count(patient):
    assert grade(patient, ["true", "int", "fraction"]) == ([1.0, 3.0, 0.5], 0)


def test_exceptions_and_exits_are_crashes_that_say_why(patient):
    results, killed = grade(patient, ["raise", "fine", "sys_exit", "os_exit", "fine", "segfault", "fine"])
    assert kinds(results) == ["crash", 1.0, "crash", "crash", 1.0, "crash", 1.0]
    assert "ValueError: invalid literal" in results[0].message and "sandbox_graders.py" in results[0].message
    assert "SystemExit" in results[2].message
    assert "exit code 3" in results[3].message
    assert "SIGSEGV" in results[5].message
    assert killed == 4  # two deaths each for os_exit and segfault, which get a second try; exceptions kill nobody


def test_a_worker_that_dies_is_replaced_and_what_it_graded_is_graded_again(patient, tmp_path):
    """Once: what kills its worker twice is a crash."""
    before = patient.num_redone
    results = asyncio.run(
        patient.grade([("behave", payload(c, str(tmp_path / "marker"))) for c in ("fine", "die_once", "int")])
    )
    assert results == [1.0, 0.5, 3.0] and patient.num_redone - before == 1
    results, killed = grade(patient, ["os_exit", "fine"])
    assert kinds(results) == ["crash", 1.0] and (killed, patient.num_redone - before) == (2, 2)


def test_a_worker_that_somebody_kills_costs_no_grading(patient):
    """As the kernel does when memory is short; idle or not, guard or grader."""
    assert grade(patient, ["fine"]) == ([1.0], 0)
    guard = next(p for p in psutil.Process().children() if "meshrl.reward.worker" in p.cmdline())
    for process in (guard.children()[0], guard):
        process.kill()
        assert wait_until_dead([process.pid]) == []
    assert grade(patient, ["fine", "int"])[0] == [1.0, 3.0]


def test_a_flood_of_output_goes_nowhere(patient, capfd):
    assert grade(patient, ["flood", "fine"]) == ([1.0, 1.0], 0)
    assert capfd.readouterr() == ("", "")


def test_a_forked_child_that_returns_too_answers_nothing(patient):
    results, killed = grade(patient, ["come_back_twice", "fine", "come_back_twice", "nan"])
    assert kinds(results) == [1.0, 1.0, 1.0, "bad_value"] and killed == 0


def test_a_child_left_behind_is_killed_with_its_worker(patient, tmp_path):
    pid_file = tmp_path / "pids"
    results = asyncio.run(
        patient.grade([("behave", payload(c, str(pid_file))) for c in ("leave_a_child", "fine", "leave_a_child")])
    )
    pids = [int(line) for line in pid_file.read_text().split()]
    assert results == [1.0, 1.0, 1.0] and len(pids) == 2
    assert wait_until_dead(pids) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to the guard")
@pytest.mark.parametrize("how", ["os_exit", "loop", "close"])
def test_a_daemon_in_a_session_of_its_own_ends_with_its_worker(hasty, tmp_path, how):
    """However the worker ends: by itself, killed for its time, or with the run."""
    pid_file = tmp_path / "pids"
    sandbox = hasty(1.0 if how == "loop" else 60.0)
    assert asyncio.run(sandbox.grade([("behave", payload("leave_a_daemon", str(pid_file)))])) == [1.0]
    if how == "close":
        asyncio.run(sandbox.close())
    else:
        asyncio.run(sandbox.grade([("behave", payload(how))]))
    assert wait_until_dead([int(pid_file.read_text())]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to the guard")
def test_a_grader_that_moves_to_a_session_of_its_own_is_killed_all_the_same(hasty, tmp_path):
    pid_file = tmp_path / "pids"
    sandbox = hasty(1.5)
    assert kinds(asyncio.run(sandbox.grade([("behave", payload("hang_in_a_session", str(pid_file)))]))) == ["timeout"]
    assert wait_until_dead([int(pid_file.read_text())]) == []
    assert asyncio.run(sandbox.grade([("behave", payload("fine"))])) == [1.0]


def test_order_is_kept_over_batches_terms_and_workers(hasty):
    asked = [("behave", "int", 3.0), ("slow", "fine", 1.0), ("offered", "x", 15.5)] * 100
    results = asyncio.run(hasty(60.0, num_workers=2).grade([(term, payload(c)) for term, c, _ in asked]))
    assert results == [expected for _, _, expected in asked]


def test_workers_load_neither_torch_nor_numpy(patient):
    assert grade(patient, ["x"], term="libraries") == ([0.0], 0)


def test_functions_get_the_keywords_they_name(patient):
    assert grade(patient, ["x"], term="offered") == ([15.5], 0)
    assert grade(patient, ["x"], term="everything") == ([1.0], 0)


def test_async_functions_wait_together(patient):
    """None of the eight returns before all eight are waiting: one after the other would never end."""
    assert grade(patient, ["x"] * 8, term="meet", answer=8) == ([1.0] * 8, 0)


def test_async_timeouts_and_errors_hit_their_own_item(hasty):
    results, killed = grade(hasty(1.0), ["fine", "never", "raise", "fine"], term="slow")
    assert kinds(results) == [1.0, "timeout", "crash", 1.0] and killed == 0
    assert "ConnectionError: judge is down" in results[2].message


def test_an_async_function_that_blocks_the_loop_fails_alone(hasty):
    """It takes its neighbours down with it, so each of them gets another turn by itself."""
    results, killed = grade(hasty(0.5), ["block", "fine", "fine"], term="slow")
    assert kinds(results) == ["timeout", 1.0, 1.0] and killed == 2


def test_only_math_answer_turns_a_limit_of_cpu_time_into_a_wrong_answer():
    """A user's function that dies of the same signal is a crash."""

    async def run():
        sandbox = Sandbox({"math": ("math_answer", {}), "user": ("sandbox_graders:behave", {})}, **LIMITS)
        try:
            return await sandbox.grade([("user", payload("sigprof")), ("math", payload("5", "5"))])
        finally:
            await sandbox.close()

    assert kinds(asyncio.run(run())) == ["crash", 1.0]


def test_a_reward_that_can_not_work_is_refused_at_the_start():
    sandbox = Sandbox({"judge": ("math_anser", {})}, **LIMITS | {"num_workers": 2})
    with pytest.raises(ConfigError, match="did you mean 'math_answer'"):
        asyncio.run(sandbox.start())
    asyncio.run(sandbox.close())


def test_a_worker_that_does_not_come_up_says_what_it_printed(tmp_path, monkeypatch):
    (tmp_path / "large_module.py").write_text("table = bytearray(1 << 30)\n")
    monkeypatch.syspath_prepend(tmp_path)
    sandbox = Sandbox({"large": ("large_module:grade", {})}, **LIMITS)
    with pytest.raises(RewardError, match=r"(?s)did not start: exit code 1.*MemoryError.*max_memory_bytes"):
        asyncio.run(sandbox.start())
    asyncio.run(sandbox.close())


def test_closing_ends_a_grading_and_leaves_no_process():
    async def run():
        sandbox = Sandbox(TERMS, **LIMITS)
        before = psutil.Process().children(recursive=True)
        await sandbox.start()
        started = [p for p in psutil.Process().children(recursive=True) if p not in before]
        grading = asyncio.create_task(sandbox.grade([("behave", payload("loop"))]))
        await asyncio.sleep(0.1)
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(RewardError, match="closed"):
            await grading
        with pytest.raises(RewardError, match="closed"):
            await sandbox.grade([("behave", payload("fine"))])
        return [process.pid for process in started]

    pids = asyncio.run(run())
    assert len(pids) == 2  # guard and grader
    assert wait_until_dead(pids) == []


PARENT = """
import asyncio, sys
from meshrl.reward.sandbox import Sandbox
from test_reward_sandbox import LIMITS, TERMS, payload

async def run():
    sandbox = Sandbox(TERMS, **LIMITS)
    await sandbox.start()
    print("ready", flush=True)
    await sandbox.grade([("behave", payload(*sys.argv[1:]))])

asyncio.run(run())
"""


@pytest.mark.parametrize("deed", ["hang_in_c", "hang_in_a_session"])
def test_workers_die_with_a_killed_parent(deed, tmp_path):
    """P31: even one that hangs in C, where nothing but SIGKILL reaches it, or that left its group and its parent."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pid_file = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, deed, str(pid_file)], stdout=subprocess.PIPE, env=env)
    assert parent.stdout.readline() == b"ready\n"
    end = time.monotonic() + 60
    while deed == "hang_in_a_session" and not (pid_file.exists() and pid_file.read_text().endswith("\n")):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.2)  # let the grading begin; the test holds without it too
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()
    assert len(children) == (2 if deed == "hang_in_c" else 3)
    assert wait_until_dead([child.pid for child in children]) == []
