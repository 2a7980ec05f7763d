"""With any behaviour of a grader, each item gives a number or a typed failure, and the next one is graded."""

import asyncio
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
from running_processes import is_running_process

from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.errors import ConfigError, Failure, RewardError
from meshrl.reward.sandbox import Sandbox

NAMES = ("behave", "libraries", "everything", "meet", "slow")
TERMS = {name: RewardTerm(kind=f"sandbox_graders:{name}") for name in NAMES}
TERMS["offered"] = RewardTerm(kind="sandbox_graders:offered", args={"bonus": 0.5})


def open_sandbox(terms=TERMS, timeout_s=60.0, num_workers=1, log=None):
    limits = {"timeout_s": timeout_s, "num_workers": num_workers, "max_memory_bytes": 512 << 20}
    return Sandbox(RewardConfig(terms=terms, **limits), log=log)


@pytest.fixture(scope="module")
def shared_sandbox():
    """A sandbox of one worker with a time limit that these tests do not reach."""
    sandbox = open_sandbox()
    yield sandbox
    asyncio.run(sandbox.close())


@pytest.fixture
def make_sandbox():
    """A function that makes a sandbox with a given time limit, which is closed at the end of the test."""
    made = []

    def make(timeout_s, num_workers=1):
        made.append(open_sandbox(timeout_s=timeout_s, num_workers=num_workers))
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
    """Results of these completions, and the number of workers that were killed because of them."""
    before = sandbox.counts["reward/workers_killed"]
    results = asyncio.run(sandbox.grade([(term, payload(c, answer)) for c in completions]))
    return results, sandbox.counts["reward/workers_killed"] - before


def kinds(results):
    return [result.kind if isinstance(result, Failure) else result for result in results]


def wait_until_dead(pids, seconds=30):
    """Those of the pids that still run after at most `seconds`; zombies count as dead."""
    end = time.monotonic() + seconds
    alive = list(pids)
    while alive and time.monotonic() < end:
        alive = [pid for pid in alive if is_running_process(pid)]
        time.sleep(0.02)
    return alive


def test_a_hang_is_a_timeout_of_its_own_item_only(make_sandbox):
    """A Python loop, a C call that holds the interpreter's lock, and a fork."""
    hangs = ["loop", "hang_in_c", "fork_and_wait"]
    results, killed = grade(make_sandbox(1.5, num_workers=3), [x for hang in hangs for x in ("fine", hang, "fine")])
    assert kinds(results) == [1.0, "timeout", 1.0] * 3
    assert "1.5 s" in results[1].message
    assert killed == 3


def test_a_large_allocation_fails_alone(shared_sandbox):
    results, killed = grade(shared_sandbox, ["fine", "memory", "fine"])
    assert kinds(results) == [1.0, "memory", 1.0] and killed == 1


def test_a_result_that_is_not_a_finite_number_is_a_failure_with_the_value(shared_sandbox):
    results, killed = grade(shared_sandbox, ["nan", "inf", "text", "list", "complex"])
    assert kinds(results) == ["bad_value"] * 5 and killed == 0
    assert "[1.0, 0.0] (list)" in results[3].message


def test_a_number_that_would_overflow_statistics_is_a_failure_with_the_limit(shared_sandbox):
    results, killed = grade(shared_sandbox, ["huge", "largest", "huge_int"])
    assert kinds(results) == ["bad_value", 1e12, "bad_value"] and killed == 0
    assert results[0].message == "returned -1e+300 (float); a reward is a finite number, of at most 1e+12 in size"


def test_messages_are_one_line_of_valid_unicode(shared_sandbox):
    (result,), killed = grade(shared_sandbox, ["surrogate"])
    assert result.kind == "bad_value" and killed == 0 and result.message.encode() and "\n" not in result.message


FORGED = [
    'forge {"item": 0, "value": 7.0}',  # answered already
    'forge {"item": 1, "value": 7.0}',  # its own item
    'forge {"item": 2, "value": 7.0}',  # one that the worker will answer later
    'forge {"item": 1, "value": 7.0, "retire": true}',
    'forge {"item": 99, "failure": ["crash", "x"]}',
    'forge {"async": [], "cpu_limited": []}',
    "answer_as 2",
    "answer_as 99",
    "forge []",
    "forge nonsense",
    "forge \\xff\\xfe",
    "forge " + "[" * 20_000,
    "forge_bytes not a frame at all",
]


@pytest.mark.parametrize("completion", FORGED, ids=[text[:40] for text in FORGED])
def test_a_reply_that_user_code_writes_breaks_the_worker_and_is_no_reward(shared_sandbox, completion):
    """Its own item crashes, also when it is graded again; no item gets another reward than the one of its grader."""
    results, killed = grade(shared_sandbox, ["fine", completion, "int", "fine", "fine"])  # two batches: 3 and 2 items
    assert kinds(results) == [1.0, "crash", 3.0, 1.0, 1.0] and killed == 2
    assert results[1].message.startswith("the worker's answer is not valid: ")


def test_a_reply_between_two_batches_is_no_answer_to_the_next(shared_sandbox):
    assert grade(shared_sandbox, ['forge_later {"item": 0, "value": 7.0}']) == ([0.25], 0)
    time.sleep(0.5)
    assert grade(shared_sandbox, ["int"]) == ([3.0], 1)


@pytest.mark.parametrize("first", ['{"async": ["t"], "cpu_limited": [], "of_tokens": []}', '{"async": 7}', "nonsense"])
def test_a_module_that_writes_to_the_socket_at_its_import_is_refused(tmp_path, monkeypatch, first):
    (tmp_path / "forger.py").write_text(
        f"import os, struct, sys\nbody = {first.encode()!r}\n"
        "os.write(int(sys.argv[1]), struct.pack('!I', len(body)) + body)\ndef reward(completion, answer): return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sandbox = open_sandbox({"t": RewardTerm(kind="forger:reward")})
    with pytest.raises(RewardError, match=r"not to the current request|not JSON"):
        grade(sandbox, ["fine"], term="t")
    asyncio.run(sandbox.close())


def test_numbers_of_other_types_count(shared_sandbox):
    assert grade(shared_sandbox, ["true", "int", "fraction"]) == ([1.0, 3.0, 0.5], 0)


def test_exceptions_and_exits_are_crashes_with_a_reason(shared_sandbox):
    results, killed = grade(shared_sandbox, ["raise", "fine", "sys_exit", "os_exit", "fine", "segfault", "fine"])
    assert kinds(results) == ["crash", 1.0, "crash", "crash", 1.0, "crash", 1.0]
    assert "ValueError: invalid literal" in results[0].message and "sandbox_graders.py" in results[0].message
    assert "SystemExit" in results[2].message
    assert "exit code 3" in results[3].message
    assert "SIGSEGV" in results[5].message
    assert killed == 4  # os_exit and segfault are tried twice and kill two workers each; exceptions kill none


def test_a_crash_names_the_users_line_and_not_that_of_a_library(shared_sandbox):
    message = grade(shared_sandbox, ["raise_in_a_library"])[0][0].message
    assert message.startswith("JSONDecodeError: ") and "sandbox_graders.py:" in message


def test_a_worker_that_dies_is_replaced_and_its_item_is_graded_again(shared_sandbox, tmp_path):
    """It is graded again once: an item that kills its worker twice is a crash."""
    before = shared_sandbox.counts["reward/gradings_retried"]
    results = asyncio.run(
        shared_sandbox.grade([("behave", payload(c, str(tmp_path / "marker"))) for c in ("fine", "die_once", "int")])
    )
    assert results == [1.0, 0.5, 3.0] and shared_sandbox.counts["reward/gradings_retried"] - before == 1
    results, killed = grade(shared_sandbox, ["os_exit", "fine"])
    assert kinds(results) == ["crash", 1.0] and (killed, shared_sandbox.counts["reward/gradings_retried"] - before) == (
        2,
        2,
    )


def test_a_worker_that_is_killed_from_outside_loses_no_grading(shared_sandbox):
    """As the kernel does when memory is short: the grader or its guard, while idle or not."""
    assert grade(shared_sandbox, ["fine"]) == ([1.0], 0)
    guard = next(p for p in psutil.Process().children() if "meshrl.reward.worker" in p.cmdline())
    for process in (guard.children()[0], guard):
        process.kill()
        assert wait_until_dead([process.pid]) == []
    assert grade(shared_sandbox, ["fine", "int"])[0] == [1.0, 3.0]


def test_a_grader_that_prints_thirty_megabytes_is_graded_and_logged_in_part(capfd):
    lines = []
    sandbox = open_sandbox(log=lambda *texts: lines.extend(texts))
    assert grade(sandbox, ["flood", "fine"]) == ([1.0, 1.0], 0)
    asyncio.run(sandbox.close())
    assert sum(map(len, lines)) < 2_000_000
    assert any(re.fullmatch(r"worker 0: \[\d+ bytes of output left out\]", line) for line in lines)
    assert capfd.readouterr() == ("", "")


def test_what_a_grader_printed_before_its_death_is_logged_before_the_next_grading(monkeypatch):
    lines = []

    def log(*texts):
        time.sleep(0.3)
        lines.extend(texts)

    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    sandbox = open_sandbox(log=log)
    assert kinds(asyncio.run(sandbox.grade([("behave", payload("chat"))]))) == ["crash"]
    asyncio.run(sandbox.close())
    first = ["worker 0: printed \x1b[2J", "worker 0: WARNING:root:logged", "worker 0: of stderr"]
    assert lines == first * 2  # the grading is repeated once


def test_a_forked_child_that_returns_sends_no_answer(shared_sandbox):
    results, killed = grade(shared_sandbox, ["come_back_twice", "fine", "come_back_twice", "nan"])
    assert kinds(results) == [1.0, 1.0, 1.0, "bad_value"] and killed == 0


def test_a_child_left_behind_is_killed_with_its_worker(shared_sandbox, tmp_path):
    pid_file = tmp_path / "pids"
    results = asyncio.run(
        shared_sandbox.grade(
            [("behave", payload(c, str(pid_file))) for c in ("leave_a_child", "fine", "leave_a_child")]
        )
    )
    pids = [int(line) for line in pid_file.read_text().split()]
    assert results == [1.0, 1.0, 1.0] and len(pids) == 2
    assert wait_until_dead(pids) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to the guard")
@pytest.mark.parametrize("how", ["os_exit", "loop", "close"])
def test_a_daemon_in_a_session_of_its_own_ends_with_its_worker(make_sandbox, tmp_path, how):
    """The worker ends by itself, is killed at its time limit, or ends with the run."""
    pid_file = tmp_path / "pids"
    sandbox = make_sandbox(1.0 if how == "loop" else 60.0)
    assert asyncio.run(sandbox.grade([("behave", payload("leave_a_daemon", str(pid_file)))])) == [1.0]
    if how == "close":
        asyncio.run(sandbox.close())
    else:
        asyncio.run(sandbox.grade([("behave", payload(how))]))
    assert wait_until_dead([int(pid_file.read_text())]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to the guard")
def test_a_grader_that_moves_to_a_session_of_its_own_is_killed_all_the_same(make_sandbox, tmp_path):
    pid_file = tmp_path / "pids"
    sandbox = make_sandbox(1.5)
    assert kinds(asyncio.run(sandbox.grade([("behave", payload("hang_in_a_session", str(pid_file)))]))) == ["timeout"]
    assert wait_until_dead([int(pid_file.read_text())]) == []
    assert asyncio.run(sandbox.grade([("behave", payload("fine"))])) == [1.0]


def test_order_is_kept_over_batches_terms_and_workers(make_sandbox):
    items = [("behave", "int", 3.0), ("slow", "fine", 1.0), ("offered", "x", 15.5)] * 100
    results = asyncio.run(make_sandbox(60.0, num_workers=2).grade([(term, payload(c)) for term, c, _ in items]))
    assert results == [expected for _, _, expected in items]


def test_workers_load_neither_torch_nor_numpy(shared_sandbox):
    assert grade(shared_sandbox, ["x"], term="libraries") == ([0.0], 0)


def test_functions_get_the_keywords_they_name(shared_sandbox):
    assert grade(shared_sandbox, ["x"], term="offered") == ([15.5], 0)
    assert grade(shared_sandbox, ["x"], term="everything") == ([1.0], 0)


def test_async_functions_wait_together(shared_sandbox):
    """None of the eight returns before all eight are waiting: one after the other, they would never end."""
    assert grade(shared_sandbox, ["x"] * 8, term="meet", answer=8) == ([1.0] * 8, 0)


def test_async_timeouts_and_errors_hit_their_own_item(make_sandbox):
    results, killed = grade(make_sandbox(1.0), ["fine", "never", "raise", "fine"], term="slow")
    assert kinds(results) == [1.0, "timeout", "crash", 1.0] and killed == 0
    assert "ConnectionError: judge is down" in results[2].message


def test_an_async_function_that_blocks_the_loop_fails_alone(make_sandbox):
    """Its neighbours fail with it at first, so each of them is graded again alone."""
    results, killed = grade(make_sandbox(0.5), ["block", "fine", "fine"], term="slow")
    assert kinds(results) == ["timeout", 1.0, 1.0] and killed == 2


def test_the_import_of_a_functions_module_is_no_part_of_its_grading(tmp_path, monkeypatch):
    """Also when a worker is replaced, and for async functions."""
    (tmp_path / "imported_slowly.py").write_text(
        "import time\ntime.sleep(1.6)\ndef waits(completion, answer):\n    time.sleep(60 * (completion == 'hang'))\n"
        "    return 1\nasync def fast(completion, answer):\n    return 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def run():
        sandbox = open_sandbox({n: RewardTerm(kind=f"imported_slowly:{n}") for n in ("waits", "fast")}, timeout_s=1.5)
        try:
            asked = (("waits", ""), ("waits", "hang"), ("waits", ""), ("fast", ""))
            return await sandbox.grade([(name, payload(text)) for name, text in asked])
        finally:
            await sandbox.close()

    assert kinds(asyncio.run(run())) == [1.0, "timeout", 1.0, 2.0]


def test_only_math_answer_turns_a_limit_of_cpu_time_into_a_wrong_answer():
    """A user's function that dies of the same signal is a crash."""

    async def run():
        sandbox = open_sandbox({"math": RewardTerm(kind="math_answer"), "user": TERMS["behave"]})
        try:
            return await sandbox.grade([("user", payload("sigprof")), ("math", payload("5", "5"))])
        finally:
            await sandbox.close()

    assert kinds(asyncio.run(run())) == ["crash", 1.0]


def test_a_reward_that_can_not_work_is_refused_at_the_start():
    sandbox = open_sandbox({"judge": RewardTerm(kind="math_anser")}, num_workers=2)
    with pytest.raises(ConfigError, match="did you mean 'math_answer'"):
        asyncio.run(sandbox.start())
    asyncio.run(sandbox.close())


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("table = bytearray(1 << 30)", r"(?s)did not start: exit code 1.*MemoryError.*max_memory_bytes"),
        (
            "import time; print('loads', flush=True); time.sleep(60)",
            "imports of the reward functions took more than 3 s. It printed: loads",
        ),
    ],
)
def test_the_error_for_a_worker_that_does_not_start_has_its_output(tmp_path, monkeypatch, module, found):
    (tmp_path / "large_module.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("meshrl.reward.sandbox._START_TIMEOUT_S", 3.0 if "sleep" in module else 60.0)
    sandbox = open_sandbox({"large": RewardTerm(kind="large_module:grade")})
    with pytest.raises(RewardError, match=found):
        asyncio.run(sandbox.start())
    asyncio.run(sandbox.close())


def test_closing_ends_a_grading_and_leaves_no_process():
    async def run():
        sandbox = open_sandbox()
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
from test_reward_sandbox import open_sandbox, payload

async def run():
    sandbox = open_sandbox()
    await sandbox.start()
    print("ready", flush=True)
    await sandbox.grade([("behave", payload(*sys.argv[1:]))])

asyncio.run(run())
"""


@pytest.mark.parametrize("deed", ["hang_in_c", "hang_in_a_session"])
def test_workers_die_with_a_killed_parent(deed, tmp_path):
    """Even a worker that hangs in C, which only SIGKILL ends, or that left its process group and its parent."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pid_file = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, deed, str(pid_file)], stdout=subprocess.PIPE, env=env)
    assert parent.stdout.readline() == b"ready\n"
    end = time.monotonic() + 60
    while deed == "hang_in_a_session" and not (pid_file.exists() and pid_file.read_text().endswith("\n")):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.2)  # so that the grading begins; the test is also valid without it
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()
    assert len(children) == (2 if deed == "hang_in_c" else 3)
    assert wait_until_dead([child.pid for child in children]) == []
