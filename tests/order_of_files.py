"""Which test files run in the same process, and which start first: `make test` runs several processes in parallel.

The files of a group below share ranks and servers. The slowest groups start first, so that all processes end at about
the same time; all other files take seconds.
"""

from __future__ import annotations

from typing import Any

LONGEST_FIRST: tuple[tuple[str, ...], ...] = (
    ("tests/dist/test_real_weights.py",),
    # they use the `pool` of ranks, which starts four processes
    (
        *("tests/dist/", "tests/unit/run/test_own_loop.py", "tests/contract/test_model_families.py"),
        "tests/unit/cluster/test_flight_recorder.py",
    ),
    # they use a fork server that has imported what ranks need
    (
        *("tests/contract/test_executors.py", "tests/contract/test_loops.py", "tests/e2e/test_lora_run.py"),
        *("tests/e2e/test_own_algorithm_run.py", "tests/e2e/test_mixture_run.py"),
    ),
    (
        *(f"tests/unit/cluster/test_{name}.py" for name in ("lost_trainers", "process_executor", "in_flight")),
        "tests/unit/cluster/test_remote_executor.py",
        *("tests/faults/test_named_faults.py", "tests/faults/test_schedules.py"),  # last: each ends its fork server
    ),
    ("tests/contract/test_rollout_engines.py", "tests/contract/test_weight_sync.py"),
    ("tests/e2e/test_release_memory.py",),
    ("tests/e2e/test_benchmarks.py",),
    ("tests/unit/process/test_fork_server.py",),
    ("tests/e2e/test_python_api.py",),
    ("tests/unit/reward/test_reward_sandbox.py",),
    ("tests/policy/",),  # the files' syntax trees
    ("tests/e2e/test_resume.py",),
    ("tests/faults/test_trainers_restarted.py",),
    ("tests/unit/run/test_run_record.py",),
    ("tests/fuzz/test_fuzz_config.py",),
    ("tests/contract/test_sync_transports.py",),
)


def order_of(test: str) -> tuple[int, int]:
    """The position of a test's group, and that of its file within the group."""
    place = place_of(test)
    files = LONGEST_FIRST[place] if place < len(LONGEST_FIRST) else ()
    return place, next((at for at, file in enumerate(files) if test.startswith(file)), 0)


def place_of(test: str) -> int:
    """The position of a test's group; files outside the groups come last."""
    places = (place for place, files in enumerate(LONGEST_FIRST) if test.startswith(files))
    return next(places, len(LONGEST_FIRST))


def scheduler(config: Any, log: Any) -> Any:
    """The pytest-xdist scheduler: it keeps groups and files together, in the order of the collected tests."""
    from xdist.scheduler import LoadFileScheduling

    class GroupScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            place = place_of(nodeid)
            return str(place) if place < len(LONGEST_FIRST) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # otherwise the files with the most tests would start first
    return GroupScheduling(config, log)
