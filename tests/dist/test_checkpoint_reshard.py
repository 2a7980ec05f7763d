"""Checkpoints of the training state: equal to the bit on any number of ranks, and refused when damaged."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import engine_over
from safetensors import safe_open
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshrl.algo.losses import sft_loss
from meshrl.core.errors import CheckpointError
from meshrl.model.save import gathered
from meshrl.parallel.boxes import boxes, index_of
from meshrl.parallel.fsdp import full_tensor, reshard
from meshrl.train.batch_plan import make_batch_plan
from meshrl.train.checkpoint import SavedTensors, stage, write_in_background
from meshrl.train.checkpoint_files import (
    CONTROLLER,
    MANIFEST,
    FileFact,
    Manifest,
    commit,
    make_temporary_folder,
    read_manifest,
    state_folder,
    states,
    write_file,
    write_json,
)
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack
from meshrl.train.state import load_model

LENGTHS = [12, 3, 40, 7, 7, 21, 2, 30]
UNEVEN = {"hidden_size": 40, "intermediate_size": 50, "vocab_size": 61}  # 4 ranks get different numbers of rows


def _step(engine: TrainEngine, rank: int, world: int, seed: int) -> None:
    samples = weigh(random_samples(seed, LENGTHS, vocab=60))
    plan = make_batch_plan([len(s) for s in samples], world, 40)
    engine.forward_backward([pack([samples[i] for i in m], m) for m in plan.micro_batches[rank]], sft_loss)
    engine.optim_step(1e-2)


def _changed_by_training(rank: int, world: int, copy: bool) -> list[bool]:
    """Of each tensor that was staged, whether the next step changes it."""
    engine = engine_over(tiny_qwen2(), world)
    slices = stage({name: p.detach() for name, p in engine.model.lm.named_parameters()}, copy=copy)
    before = [each.data.clone() for each in slices]
    _step(engine, rank, world, seed=1)
    return [not torch.equal(each.data, data) for each, data in zip(slices, before, strict=True)]


@pytest.mark.parametrize("world", [1, 2])
def test_training_does_not_change_a_state_that_was_copied(pool, world):
    """Without a copy, which is for the last state only, it would, so the test can fail."""
    assert not any(any(changed) for changed in pool.run(_changed_by_training, world, True))
    assert all(any(changed) for changed in pool.run(_changed_by_training, world, False))


def _full_state(engine: TrainEngine) -> dict[str, torch.Tensor]:
    reshard(engine.model)
    state = {name: full_tensor(p.detach()).clone() for name, p in engine.model.lm.named_parameters()}
    for name, p in engine.model.lm.named_parameters():
        for slot, value in engine.optimizer.state[p].items():
            state[f"{slot} of {name}"] = full_tensor(value).clone()
    state["steps"] = torch.tensor([engine.num_optimizer_steps, engine.num_skipped_in_a_row])
    return state


def _committed(final: Path, write: Callable[[Path], Any], step: int = 1) -> None:
    """As the controller: first each rank's file in a temporary folder, then the manifest and the rename."""
    rank, world = dist.get_rank(), dist.get_world_size()
    temporary = make_temporary_folder(final) if rank == 0 else final.with_name("state.aside")
    dist.barrier()
    files: list[Any] = [None] * world
    dist.all_gather_object(files, write(temporary))
    if rank == 0:
        own = {CONTROLLER: write_json(temporary / CONTROLLER, {})}
        commit(final, Manifest(step=step, num_ranks=world, files={**own, **dict(files)}))
    dist.barrier()


def save(engine: TrainEngine, final: Path, step: int = 1) -> None:
    def write(temporary: Path) -> Any:
        engine.save(temporary)
        return engine.finish_save()

    _committed(final, write, step)


def _trained(rank: int, world: int, model: dict[str, Any], train: dict[str, Any], final: Path) -> dict[str, Any]:
    engine = engine_over(tiny_qwen2(**model), world, train)
    for seed in range(2):
        _step(engine, rank, world, seed)
    engine.num_skipped_in_a_row = 3
    state = _full_state(engine)
    save(engine, final)
    _step(engine, rank, world, 2)
    return {"saved": state, "next": _full_state(engine), "num_bytes": engine.state_bytes()}


def _carried(
    rank: int, world: int, model: dict[str, Any], train: dict[str, Any], source: Path, final: Path | None
) -> dict[str, Any]:
    engine = engine_over(tiny_qwen2(seed=7, **model), world, train)
    engine.load(source)
    state = _full_state(engine)
    if final is not None:
        save(engine, final)
    _step(engine, rank, world, 2)
    return {"saved": state, "next": _full_state(engine)}


def _assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype and torch.equal(tensor, want[name]), name


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_four_to_two_to_one_to_four_ranks_is_equal_to_the_bit(pool, tmp_path, tie):
    """Parameters, moments and counters; at the same world size also the next step."""
    model = {**UNEVEN, "tie": tie}
    first = pool.run(_trained, 4, model, {}, state_folder(tmp_path, 0))[0]
    assert {"exp_avg of model.norm.weight", "exp_avg_sq of model.norm.weight"} < first["saved"].keys()
    for number, world in enumerate([2, 1, 4]):
        source = state_folder(tmp_path, number)
        carried = pool.run(_carried, world, model, {}, source, state_folder(tmp_path, number + 1))[0]
        _assert_equal(carried["saved"], first["saved"])
        assert read_manifest(source).num_ranks == [4, 2, 1][number]
    _assert_equal(carried["next"], first["next"])
    assert not torch.equal(first["next"]["model.norm.weight"], first["saved"]["model.norm.weight"])


@pytest.mark.parametrize(
    "train",
    [
        {"sharding_strategy": "HYBRID_SHARD", "mesh": {"dp_replicate": 2}},
        {"sharding_strategy": "NO_SHARD"},
    ],
    ids=lambda t: t["sharding_strategy"],
)
def test_replicas_are_saved_once_and_another_strategy_reads_them(pool, tmp_path, train):
    """Of two replicas of each shard, one is on disk, and state_bytes counts one."""
    answers = pool.run(_trained, 4, UNEVEN, train, state_folder(tmp_path, 0))
    first = answers[0]
    _assert_equal(pool.run(_carried, 2, UNEVEN, {}, state_folder(tmp_path, 0), None)[0]["saved"], first["saved"])
    numbers = sum(t.numel() for t in first["saved"].values())
    on_disk = sum(p.stat().st_size for p in state_folder(tmp_path, 0).glob("*.safetensors"))
    assert 4 * numbers <= on_disk < 5 * numbers + 4 * 50_000  # plus headers and generator states
    counters = sum(t.numel() for name, t in first["saved"].items() if name.startswith("step"))
    assert sum(answer["num_bytes"] for answer in answers) == 4 * (numbers - counters)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = state_folder(tmp_path_factory.mktemp("checkpoints"), 0)
    return folder, pool.run(_trained, 2, UNEVEN, {}, folder)[0]["saved"]


def test_one_process_reads_the_model_without_a_process_group(saved):
    folder, want = saved
    lm = tiny_qwen2(seed=7, **UNEVEN)
    load_model(folder, "policy", lm)
    for name, p in lm.named_parameters():
        assert torch.equal(p, want[name]), name


def test_torchs_own_reader_can_read_the_files(saved):
    folder, want = saved
    got = {f"model.{name}": torch.zeros_like(t) for name, t in want.items() if " of " not in name and name != "steps"}
    dcp.load(got, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name.removeprefix("model.")]), name


def _generators(rank: int, world: int, final: Path) -> tuple[list[float], list[float]]:
    engine = engine_over(tiny_qwen2(), world)
    torch.manual_seed(100 + rank)
    torch.rand(5)
    save(engine, final)
    drawn = torch.rand(3).tolist()
    torch.manual_seed(0)
    engine.load(final)
    return drawn, torch.rand(3).tolist()


def test_each_rank_gets_its_own_random_state_back(pool, tmp_path):
    """Also before the first optimizer step, when there are no moments."""
    answers = pool.run(_generators, 2, state_folder(tmp_path, 0))
    assert all(before == after for before, after in answers)
    assert answers[0] != answers[1]


def _refused(rank: int, world: int, folder: Path, model: dict[str, Any]) -> tuple[str, bool]:
    engine = engine_over(tiny_qwen2(seed=7, **model), world)
    before = {name: full_tensor(p.detach()).clone() for name, p in engine.model.lm.named_parameters()}
    try:
        engine.load(folder)
    except CheckpointError as error:
        same = all(torch.equal(full_tensor(p.detach()), before[n]) for n, p in engine.model.lm.named_parameters())
        return str(error), same and not engine.optimizer.state
    return "", False


def _copy(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


SECOND = "policy_rank_00001.safetensors"
DAMAGES: dict[str, tuple[Any, str]] = {
    "cut": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-7]), f"{SECOND} has .* bytes, but was"),
    "a flipped bit of a tensor": (lambda f: _flip(f / SECOND, -100), f"{SECOND} is damaged"),
    "a flipped bit of a header": (lambda f: _flip(f / SECOND, 40), f"{SECOND} is damaged"),
    "gone": (lambda f: (f / SECOND).unlink(), f"{SECOND} is missing"),
    "one too many": (lambda f: (f / "x.safetensors").write_bytes(b"."), "x.safetensors is not a file of this"),
    "a flipped bit of the manifest": (lambda f: _flip(f / MANIFEST, 30), f"{MANIFEST} is no manifest"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is no manifest .*no such file"),
    "a manifest cut": (lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:50]), f"{MANIFEST} is no"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_every_rank_before_anything_is_changed(pool, saved, tmp_path, damage):
    """The error names the file, also on ranks that did not read it."""
    harm, words = DAMAGES[damage]
    folder = _copy(saved[0], tmp_path / "state")
    harm(folder)
    for message, untouched in pool.run(_refused, 2, folder, UNEVEN):
        assert untouched
        assert re.search(words, message), message


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({**UNEVEN, "intermediate_size": 54}, r"gate_proj.weight was torch.float32 \[50, 40\], is torch.float32 \[54"),
        ({**UNEVEN, "tie": False}, "lacks 1 tensors of this model: model.lm_head.weight"),
        ({**UNEVEN, "num_hidden_layers": 1}, "holds model.model.layers.1.*which this model does not have"),
        (
            {**UNEVEN, "dtype": torch.bfloat16},
            "is of another model, or of another train.master_dtype: .* is torch.bfloat16",
        ),
    ],
    ids=["other shape", "untied", "fewer layers", "other dtype"],
)
def test_another_model_is_refused(pool, saved, model, words):
    for message, untouched in pool.run(_refused, 2, saved[0], model):
        assert untouched
        assert re.search(words, message), message


class _Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


def test_nothing_of_a_checkpoint_is_unpickled(pool, saved, tmp_path, monkeypatch):
    """A pickle is never read, neither in the place of DCP's own metadata nor instead of a file."""
    monkeypatch.chdir(tmp_path)
    folder = _copy(saved[0], tmp_path / "state")
    assert not [path for path in folder.iterdir() if path.suffix not in (".safetensors", ".json")]
    (folder / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    _assert_equal(pool.run(_carried, 2, UNEVEN, {}, folder, None)[0]["saved"], saved[1])
    # An attacker can also write a manifest that fits.
    (folder / SECOND).write_bytes(pickle.dumps(_Bomb()))
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    facts = {name: FileFact(**fact) for name, fact in manifest["files"].items()}
    facts[SECOND] = write_file(folder / SECOND, [memoryview(pickle.dumps(_Bomb()))])
    folder.rename(folder.with_name("state.aside"))
    commit(folder, Manifest(step=1, num_ranks=2, files=facts))
    for message, untouched in pool.run(_refused, 2, folder, UNEVEN):
        assert untouched and "no tensors of a checkpoint" in message
    assert not list(tmp_path.rglob("exploded"))


def test_only_complete_checkpoints_have_the_name(pool, saved, tmp_path):
    _copy(saved[0], state_folder(tmp_path, 3))
    _copy(saved[0], state_folder(tmp_path, 12))
    _copy(saved[0], state_folder(tmp_path, 20).with_name("state.aside"))
    (tmp_path / "step_000030" / "model").mkdir(parents=True)
    assert [step for step, _ in states(tmp_path)] == [3, 12]


SHAPES = {"rows": (13, 3), "columns": (3, 8), "fused": (24, 5), "plain": (7, 2), "expert": (3, 4, 6)}
PLACED = {  # over tp; FSDP2 then cuts the rows of these shards
    "rows": Shard(0),
    "columns": Shard(1),
    "fused": _StridedShard(0, split_factor=3),
    "plain": Replicate(),
    "expert": Shard(1),
}


def _over_two_axes(dp: int, tp: int, value: float | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Tensors sharded by TP and then by FSDP2, and the full ones: flat indices, or `value` everywhere."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    numbers = {name: torch.arange(torch.Size(shape).numel()).view(shape).float() for name, shape in SHAPES.items()}
    module = torch.nn.Module()
    for name, placement in PLACED.items():
        tensor = numbers[name] if value is None else torch.full_like(numbers[name], value)
        if tp > 1:
            tensor = distribute_tensor(tensor, mesh["tp"], [placement], src_data_rank=None)
        module.register_parameter(name, torch.nn.Parameter(tensor))
    fully_shard(module, mesh=mesh["dp"])
    return module, numbers


def _through_files(rank: int, world: int, final: Path) -> dict[str, bool]:
    """Saved from 2 x 2, read by 2 x 2, 4 x 1 and 1 x 4; and gathered on each rank."""
    module, numbers = _over_two_axes(2, 2, None)
    slices = stage(dict(module.named_parameters()))
    _committed(final, lambda temporary: write_in_background(temporary, "policy", slices).result())
    found = {}
    for dp, tp in ((2, 2), (4, 1), (1, 4)):
        other, _ = _over_two_axes(dp, tp, -1.0)
        SavedTensors(final, "policy").load(dict(other.named_parameters()))
        found[f"{dp} x {tp}"] = all(
            torch.equal(local.tensor, numbers[name][index_of(local.box)])
            for name, p in other.named_parameters()
            for local in boxes(p)
        )
    for root in range(world):
        for name, p in module.named_parameters():
            full = gathered(p, root, torch.float64, attrgetter("tensor"))
            found[f"{name} on {root}"] = full is None if rank != root else torch.equal(full, numbers[name].double())
    return found


def test_tensors_cut_by_two_axes_are_saved_read_and_gathered_to_the_bit(pool, tmp_path):
    """Rows that tp does not divide, a second dim, and a fused tensor with two boxes on each rank."""
    for found in pool.run(_through_files, 4, state_folder(tmp_path, 0)):
        assert [what for what, equal in found.items() if not equal] == []
    written = [file for file in state_folder(tmp_path, 0).glob("*.safetensors")]
    held = []
    for file in written:
        with safe_open(file, "pt") as opened:
            keys = opened.keys()
        held += [key for key in keys if key.partition("@")[0] == "fused"]
    assert len(held) > len(written), "a rank holds more than one box"
