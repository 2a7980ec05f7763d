"""After a fault in any phase, the run ends or continues as in docs/faults.md, and names the rank.

`hook/sitecustomize.py` injects the faults into real runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_cases import Case, cases
from other_faults import OTHER_FAULTS
from tiny_run import steps_of, train, write_run

from meshrl.cli import main

pytestmark = pytest.mark.timeout(900)  # ranks start slowly on a machine that does much else
ROOT = Path(__file__).parents[2]
CASES = [case for case in cases() if not case.needs_cgroup]  # test_kernel_kills.py has those
LAYOUT = {False: ("cluster.num_train_ranks=2",), True: ("cluster.num_rollout_ranks=1",)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("faults"))
    sections = json.loads(path.read_text())
    sections["loop"] |= {"num_steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2}
    path.write_text(json.dumps(sections))
    return path


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Path:
    return train(config, "undisturbed", *LAYOUT[True])


def planted_by(case: Case) -> dict[str, Any]:
    return {"rank": case.place.rank, "method": case.place.method, "call": case.place.call, "how": case.fault.how}


def _run(config: Path, case: Case) -> tuple[int, Path]:
    silent = case.fault.how in ("stop", "sleep")
    deadline = (f"cluster.deadlines.{case.place.phase}={case.place.deadline_s}",) if silent else ()
    threads = torch.get_num_threads()
    restarts = () if case.is_replaced else ("cluster.max_restarts=0",)
    arguments = (*LAYOUT[case.place.split], *deadline, *restarts, *case.place.overrides, f"run.name={case.id}")
    try:
        return main(["train", str(config), *arguments]), config.parent / "runs" / case.id
    finally:
        torch.set_num_threads(threads)


def _marks(case: Case) -> Any:
    return pytest.param(case, id=case.id, marks=() if case.fast else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("case", [_marks(case) for case in CASES if not case.is_replaced])
def test_a_fault_in_a_rank_ends_the_run_and_is_named(case, config, planted, capfd):
    """Rank, phase and cause are in the first line; the stacks of the others are below it and in the run's folder."""
    planted(planted_by(case))
    code, folder = _run(config, case)
    assert code == 1
    printed = capfd.readouterr().err
    ours = printed[printed.index("meshrl: ") :].splitlines()
    assert ours[0].startswith(f"meshrl: RankFailure: {case.first_line}"), ours[0]
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed" and result["error"].startswith(f"RankFailure: {case.first_line}")
    if case.place.phase != "start":
        other = 0
        assert f"rank {other}, in phase" in printed
        assert 'File "' in (folder / "stacks.txt").read_text()
        assert ours[-2] == f"the stacks of all ranks at the failure: {folder / 'stacks.txt'}"
    assert ours[-1].endswith("docs/faq.md, section RankFailure")
    if case.fault.how in ("raise", "memory") and case.place.phase != "start":
        assert "sitecustomize.py" in printed, "the traceback is printed"


@pytest.mark.parametrize("case", [_marks(case) for case in CASES if case.is_replaced])
def test_a_lost_sampler_is_replaced_and_the_run_has_the_same_metrics(case, config, planted, undisturbed, capfd):
    """A rank with the same weights and seeds processes its requests again."""
    planted(planted_by(case))
    code, folder = _run(config, case)
    assert code == 0
    printed = capfd.readouterr()
    assert f"{case.first_line}" in printed.out + printed.err and "rank 1 was replaced in" in printed.out + printed.err
    (step,), (expected,) = steps_of(folder), steps_of(undisturbed)
    replaced, redone = step.pop("rollout/ranks_replaced"), step.pop("rollout/requests_retried")
    assert replaced == 1 and (redone > 0) == (case.place.phase == "rollout")
    assert (expected.pop("rollout/ranks_replaced"), expected.pop("rollout/requests_retried")) == (0, 0)
    assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("transport", ["auto", "broadcast"])
def test_a_sampler_that_is_lost_in_a_sync_is_replaced_with_every_transport(transport, how, config, planted, capfd):
    """The other ranks of a broken broadcast do not wait for it, and a new group forms."""
    planted({"rank": 2, "method": "receive", "call": 12, "how": how})
    arguments = (
        *("cluster.num_train_ranks=1", "cluster.num_rollout_ranks=2", "cluster.deadlines.sync=10"),
        *(f"rollout.sync_transport={transport}", f"run.name={transport}_{how}", "rollout.sync_bucket_bytes=4096"),
    )
    assert main(["train", str(config), *arguments]) == 0
    printed = "".join(capfd.readouterr())
    assert "rank 2 failed in phase 'sync'" in printed and "rank 2 was replaced in" in printed
    (step,) = steps_of(config.parent / "runs" / f"{transport}_{how}")
    assert step["rollout/ranks_replaced"] == 1 and step["sync/proven_read_back"] == 1


@pytest.mark.slow
def test_a_lost_sampler_beyond_max_restarts_ends_the_run(config, planted, capfd):
    """cluster.max_restarts is the limit."""
    (case,) = [case for case in CASES if case.id == "rollout-split-kill"]
    planted(planted_by(case))
    arguments = (*LAYOUT[True], "cluster.max_restarts=0", "run.name=too_often")
    assert main(["train", str(config), *arguments]) == 1
    printed = capfd.readouterr().err
    assert f"meshrl: RankFailure: {case.first_line}" in printed
    assert "the rank is not replaced: ranks replaced so far 0, cluster.max_restarts 0" in printed


@pytest.mark.parametrize("test", [test for faults in OTHER_FAULTS.values() for _, _, test in faults])
def test_each_fault_outside_the_ranks_has_its_test(test):
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
