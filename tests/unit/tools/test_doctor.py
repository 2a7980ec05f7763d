"""`meshrl doctor`: each line has a planted fault, and a healthy machine has none."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys

import pytest
from golden import check_golden
from tiny_run import write_run

from meshrl.cli import main
from meshrl.cluster import nodes
from meshrl.plan.decisions import HOST_BUCKET_BYTES
from meshrl.tools.doctor import facts as collected
from meshrl.tools.doctor.checks import DATA, FAIL, OK, WARN, judge
from meshrl.tools.doctor.command import self_test, view

GIB = 1 << 30
VERSIONS = {"meshrl": "0.2.0", "torch": "2.13.0", "transformers": "5.19.0"}
CONFIG = {
    "problem": "",
    "text": "2 train + 1 rollout ranks, executor processes, vllm",
    "folder": "runs",
    "shared_memory": GIB,
    "nodes": 1,
    "environment": None,
    "needs": ["vllm"],
    "memory": [("train rank", 60 * GIB, 139 * GIB)],
    "unplanned": "",
    "disk": "disk: 20 GB at most: states",
}
NODES = {"rank": 0, "error": "", "clocks_s": [1.0, 1.1], "speeds": [2e9, 3e9]}
HEALTHY = {
    "host": "a",
    "system": "Linux 6.1 x86_64, Python 3.11.7",
    "environment": {"versions": {**VERSIONS, "vllm": "0.32.0"}, "unmet": []},
    "pins": {"torch": "2.13.0", "transformers": "5.19.0"},
    "device": "cuda",
    "build": "CUDA 13.0",
    "notice": "",
    "devices": [("NVIDIA H200", 139 * GIB)] * 2,
    "device_files": ["nvidiactl"],
    "peers": [("0-1", "NV18", True, 300e9)],
    "variables": {},
    "interfaces": ["lo", "eth0"],
    "infiniband": [],
    "cores": 16,
    "cpu_quota": None,
    "slow_16_bits": False,
    "memory_limit": 128 * GIB,
    "shared_memory": (64 * GIB, 64 * GIB),
    "limits": {"nofile": [1024, 65536], "nproc": [None, None], "memlock": [8 << 20, 8 << 20], "core": [0, None]},
    "core_pattern": "core",
    "disk": {"folder": "/data", "error": "", "free": 900 * GIB, "has_locks": True, "speed": 1e9, "skew_s": 0.0},
    "files_ahead_s": -3600.0,
    "loopback_error": "",
    "num_ports": 28232,
    "namespaces": True,
    "cgroup": "version 2",
    "tokens": {"HF_TOKEN": "set", "WANDB_API_KEY": "not set", "MESHRL_SERVE_KEY": "not set", "MESHRL_TOKEN": "not set"},
    "config": CONFIG,
    "self_test": ("", "sampled, graded, trained and synced a step on 2 ranks of type cuda in 20 s"),
    "nodes": None,
}
HEALTHY["nodes"] = NODES | {"machines": [copy.deepcopy(HEALTHY) | {"host": host} for host in "ab"]}
SEPARATE = ("cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1", "loop.kind=one_step_off")
ON_VLLM = ("rollout.engine=vllm", f"rollout.vllm.python={sys.executable}")
VLLM_CONFLICT = {"versions": VERSIONS | {"vllm": "0.32.0"}, "unmet": [["vllm", "torch==2.13.0", "2.12.0"]]}
RAY_CONFLICT = {"versions": VERSIONS | {"ray": "2.60.0"}, "unmet": [["ray", "click<8", "8.5.1"]]}
NO_ENGINE = {"versions": {"meshrl": "0.2.0"}, "unmet": []}
# A fact (dots go into dictionaries), its faulty value, the line, its status, and a part of its text.
FAULTS = [
    ("system", "Darwin 24 arm64, Python 3.12", "system", WARN, "Darwin"),
    ("environment.unmet", [["meshrl", "transformers<5.25", "5.30.0"]], "packages", FAIL, "transformers<5.25 (5.30.0)"),
    ("environment.unmet", [["meshrl", "peft>=0.17", None]], "packages", FAIL, "peft>=0.17 (not installed)"),
    ("environment.versions", {"torch": "2.13.0"}, "packages", WARN, "not installed as a package"),
    ("pins.torch", "2.14.0", "tested versions", WARN, "torch 2.13.0 (2.14.0)"),
    ("environment", VLLM_CONFLICT, "engines", FAIL, "vllm 0.32.0 requires torch==2.13.0, but 2.12.0 is installed"),
    ("environment", RAY_CONFLICT, "engines", WARN, "ray 2.60.0 requires click<8"),
    ("config.environment", NO_ENGINE, "sampler's Python", FAIL, "lacks meshrl or vllm"),
    ("devices", [], "devices", FAIL, "there are device files: nvidiactl"),
    ("notice", "the driver is too old", "devices", WARN, "the driver is too old"),
    ("peers", [("0-1", "SYS", False, 2e10)], "P2P", WARN, "without direct access"),
    ("peers", [("0-1", "NV18", True, 1e9)], "P2P", WARN, "1.0 GB/s"),
    ("variables", {"NCCL_SOCKET_IFNAME": "ib"}, "network interface", FAIL, "is no interface of this machine"),
    ("variables", {"GLOO_SOCKET_IFNAME": "eth"}, "network interface", FAIL, "is no interface of this machine"),
    ("variables", {"NCCL_P2P_DISABLE": "1"}, "NCCL variables", WARN, "copies through host memory"),
    ("variables", {"NCCL_P2P_LEVEL": "FAST"}, "NCCL variables", WARN, "this is no level"),
    ("variables", {"NCCL_PROTO": "LL128"}, "NCCL variables", WARN, "corrupts data"),
    ("cpu_quota", 2.0, "CPU", WARN, "the cgroup grants 2"),
    ("memory_limit", GIB, "memory", WARN, "1.1 GB for all processes"),
    ("shared_memory", (64 << 20, 64 << 20), "shared memory", FAIL, "the run needs 1.1 GB"),
    ("limits.nofile", [1024, 1024], "open files", WARN, "up to 1,024"),
    ("limits.nproc", [512, 512], "processes", WARN, "up to 512"),
    ("infiniband", ["mlx5_0"], "locked memory", WARN, "mlx5_0"),
    ("limits.core", [None, None], "core files", WARN, "a crash writes one"),
    ("disk.error", "Read-only file system", "disk", FAIL, "Read-only"),
    ("disk.free", GIB, "disk", WARN, "1.1 GB free"),
    ("disk.speed", 1e6, "disk", WARN, "writes 1.0 MB/s"),
    ("disk.has_locks", False, "locks", WARN, "there are none"),
    ("disk.skew_s", -90.0, "clock", WARN, "differs by 90 s"),
    ("files_ahead_s", 900.0, "clock", WARN, "differs by 900 s"),
    ("loopback_error", "Connection refused", "loopback", FAIL, "Connection refused"),
    ("num_ports", 100, "ports", WARN, "100 that programs"),
    ("namespaces", False, "sandboxes", WARN, "refused"),
    ("tokens.HF_TOKEN", "malformed", "tokens", FAIL, "HF_TOKEN malformed"),
    ("config.needs", ["vllm", "wandb"], "tokens", WARN, "WANDB_API_KEY not set"),
    ("config.problem", "loop.num_steps is -1", "config", FAIL, "num_steps is -1"),
    ("config.memory", [("train rank", 150 * GIB, 139 * GIB)], "memory plan", FAIL, "train rank: needs 161.1 GB"),
    ("config.memory", [("train rank", 138 * GIB, 139 * GIB)], "memory plan", WARN, "train rank: needs"),
    ("config.unplanned", "no config.json", "memory plan", WARN, "not made: no config.json"),
    ("config.disk", "disk: 20 GB at most: states\nwarning: full", "disk use", WARN, "20 GB at most"),
    ("self_test", ("rank 1 failed", ""), "self-test", FAIL, "rank 1 failed"),
    ("nodes.error", "connection refused", "nodes", FAIL, "connection refused"),
    (
        "nodes.machines.1.environment.versions.meshrl",
        "2.12",
        "versions of nodes",
        FAIL,
        "0.2.0 on a (0), 2.12 on b (1)",
    ),
    ("nodes.machines.1.devices", [("NVIDIA H200", GIB)], "settings of nodes", WARN, "NVIDIA H200 on b (1)"),
    ("nodes.machines.1.variables", {"NCCL_NET": "IB"}, "settings of nodes", WARN, "NCCL_NET: none on a (0), IB"),
    ("nodes.clocks_s", [5.0, 1.0], "clocks of nodes", WARN, "at most 4.0 s"),
    ("nodes.speeds", [2e9, 1e7], "network", WARN, "10.0 MB/s from b (1) to a (0)"),
    ("nodes.machines.1.cpu_quota", 2.0, "b (1): CPU", WARN, "grants 2"),
]
ON_A_CPU = {
    "devices": [],
    "device_files": [],
    "peers": [],
    "build": "",
    "config": None,
    "self_test": None,
    "nodes": None,
}


def changed(fact: str, value: object) -> dict:
    facts = copy.deepcopy(HEALTHY)
    *path, name = fact.split(".")
    place = facts
    for key in path:
        place = place[int(key) if key.isdigit() else key]
    place[name] = value
    return facts


def test_a_healthy_machine_has_only_good_lines():
    for facts in (HEALTHY, HEALTHY | ON_A_CPU):
        assert [line for line in judge(facts) if line.status != OK] == []


@pytest.mark.parametrize("fact,value,name,status,text", FAULTS)
def test_each_planted_fault_is_named_with_what_to_do(fact, value, name, status, text):
    faults = [line for line in judge(changed(fact, value)) if line.status != OK]
    assert [(line.name, line.status) for line in faults] == [(name, status)]
    assert text in faults[0].text and faults[0].remedy


def test_slow_products_of_a_cpu_are_named():
    (fault,) = [line for line in judge(HEALTHY | ON_A_CPU | {"slow_16_bits": True}) if line.status != OK]
    assert (fault.name, fault.status) == ("16-bit products", WARN) and "float32" in fault.remedy


def test_machines_are_compared_only_when_they_were_started_for_it(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert "torchrun --nnodes N" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_report_as_two_machines(tmp_path):
    """The second one has another variable of NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command, own = [sys.executable, "-m", "meshrl", "doctor", "--nodes", "--json"], [{}, {"NCCL_NET": "IB"}]
    started = [
        subprocess.Popen(command, env={**os.environ, **address, "RANK": str(i), **own[i]}, stdout=subprocess.PIPE)
        for i in range(2)
    ]
    texts = [process.communicate(timeout=500)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0] and not texts[1].strip()
    found = json.loads(texts[0])
    texts = {line["name"]: line["text"] for line in found["lines"]}
    assert (
        texts["nodes"].startswith("2 machines reach each other") and "NCCL_NET: none on" in texts["settings of nodes"]
    )
    assert min(found["facts"]["nodes"]["speeds"]) > 0


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_an_error(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nodes, "CONNECT_S", 2)
    found = nodes.compare_nodes({})
    assert found["rank"] == 1 and "127.0.0.1" in found["error"]


def test_every_remedy_has_a_planted_fault():
    assert {*DATA["remedies"]} - {name for _, _, name, _, _ in FAULTS} == {"16-bit products"}


def test_variables_of_nccl_are_explained_and_have_no_effect_on_a_cpu():
    variables = {"NCCL_P2P_LEVEL": "NVL", "NCCL_P2P_DISABLE": "0", "NCCL_NEW": "1"}
    texts = [line.text for line in judge(HEALTHY | {"variables": variables}) if line.name == "NCCL variables"]
    assert "limits and does not force" in texts[0] and "no effect at this value" in texts[1] and "no entry" in texts[2]
    lines = judge(HEALTHY | ON_A_CPU | {"variables": {"NCCL_P2P_DISABLE": "1"}})
    assert [line.status for line in lines if line.name == "NCCL variables"] == [OK]


@pytest.mark.parametrize(
    "name,value,used",
    [("NCCL", "^docker,lo", True), ("NCCL", "=eth", False), ("NCCL", "et", True), ("GLOO", "et", False)],
)
def test_interfaces_are_named_by_the_rules_of_nccl(name, value, used):
    lines = judge(HEALTHY | {"variables": {f"{name}_SOCKET_IFNAME": value}})
    assert [line.status for line in lines if line.name == "network interface"] == [OK if used else FAIL]


def test_several_nodes_need_an_interface_that_others_reach():
    facts = changed("config.nodes", 2) | {"variables": {"NCCL_SOCKET_IFNAME": "lo"}}
    assert "other machines do not reach" in next(line.text for line in judge(facts) if line.status == FAIL)


def test_the_view_in_a_terminal():
    facts = changed("disk.error", "Read-only file system") | {"cpu_quota": 2.0, "variables": {"NCCL_ALGO": "Ring"}}
    check_golden("doctor.txt", view(judge(facts), has_self_test=True))


def test_this_machine(capsys, tmp_path, monkeypatch):
    """The facts of a real machine, on which the tests run, with a config: no FAIL."""
    monkeypatch.chdir(tmp_path)
    config = write_run(tmp_path)
    assert main(["doctor", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [line["name"] for line in found["lines"]]
    assert {"devices", "disk", "memory plan", "disk use"} <= {*names} and found["facts"]["disk"]["speed"] > 0
    assert main(["doctor", str(config), "loop.num_steps=-1"]) == 1
    assert "FAIL  config" in capsys.readouterr().out


@pytest.mark.parametrize("overrides,buckets", [((), 0), (SEPARATE, 2), (ON_VLLM, 3)], ids=["colocated", "own", "vllm"])
def test_the_buckets_of_other_processes_are_counted_if_their_size_is_auto(tmp_path, overrides, buckets):
    found = collected.config_facts(str(write_run(tmp_path)), ["rollout.sync_bucket_bytes=null", *overrides])
    assert found["problem"] == "" and found["shared_memory"] == buckets * HOST_BUCKET_BYTES


def test_the_python_of_a_sampler_is_asked_for_the_engine_and_meshrl(tmp_path):
    found = collected.config_facts(str(write_run(tmp_path)), ON_VLLM)
    assert found["needs"] == ["vllm"] and found["environment"] == json.loads(json.dumps(collected.environment()))
    (line,) = [each for each in judge(HEALTHY | {"config": CONFIG | found}) if each.name == "sampler's Python"]
    has_vllm = any("vllm" in name for name in found["environment"]["versions"])
    assert (line.status, line.text) == ((OK, "has meshrl and vllm") if has_vllm else (FAIL, "lacks meshrl or vllm"))


def test_values_of_secrets_are_never_printed(tmp_path):
    home = tmp_path / ".cache" / "huggingface"
    home.mkdir(parents=True)
    (home / "token").write_text("hf_secret\n")
    found = collected.tokens({"WANDB_API_KEY": "'quoted'", "MESHRL_TOKEN": "abc"}, tmp_path)
    assert found == {
        "HF_TOKEN": "set",
        "WANDB_API_KEY": "malformed",
        "MESHRL_SERVE_KEY": "not set",
        "MESHRL_TOKEN": "set",
    }


def test_links_of_gpus_are_read_from_the_topology():
    matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-15\nGPU1\tNV18\t X \t0-15\n\nLegend:\n"
    assert collected.link_names(matrix) == {(0, 1): "NV18", (1, 0): "NV18"}
    assert collected.link_names("") == {}


def test_a_folder_without_rights_is_an_error_of_the_disk(monkeypatch, tmp_path):
    def refuses(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(collected.tempfile, "NamedTemporaryFile", refuses)
    assert collected.disk_facts(tmp_path / "new")["error"] == "Permission denied"


@pytest.mark.slow
def test_the_self_test_makes_a_step_of_two_ranks():
    error, text = self_test("cpu", 0)
    assert error == "" and text.startswith("sampled, graded, trained and synced a step on 2 ranks of type cpu")


def test_a_self_test_that_fails_or_hangs_is_reported(monkeypatch):
    for outcome, text in (
        (subprocess.CompletedProcess([], 1, "", "a\nrank 0 failed"), "a rank 0 failed"),
        (subprocess.TimeoutExpired([], 1), "did not end within"),
    ):

        def run(*_, outcome=outcome, **__):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr("meshrl.tools.doctor.command.subprocess.run", run)
        assert text in self_test("cpu", 0)[0]
