"""Checks of who samples: that its engine is installed, and of the keys that only one engine reads."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from meshrl.config.rollout import (
    SGLANG_OWN_ARGS,
    VLLM_OWN_ARGS,
    EndpointConfig,
    RolloutConfig,
    SglangConfig,
    VllmConfig,
)
from meshrl.config.run import RunConfig
from meshrl.config.source import Problem, Value

LENDS_MEMORY = ("embedded", "vllm", "sglang")


def engine_problems(given: Mapping[str, Value], config: RunConfig, purpose: str) -> Iterator[Problem]:
    """What is wrong with the choice of the engine, or with what it was told. purpose: train | eval."""
    rollout = config.rollout
    tp_key = "rollout.mesh.infer_tp" if "rollout.mesh.infer_tp" in given else "rollout.tensor_model_parallel_size"
    if rollout.engine == "embedded" and rollout.tp_size > 1:
        yield Problem((tp_key,), "not possible: the embedded engine holds a whole model in each replica. Use 1.")
    if rollout.sync_transport == "files" and rollout.sync_folder is None:
        yield Problem(("rollout.sync_folder",), "sync_transport files needs a folder that all ranks see. Name one.")
    if rollout.release_memory:
        yield from _release(rollout)
    if rollout.engine == "vllm":
        yield from _vllm(rollout.vllm)
        yield from _replicas(config, tp_key)
    if rollout.engine == "sglang":
        yield from _sglang(config)
        yield from _replicas(config, tp_key)
    if rollout.engine == "endpoint":
        yield from _endpoint(config, purpose, tp_key)


def _release(cfg: RolloutConfig) -> Iterator[Problem]:
    if cfg.engine not in LENDS_MEMORY:
        text = f"engine {cfg.engine} can't give its memory up. Leave it out, or use one of {', '.join(LENDS_MEMORY)}."
        yield Problem(("rollout.release_memory", "rollout.engine"), text)
    if cfg.sync_mode == "delta":
        text = "a sampler that gave its weights up holds nothing that changes could be added to. Use one of the two."
        yield Problem(("rollout.release_memory", "rollout.sync_mode"), text)


def _vllm(cfg: VllmConfig) -> Iterator[Problem]:
    if cfg.python is None:
        if importlib.util.find_spec("vllm") is None:
            text = (
                "vLLM is not installed here. Install it as docs/install.md describes (scripts/install.sh with --vllm); "
                "on a machine without a GPU run scripts/install.sh --cpu --vllm, and set "
                "rollout.vllm.python=.venv-vllm/bin/python. Another Python that has vLLM and meshrl is named by the "
                "same key."
            )
            yield Problem(("rollout.engine", "rollout.vllm.python"), text)
    elif shutil.which(cfg.python) is None:
        yield Problem(("rollout.vllm.python",), "no such program. Give the path of a Python, as venv/bin/python.")
    for arg in cfg.args:
        name = arg.partition("=")[0].replace("_", "-")
        if name in VLLM_OWN_ARGS:
            yield Problem(("rollout.vllm.args",), f"{name} is set by meshrl itself, from its own keys. Leave it out.")


def _sglang(config: RunConfig) -> Iterator[Problem]:
    cfg = config.rollout.sglang
    if cfg.url is not None:
        yield from _address("rollout.sglang.url", cfg.url)
        name, ranks = _sampling_ranks(config)
        if ranks != config.rollout.tp_size:
            text = (
                f"one server is one replica, of tp ranks; here are {ranks}. Without a url each replica starts its own."
            )
            yield Problem(("rollout.sglang.url", name), text)
    elif cfg.api_key_env is not None:
        text = "a server that meshrl starts gets a key of its own. Leave it out."
        yield Problem(("rollout.sglang.api_key_env",), text)
    elif cfg.python is None:
        if importlib.util.find_spec("sglang") is None:
            text = (
                "SGLang is not installed here. Install it (pip install sglang, on a machine with a GPU), name the "
                "Python that has it, and meshrl, in rollout.sglang.python, or a server that runs in rollout.sglang.url."
            )
            yield Problem(("rollout.engine", "rollout.sglang.python", "rollout.sglang.url"), text)
    elif shutil.which(cfg.python) is None:
        yield Problem(("rollout.sglang.python",), "no such program. Give the path of a Python, as venv/bin/python.")
    for arg in cfg.args:
        name = arg.partition("=")[0]
        if name in SGLANG_OWN_ARGS:
            yield Problem(("rollout.sglang.args",), f"{name} is set by meshrl itself, from its own keys. Leave it out.")


def _endpoint(config: RunConfig, purpose: str, tp_key: str) -> Iterator[Problem]:
    cfg = config.rollout.endpoint
    if cfg.url is None:
        yield Problem(("rollout.endpoint.url", "rollout.engine"), "the engine endpoint needs the address of a server.")
    else:
        yield from _address("rollout.endpoint.url", cfg.url)
    if purpose == "train" and cfg.weights == "none":
        text = (
            "a sampler whose weights never change can be evaluated, and trained no further than one step. Use "
            "weights: files if the server can load a folder, or engine vllm or sglang."
        )
        yield Problem(("rollout.endpoint.weights",), text)
    if cfg.reload_url is not None:
        yield from _address("rollout.endpoint.reload_url", cfg.reload_url)
    if config.rollout.tp_size > 1:
        yield Problem((tp_key,), "how an endpoint's server splits the model is its own affair. Leave it out.")
    name, ranks = _sampling_ranks(config)
    if ranks != 1:
        text = f"one endpoint is one sampler, but {ranks} ranks sample. Use cluster.num_rollout_ranks: 1."
        yield Problem(("rollout.engine", name), text)


def _address(key: str, url: str) -> Iterator[Problem]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield Problem((key,), "must be an address with its scheme, as http://127.0.0.1:30000.")


def _replicas(config: RunConfig, tp_key: str) -> Iterator[Problem]:
    """One server takes the devices of tp ranks that follow one another on one machine."""
    tp = config.rollout.tp_size
    name, ranks = _sampling_ranks(config)
    if ranks % tp:
        yield Problem((tp_key, name), f"{ranks} ranks can't be split into replicas of {tp} ranks each.")
        return
    cluster = config.cluster
    first = cluster.num_train_ranks if cluster.num_rollout_ranks else 0
    on_one = max(1, (cluster.num_train_ranks + cluster.num_rollout_ranks) // cluster.nodes)
    if any(lead // on_one != (lead + tp - 1) // on_one for lead in range(first, first + ranks, tp)):
        text = f"a replica of {tp} ranks would lie on two machines, of {on_one} ranks each."
        yield Problem((tp_key, "cluster.nodes"), text)


def _sampling_ranks(config: RunConfig) -> tuple[str, int]:
    """How many ranks sample, and the key that says so."""
    cluster = config.cluster
    name = "num_rollout_ranks" if cluster.num_rollout_ranks else "num_train_ranks"
    return f"cluster.{name}", getattr(cluster, name)


def unused_engine_keys(rollout: RolloutConfig) -> dict[str, str]:
    """Keys of another engine -> why they have no effect."""
    found: dict[str, str] = {}
    for engine, slice_ in (("vllm", VllmConfig), ("sglang", SglangConfig), ("endpoint", EndpointConfig)):
        if rollout.engine != engine:
            found |= {f"rollout.{engine}.{name}": f"rollout.engine is {rollout.engine}" for name in slice_.model_fields}
    if rollout.sglang.url is not None:
        names = ("python", "args", "mem_fraction_static", "start_deadline_s")
        why = "the server at rollout.sglang.url was started already"
        found |= dict.fromkeys((f"rollout.sglang.{name}" for name in names), why)
    if rollout.sync_transport != "files":
        found["rollout.sync_folder"] = f"rollout.sync_transport is {rollout.sync_transport}"
    if rollout.engine == "endpoint" and rollout.endpoint.weights == "none":
        found |= dict.fromkeys(
            ("rollout.endpoint.reload_url", "rollout.endpoint.folder"), "rollout.endpoint.weights is none"
        )
    return found
