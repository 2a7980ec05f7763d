"""Throughput, waiting times of requests, and the note about devices without a known peak."""

import numpy as np
import pytest

from meshrl.config.cluster import ClusterConfig
from meshrl.core.types import Metric, Prompt, Times, Trajectory, Turn
from meshrl.loops.finish_step import request_times, throughput, unknown_device
from meshrl.monitor.metrics import divide, merge, units


def answered(*times):
    turns = [
        Turn(
            context_ids=np.array([1], np.int32),
            output_ids=np.array([2], np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            stop_reason="stop",
            times=one,
        )
        for one in times
    ]
    return Trajectory(prompt=Prompt(id="p", ordinal=0), group_id="p@0", index=0, turns=turns)


def test_requests_have_quantiles_of_their_queue_and_of_the_time_to_their_first_token():
    first = answered(*(Times(queue_s=0.1 * i, prefill_s=1.0) for i in range(20)))
    second = answered(Times(queue_s=5.0, prefill_s=2.0))
    merged = merge(request_times([first, second]))
    values = divide(merged)
    assert values["rollout/queue_s/p50"] == pytest.approx(1.0) and values["rollout/queue_max_s"] == 5.0
    assert values["rollout/first_token_s/p50"] == pytest.approx(2.0)
    assert values["rollout/first_token_s/p95"] == pytest.approx(2.9) and values["rollout/first_token_max_s"] == 7.0
    assert set(units(merged).values()) == {"s"}


def test_times_that_an_engine_does_not_report_are_absent():
    assert request_times([answered(Times())]) == [] == request_times([])
    names = {metric.name for metric in request_times([answered(Times(prefill_s=0.5))])}
    assert names == {"rollout/first_token_s", "rollout/first_token_max_s"}
    second = answered(Times(), Times(cached_tokens=2))
    second.turns[1].parent = 0  # a context of three tokens, with those of the first turn
    assert divide(merge(request_times([second]))) == {"rollout/cached_fraction": 0.5}


def test_agents_are_idle_while_they_wait_and_no_engine_computes():
    """Of 4 + 6 s, the engines computed 1 + 2 + 1 s; the rest is queues, transfers and pauses."""
    times = [Times(queue_s=1.0, prefill_s=1.0, decode_s=2.0, total_s=4.0), Times(decode_s=1.0, total_s=6.0)]
    assert divide(merge(request_times([answered(*times)])))["rollout/agent_idle"] == pytest.approx(0.6)


def test_throughput_divides_by_all_devices_also_those_that_only_sample():
    cluster = ClusterConfig(num_train_ranks=2, num_rollout_ranks=2)
    metric = throughput(cluster, 600, 3.0)
    assert divide(merge([metric])) == {"perf/throughput": 50.0} and metric.unit == "tokens/s/device"


def test_an_unknown_device_is_noted_at_the_first_step_only():
    flops = Metric(name="train/model_flops", sum=1.0, reduce="sum", unit="FLOP")
    known = Metric(name="perf/mfu", sum=1.0, weight=2.0, unit="fraction")
    assert "meshrl/model/costs.py" in (unknown_device(0, [flops]) or "")
    assert [unknown_device(1, [flops]), unknown_device(0, [flops, known]), unknown_device(0, [])] == [None] * 3
