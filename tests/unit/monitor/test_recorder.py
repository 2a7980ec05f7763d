"""The ring of spans of a process, and the metrics of a step's communication."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.monitor.recorder import Recorder


def collective(recorder, start, end, phase="train"):
    recorder.add("all_gather", "collective", start, end, {"phase": phase})


def test_the_newest_spans_are_kept_and_the_others_counted():
    recorder = Recorder(size=3)
    for start in range(5):
        recorder.add("forward", "compute", start, start + 1, {})
    trace = recorder.trace(rank=7)
    assert (trace.rank, trace.num_dropped, [s.start_ns for s in trace.spans]) == (7, 2, [2, 3, 4])
    recorder.clear()
    assert recorder.trace(0).spans == [] and recorder.trace(0).num_dropped == 0


def test_a_phase_contains_its_spans_and_samples_the_memory_at_its_end():
    recorder = Recorder()
    recorder.measure = lambda: {"resident_bytes": 5}
    with pytest.raises(ZeroDivisionError), recorder.span("train", "phase", method="m"):
        assert recorder.phase == "train"
        with recorder.span("pack", "host"):
            assert recorder.phase == "train"
        raise ZeroDivisionError
    assert recorder.phase == ""
    inner, outer = recorder.trace(0).spans
    assert (inner.name, outer.name, outer.args) == ("pack", "train", {"method": "m"})
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    (sample,) = recorder.trace(0).memory
    assert (sample.phase, sample.parts) == ("train", {"resident_bytes": 5}) and sample.at_ns >= outer.end_ns


def test_calls_that_overlap_are_one_span():
    recorder, order = Recorder(), asyncio.Event

    async def call(begin, end):
        await begin.wait()
        with recorder.overlapping("rollout", "generate"):
            await end.wait()

    async def main():
        events = [order() for _ in range(6)]
        calls = [asyncio.ensure_future(call(events[i], events[j])) for i, j in ((0, 2), (1, 3), (4, 5))]
        for event in events:
            event.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert [(s.name, s.args) for s in recorder.trace(0).spans] == [
        ("rollout", {"method": "generate", "count": 2}),
        ("rollout", {"method": "generate", "count": 1}),
    ]
    assert len(recorder.trace(0).memory) == 2


def test_the_ratio_is_of_the_training_phases_and_counts_overlapping_collectives_once():
    recorder = Recorder()
    for name, start, end in (("annotate", 0, 20), ("train", 20, 90), ("optim", 90, 100), ("sync", 100, 500)):
        recorder.add(name, "phase", start, end, {})
    collective(recorder, 30, 40)
    collective(recorder, 35, 50)
    collective(recorder, 36, 38)
    collective(recorder, 60, 70, "optim")
    collective(recorder, 200, 300, "sync")
    collective(recorder, 0, 10, "")
    metrics = {m.name: m for m in recorder.step_metrics(blocking=True)}
    assert metrics["perf/compute_comm_ratio"].sum == pytest.approx((100 - 30) / 30)
    exposed = metrics["perf/exposed_comm_fraction"]
    assert (exposed.sum, exposed.weight) == (30, 100)
    assert recorder.step_metrics(blocking=True) == []  # of the next step
    recorder.add("train", "phase", 0, 100, {})
    assert recorder.step_metrics(blocking=True) == []  # without communication


def test_where_collectives_do_not_block_the_exposed_part_is_unknown():
    recorder = Recorder()
    recorder.add("train", "phase", 0, 100, {})
    collective(recorder, 50, 150)
    (ratio,) = recorder.step_metrics(blocking=False)
    assert (ratio.name, ratio.sum) == ("perf/compute_comm_ratio", 1.0)
