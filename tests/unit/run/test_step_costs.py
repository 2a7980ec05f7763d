"""The FLOPs, the speed and the memory that a run reports for each step, with one rank and with two."""

import json

import numpy as np
import pytest
from tiny_run import train, write_run

from meshrl.config.load import load_sft_config
from meshrl.model.costs import model_flops
from meshrl.model.recipe import load_causal_lm
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import read_metrics
from meshrl.plan.memory import CPU_LIBRARIES
from meshrl.run import memory_check, start
from meshrl.tools.report.page import write_report


@pytest.mark.parametrize(
    "layout",
    [
        ("cluster.executor=inline", "train.max_tokens_per_microbatch=400"),
        ("cluster.num_train_ranks=2", "train.max_tokens_per_microbatch=64", "train.activation_checkpointing=true"),
    ],
    ids=["inline", "two processes"],
)
def test_flops_are_those_of_the_rows_whatever_the_ranks_and_micro_batches(tmp_path, monkeypatch, layout):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory_check, "SMALL", 0.0)  # its memory is planned, too
    config = write_run(tmp_path)
    run = train(config, "made", *layout)
    flops = model_flops(load_causal_lm(tmp_path / "model"))
    lines, units = read_metrics(run / "metrics.jsonl")
    assert [line.step for line in lines] == [1, 2]
    for line in lines:
        logged = read_rollouts(run / "rollouts" / f"step_{line.step:06d}.jsonl")
        answered = [one for one in logged if one.trajectory.reward is not None]
        turns = [one.trajectory.turns[0] for one in answered]
        rows = [(len(turn.context_ids) + len(turn.output_ids), len(turn.output_ids)) for turn in turns]
        groups: dict[str, list[float]] = {}
        for one in answered:
            groups.setdefault(one.trajectory.prompt.id, []).append(one.trajectory.reward)
        trains = [one.trajectory.reward != np.mean(groups[one.trajectory.prompt.id]) for one in answered]
        assert line.metrics["train/no_gradient_fraction"] == pytest.approx(1 - sum(trains) / len(trains))
        want = sum(flops.of_row(*row, one) for row, one in zip(rows, trains, strict=True))
        assert line.metrics["train/model_flops"] == pytest.approx(want)
        assert line.metrics["perf/mfu"] > 0 and line.metrics["perf/throughput"] > 0
        assert 0 <= line.metrics["rollout/queue_s/p50"] <= line.metrics["rollout/first_token_max_s"]
        for phase in ("rollout", "train", "optim", "sync"):
            assert line.metrics[f"memory/phase_bytes/{phase}"] > 1e6
            assert line.metrics[f"memory/planned_bytes/{phase}"] > CPU_LIBRARIES
    assert (units["train/model_flops"], units["perf/mfu"]) == ("FLOP", "fraction")
    notes = (run / "run_notes.txt").read_text()
    assert "perf/mfu" not in notes
    assert notes.count("health: truncation since step 1") == 1  # in both steps


def test_sft_reports_them_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = json.loads(write_run(tmp_path).read_text())
    rows = [{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}] * 8
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"model": given["model"], "run": given["run"], "cluster": {"executor": "inline"}}
    sft["sft"] = {"path": "chats.jsonl", "num_steps": 2, "rows_per_step": 4, "max_row_tokens": 64}
    (tmp_path / "sft.yaml").write_text(json.dumps(sft))
    monkeypatch.setattr(memory_check, "SMALL", 0.0)
    run = start.sft(load_sft_config(tmp_path / "sft.yaml", ["run.name=warm"]), write_report)
    for line in read_metrics(run / "metrics.jsonl")[0]:
        assert line.metrics["memory/planned_bytes/train"] > CPU_LIBRARIES
        assert line.metrics["train/model_flops"] > 0 and line.metrics["perf/mfu"] > 0
        assert line.metrics["perf/throughput"] > 0 and line.metrics["memory/phase_bytes/train"] > 1e6
