"""A run gives the same numbers with every executor and layout (the contract of cluster/executor.py)."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from open_ports import listed, listening
from run_contents import assert_equal_tensors, sampled_turns, weights
from safetensors.torch import load_file
from tiny_run import steps_of, train, write_run
from torchrun_runs import processes_of_run, train_by_torchrun

from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import phase
from meshrl.cluster.inline import InlineExecutor
from meshrl.core.errors import CheckpointError, SamplerMismatchError
from meshrl.monitor.recorder import CONTROLLER, SPANS_FILE, read_controller, read_rank
from meshrl.monitor.sinks import TerminalSink, read_metrics
from meshrl.sync.transaction import SyncOrder

pytestmark = pytest.mark.timeout(300)  # a test may start two runs with up to three processes each

Run = Callable[..., Path]
RAY = ("cluster.executor=ray", "cluster.address=local")
SPLIT = ("cluster.num_train_ranks=2", "cluster.num_rollout_ranks=1")
LAYOUTS = {
    "inline": ("cluster.executor=inline",),
    "one process": (),
    "two ranks": ("cluster.num_train_ranks=2",),
    "two ranks again": ("cluster.num_train_ranks=2",),
    "split": SPLIT,
    "split, by broadcast": (*SPLIT, "rollout.sync_transport=broadcast"),
    "ray": ("cluster.num_train_ranks=2", *RAY),
    "ray split": (*SPLIT, *RAY),
    "torchrun": ("cluster.num_train_ranks=2",),
    "torchrun on two nodes": ("cluster.num_train_ranks=2",),
}
NODES = {"torchrun": 1, "torchrun on two nodes": 2}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def threads() -> Any:
    """Restore the number of threads, because an inline rank sets it for this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shown() -> dict[str, list[str]]:
    """The progress that the runs of `run` have shown, by layout; not of torchrun, which runs in other processes."""
    return {}


@pytest.fixture(scope="module")
def listened() -> dict[str, set[tuple[str, str]]]:
    """What the processes of these runs listened on after their first step: (kind of process, where)."""
    return {}


def _listening() -> dict[psutil.Process, set[tuple[str, str]]]:
    """Of this process, which is the controller, and of those below it."""
    this = psutil.Process()
    found = {each: set(listening(each, "processes")) for each in this.children(recursive=True)}
    return found | {this: {("controller", where) for _, where in listening(this, "inline")}}


@pytest.fixture(scope="module")
def run(config: Path, shown: dict[str, list[str]], listened: dict[str, set[tuple[str, str]]]) -> Run:
    """The run folder of a layout; each layout runs once."""
    made: dict[str, Path] = {}
    numbers = itertools.count()  # a failed run leaves its folder, and the next test tries again

    def get(layout: str) -> Path:
        if layout.startswith("ray"):
            pytest.importorskip("ray", reason="ray is not installed: pip install 'meshrl[ray]'")
        if layout not in made:
            name = f"run_{next(numbers)}"
            if layout in NODES:
                made[layout] = train_by_torchrun(config, name, *LAYOUTS[layout], nodes=NODES[layout], ranks=2)
            else:
                texts, found, before = [], set[tuple[str, str]](), _listening()
                shown[layout], listened[layout] = texts, found

                def look(step: int, metrics: Any) -> None:
                    for process, places in _listening().items() if step == 1 else ():
                        found.update(places - before.get(process, set()))

                with mock.patch.object(TerminalSink, "progress", lambda sink, text: texts.append(text)):
                    made[layout] = train(config, name, *LAYOUTS[layout], on_step=look)
            assert processes_of_run(name) == []
        return made[layout]

    return get


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("inline", "one process"),
        ("two ranks", "two ranks again"),
        ("two ranks", "ray"),
        pytest.param("split", "split, by broadcast", marks=pytest.mark.slow),
        pytest.param("split", "ray split", marks=pytest.mark.slow),
        pytest.param("two ranks", "torchrun", marks=pytest.mark.slow),  # tests/e2e/test_open_ports.py has a quick one
        pytest.param("two ranks", "torchrun on two nodes", marks=pytest.mark.slow),
    ],
)
def test_the_same_run_gives_the_same_numbers_to_the_bit(run: Run, a: str, b: str):
    """With another executor at the same world size, and twice with the same: metrics, tokens, logprobs, weights."""
    first, second = run(a), run(b)
    assert steps_of(first) == steps_of(second)
    assert len(steps_of(first)) == 2
    assert sampled_turns(first) == sampled_turns(second) and len(sampled_turns(first)) == 2 * 4 * 4
    ours = weights(first, 2)
    assert_equal_tensors(ours, weights(second, 2))
    assert any(not torch.equal(ours[name], start) for name, start in load_file(_model(first)).items())


@pytest.mark.parametrize(
    "layout", ["inline", "two ranks", "ray", "split", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_every_run_leaves_the_spans_of_its_newest_steps(run: Run, layout: str):
    folder = run(layout)
    trace = read_controller(folder / "traces" / CONTROLLER)
    assert [(s.step, s.traced) for s in trace.steps] == [(1, False), (2, False)]
    for rank, facts in trace.ranks.items():
        (clock,) = facts.clock
        assert abs(clock.offset_ns) <= clock.error_ns  # one machine
        spans = read_rank(folder / "traces" / SPANS_FILE.format(rank)).spans
        assert facts.trains == any(s.name == "backward" for s in spans)
        assert facts.samples == any(s.args.get("method") == "generate" for s in spans)
    num_trainers = sum(facts.trains for facts in trace.ranks.values())
    metrics = [line.metrics for line in read_metrics(folder / "metrics.jsonl")[0]]
    assert all(("perf/compute_comm_ratio" in step) == (num_trainers > 1) for step in metrics)


@pytest.mark.parametrize("layout", ["inline", "two ranks", "split", "ray"])
def test_every_run_shows_how_far_a_phase_is(run: Run, shown: dict[str, list[str]], layout: str):
    """Micro-batches at most twice a second if the rank is another process; so of this short run, only the first one."""
    notes = (run(layout) / "run_notes.txt").read_text()
    assert re.search(r"first prompt: \d+ tokens, '.*\d\+\d", notes)
    parts = [text.partition(" of ") for text in shown[layout] if text]
    answers = [int(count) for count, _, rest in parts if rest == "16 answers"]
    batches = [(int(count), int(rest.split()[0])) for count, _, rest in parts if rest.endswith(" micro-batches")]
    assert answers == [*range(1, 17)] * 2
    assert batches[0][0] == 1 < batches[0][1]
    if layout == "inline":
        assert batches == [(count, total) for _, total in batches[:: batches[0][1]] for count in range(1, total + 1)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("executor", "layout"), [("inline", "inline"), ("processes", "split")])
def test_what_listens_is_what_the_page_about_security_lists(run: Run, listened, executor: str, layout: str):
    """tests/e2e/test_open_ports.py looks at all executors, and at files."""
    run(layout)
    assert listened[layout] == listed(executor)


def _model(folder: Path) -> Path:
    return folder.parents[1] / "model" / "model.safetensors"


@pytest.mark.parametrize(("a", "b"), [("two ranks", "one process"), ("split", "two ranks")])
def test_another_layout_gives_the_same_numbers_to_rounding(run: Run, a: str, b: str):
    """Two ranks compared with one; samplers in separate processes (weights through shared memory) with colocated."""
    ours, theirs = steps_of(run(a)), steps_of(run(b))
    for mine, other in zip(ours, theirs, strict=True):
        shared = {k for k in mine.keys() & other.keys() if not k.startswith("proof/")}
        assert {"reward/mean", "loss/policy", "train/grad_norm", "rollout/length_mean_tokens"} <= shared
        for name in shared:
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
        assert mine["proof/logprob_abs_diff_max"] < 1e-4
    for (*mine, logprobs, versions), (*other, others, others_versions) in zip(
        sampled_turns(run(a)), sampled_turns(run(b)), strict=True
    ):
        assert (mine, versions) == (other, others_versions)
        np.testing.assert_allclose(logprobs, others, atol=1e-3)
    ours, theirs = weights(run(a), 2), weights(run(b), 2)
    for name in ours:  # AdamW's first steps are signs of gradients, and rounding may change the sign of a tiny gradient
        assert float((ours[name] - theirs[name]).abs().mean()) < 1e-4, name


def _calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the loop's calls to the ranks by method, and calls of forward also by role. "loss weight": the sum of all
    tokens' weights in each update, rounded to an integer."""
    seen: Counter[str] = Counter()
    call = InlineExecutor.call

    async def counting(self: InlineExecutor, rank: int, method: Any, *args: Any) -> Any:
        seen[method.__name__ + (f" {args[-1]}" if method is RankWorker.forward else "")] += 1
        if method is RankWorker.forward_backward:
            seen["loss weight"] += round(sum(float(s.loss_weight.sum()) for s in args[0].samples().values()))
        return await call(self, rank, method, *args)

    monkeypatch.setattr(InlineExecutor, "call", counting)
    return seen


@pytest.mark.parametrize(
    ("override", "forwards"),
    [
        ("train.updates_per_step=1", {}),
        ("train.updates_per_step=2", {"forward policy": 4}),
        ("algo.kl.coef=0.1", {"forward reference": 2}),
    ],
)
def test_a_step_asks_for_no_forward_that_the_algorithm_does_not_need(config, monkeypatch, override, forwards):
    """None for a single on-policy update; old logprobs once for several updates; the reference only for a KL."""
    calls = _calls(monkeypatch)
    folder = train(config, "counted_" + "_".join(forwards).replace(" ", "_"), "cluster.executor=inline", override)
    assert {name: n for name, n in calls.items() if name.startswith("forward ")} == forwards
    assert calls["forward_backward"] == calls["optim_step"] == 2 * (2 if "updates_per_step=2" in override else 1)
    assert calls["loss weight"] == calls["optim_step"], "each update has its own denominator"
    first = steps_of(folder)[0]
    if not forwards:
        assert first["loss/ratio_mean"] == first["loss/ratio_max"] == 1
        assert first["loss/clip_fraction_low"] == first["loss/clip_fraction_high"] == 0
    if "forward policy" in forwards:
        assert first["loss/ratio_max"] > 1, "the second update is compared with the policy before the first"
    if "forward reference" in forwards:
        assert first["loss/kl"] == 0, "policy and reference are the same model at step 0"


def test_a_sampler_that_kept_its_old_weights_is_caught_within_the_step(config, monkeypatch):
    """It acknowledged the new weights, but computes with the old ones. Nothing is trained on its samples."""
    sync, workers = RankWorker.sync, []

    @phase("sync")
    async def stale(self: RankWorker, order: SyncOrder) -> Any:
        parameters = dict(self._sampler()._weights.lm.named_parameters())
        old = {name: p.clone() for name, p in parameters.items()}
        ack = await sync(self, order)
        if order.header.version == 1:
            for name, p in parameters.items():
                p.copy_(old[name])
        workers.append(self)
        return ack

    monkeypatch.setattr(RankWorker, "sync", stale)
    with pytest.raises(SamplerMismatchError, match="at weight version 1 the logprobs of sampler"):
        train(config, "stale", "cluster.executor=inline", "loop.num_steps=4")
    assert len(steps_of(config.parent / "runs" / "stale")) == 1
    assert workers[0].engines["policy"].num_optimizer_steps == 1


def test_after_inline_runs_the_process_can_fork_in_another_thread(config: Path):
    """Ray starts its servers in this way, with Python code in the forked child. If the main thread still had meshes of
    the runs, their destructors would run in the child, and it would crash with SIGSEGV or hang."""
    inline = (*LAYOUTS["inline"], "loop.save_every_steps=1", "run.resume=auto")
    train(config, "before_a_fork", *inline)
    with pytest.raises(CheckpointError):
        train(config, "before_a_fork", *inline, "train.master_dtype=bfloat16", "loop.num_steps=3")
    command, ended, before = [sys.executable, "-c", "print('alive')"], [], psutil.Process().children()

    def fork() -> None:
        ended.append(subprocess.run(command, capture_output=True, preexec_fn=lambda: None))

    forking = threading.Thread(target=fork, daemon=True)
    forking.start()
    forking.join(60)
    for stuck in set(psutil.Process().children()) - set(before):
        stuck.kill()
    assert [(each.returncode, each.stdout) for each in ended] == [(0, b"alive\n")], "the child did not run"
