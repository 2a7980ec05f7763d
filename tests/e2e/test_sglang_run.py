"""`meshrl train` with real SGLang servers: one that the run starts, and one that runs already, which the other tests
share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from running_processes import running_descendants
from sglang_servers import ENVIRONMENT, KEY, MISSING, ON_CPU, START_S, serving_text
from test_lora_run import LORA, check_that_only_adapters_are_sent
from tiny_run import steps_of, train, write_run
from tiny_tokenizers import SHOWS_TOOLS, tiny_tokenizer

from meshrl.monitor.rollout_log import read_rollouts

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(900)]

OWN = (
    "rollout.engine=sglang",
    "rollout.max_running_requests=16",
    "rollout.sglang.mem_fraction_static=0.1",
    f"rollout.sglang.args={json.dumps(ON_CPU)}",
    f"rollout.sglang.start_deadline_s={START_S}",
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "sglang_multiturn" / "run_sglang_multiturn.sh"
SPLIT = ("cluster.num_train_ranks=2", "cluster.num_rollout_ranks=1")
INLINE = ("cluster.executor=inline",)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEY_OF_THE_SERVER", KEY)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return write_run(tmp_path)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_run(tmp_path_factory.mktemp("server")).parent / "model"
    with serving_text(model, "--enable-memory-saver", "--max-running-requests", "16") as address:
        yield address


@pytest.fixture
def running(url: str) -> tuple[str, ...]:
    """The server that runs already, as the sampler."""
    key = "rollout.sglang.api_key_env=KEY_OF_THE_SERVER"
    return "rollout.engine=sglang", f"rollout.sglang.url={url}", key, "rollout.max_context_tokens=240"


@pytest.fixture
def others() -> set[int]:
    """The ids of processes of the other tests' server."""
    return {process.pid for process in of_sglang(set())}


def of_sglang(others: set[int]) -> list[psutil.Process]:
    """Processes of SGLang below this process, without `others`."""
    return [p for p in running_descendants(r"sglang\.launch_server|sglang::") if p.pid not in others]


def check_proofs(steps: list[dict[str, float]], num_steps: int = 2) -> None:
    assert len(steps) == num_steps
    for step in steps:
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
        assert step["proof/logprob_abs_diff_mean"] < 1e-4


def test_the_multi_turn_example_runs_with_a_server_of_its_own(config: Path):
    """Colocated: in each version the trainer's logprobs agree with SGLang's."""
    folder = config.parent
    tiny_tokenizer(SHOWS_TOOLS).save_pretrained(folder / "model")
    for name in ("train", "test"):
        rows = (json.dumps({"question": f"{i}+{i}", "answer": f"#### {2 * i}"}) for i in range(8))
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    paths = {"MODEL": folder / "model", "DATA": folder, "OUT": folder, "MESHRL": Path(sys.executable).parent / "meshrl"}
    sizes = {"CPU": "1", "GPUS": "1", "PROMPTS": "2", "STEPS": "2"}
    limits = ("data.max_prompt_tokens=200", "rollout.sampling.max_new_tokens=8", "rollout.max_context_tokens=256")
    command = (EXAMPLE, "run.name=example", "loop.samples_per_prompt=2", *limits)
    subprocess.run(command, env={**os.environ, **sizes, **{k: str(v) for k, v in paths.items()}}, check=True)
    check_proofs([step for step in steps_of(folder / "example") if "loss/policy" in step])
    assert [p for p in psutil.process_iter(["cmdline"]) if str(folder / "model") in (p.info["cmdline"] or ())] == []


def test_a_killed_server_is_replaced_with_its_rank(config: Path, others: set[int]):
    """The server's rank ends, a new rank replaces it and gets the weights, and the run continues."""
    killed = []

    def kill() -> None:
        metrics = config.parent / "runs" / "killed" / "metrics.jsonl"
        while not metrics.is_file() or "loss" not in metrics.read_text():
            time.sleep(0.1)
        for process in of_sglang(others):
            process.kill()
            killed.append(process.pid)

    threading.Thread(target=kill, daemon=True).start()
    steps = steps_of(train(config, "killed", *OWN, *SPLIT, "loop.num_steps=4"))
    assert killed and sum(step["rollout/ranks_replaced"] for step in steps) == 1
    check_proofs(steps, 4)
    assert of_sglang(others) == []


def test_sglang_samples_the_next_step_while_the_trainer_trains(config: Path, running: tuple[str, ...]):
    steps = steps_of(train(config, "next", *running, *SPLIT, "loop.kind=one_step_off", "loop.num_steps=3"))
    assert len(steps) == 3 and steps[0]["proof/logprob_abs_diff_mean"] < 1e-4
    for step in steps[1:]:  # samples of older weights can't be re-scored; the probe compares the scores of new ones
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
        assert step["proof/probe_diff_mean"] < 1e-4


def test_weights_arrive_while_sglang_samples(config: Path, running: tuple[str, ...]):
    """Answers begin under older weights, and each sync's probe compares SGLang's scores with the trainer's."""
    overlapped = ("loop.kind=fully_async", "loop.max_staleness=2", "loop.num_steps=6", "loop.prompts_per_step=2")
    long = ("rollout.sampling.max_new_tokens=170", "cluster.num_rollout_ranks=1")
    folder = train(config, "overlapped", *running, *overlapped, *long)
    steps = steps_of(folder)
    assert len(steps) == 6 and all(step["sync/proven_read_back"] == 1 for step in steps)
    assert all(step["proof/probe_diff_mean"] < 1e-3 for step in steps[1:])
    records = [r for path in sorted((folder / "rollouts").glob("step_*.jsonl")) for r in read_rollouts(path)]
    assert Counter(r.trajectory.prompt.ordinal for r in records) == dict.fromkeys(range(12), 4)
    turns = [turn for r in records for turn in r.trajectory.turns]
    assert any(len(set(turn.versions)) > 1 for turn in turns)


def test_weights_are_restored_before_the_sync_and_caches_after_it(config: Path, running: tuple[str, ...]):
    steps = steps_of(train(config, "released", *running, *INLINE, "rollout.release_memory=true"), ("s",))
    check_proofs(steps)
    assert all(step["memory/released_bytes"] > 0 for step in steps)


@pytest.mark.parametrize("ranks", [INLINE, SPLIT], ids=["colocated", "split"])
def test_the_rank_of_a_server_merges_adapters_into_the_base(config: Path, running: tuple[str, ...], ranks):
    steps = steps_of(train(config, "delta", *running, *LORA, *ranks, "rollout.sync_mode=delta"), ())
    check_that_only_adapters_are_sent(steps)


def test_merged_weights_are_sent_in_full_syncs(config: Path, running: tuple[str, ...]):
    steps = steps_of(train(config, "merged", *running, *LORA, *INLINE), ())
    check_proofs(steps, 3)
    assert all(step["sync/num_bytes"] >= steps[0]["first_sync/num_bytes"] for step in steps)


def test_a_run_samples_from_an_endpoint_that_loads_folders(config: Path, url: str):
    """The weights of such a server can't be read back: only the re-score proves them, and the metrics state this."""
    keys = ("api_key_env=KEY_OF_THE_SERVER", f"url={url}", "weights=files")
    endpoint = (
        "rollout.engine=endpoint",
        "rollout.max_context_tokens=240",
        *(f"rollout.endpoint.{key}" for key in keys),
    )
    steps = steps_of(train(config, "endpoint", *SPLIT, *endpoint))
    assert len(steps) == 2
    for step in steps:
        assert step["sync/proven_wire"] == 1 and step["sync/proven_read_back"] == 0
        assert step["proof/logprob_abs_diff_mean"] < 1e-4
