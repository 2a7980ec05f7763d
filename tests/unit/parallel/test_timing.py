"""Spans on an accelerator: by events that are read when the device has reached them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from meshrl.monitor.recorder import recorder
from meshrl.parallel import timing


class Device:
    """An accelerator whose stream is at `now_ms`; events are recorded 5 ms later."""

    now_ms = 0.0

    def event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.now_ms + 5)
        event.query = lambda: event.at <= self.now_ms
        event.synchronize = lambda: setattr(self, "now_ms", max(self.now_ms, event.at))
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=device.event))
    recorder.clear()
    yield device
    timing._queued.clear()
    recorder.clear()


def test_the_times_of_an_accelerator_are_those_of_its_stream(device):
    gpu = torch.device("cuda", 0)
    before = time.time_ns()
    timing.settle(gpu)
    after = time.time_ns()
    device.now_ms += 100
    with timing.timed("forward", "compute", gpu, tokens=3):
        device.now_ms += 20
    timing.settle(gpu)
    assert recorder.trace(0).spans == []  # the device has not reached the end
    device.now_ms += 5
    timing.settle(gpu)
    (span,) = recorder.trace(0).spans
    assert (span.name, span.args, span.end_ns - span.start_ns) == ("forward", {"tokens": 3}, 20_000_000)
    assert before <= span.start_ns - 105_000_000 <= after


def test_a_group_of_one_rank_has_no_collectives():
    recorder.clear()
    with timing.timed_collective("all_gather", torch.zeros(4), 1):
        pass
    with timing.timed_collective("all_gather", torch.zeros(4, dtype=torch.bfloat16), 2):
        pass
    (span,) = recorder.trace(0).spans
    assert span.args == {"bytes": 8, "dtype": "bfloat16", "group": 2, "phase": ""}
    recorder.clear()
