"""Damaged model folders: no code runs, nothing is loaded in part, and errors name file and tensor.

A flipped bit in a weight can't be found; a tensor that is missing, moved, cut or of another model can.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import Damage, cuts, flips, of_json, of_place, written
from outcome import check, limits
from safetensors.torch import load_file, save_file

from meshrl.core.errors import ConfigError, UnloadedParamsError
from meshrl.model.recipe import load_causal_lm

NAMES = ["model.safetensors", "config.json", "model.path", "model-0"]


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny / "model", tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same model in two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    half = len(names) // 2
    places = {name: f"model-0000{1 + (i >= half)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 98_000}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in load_causal_lm(folder).named_parameters()}


def same(intact: Path, num_changed: int = 0) -> Callable[[Damage, Any], str | None]:
    """A judge: the values that are read equal those of the intact folder, except num_changed of them."""
    before = read(intact)

    def judge(damage: Damage, now: dict[str, torch.Tensor]) -> str | None:
        if damage.kind in ("place", "cut"):
            return "was read"
        if before.keys() != now.keys():
            return f"other tensors: {before.keys() ^ now.keys()}"
        changed = sum(int((before[name] != now[name]).sum()) for name in before)
        return f"{changed} values are others" if changed > num_changed else None

    return judge


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_cut_and_flipped_weights(folder: Path):
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(1)
    marks = [4, 8, start - 1, start, *(rng.randrange(len(data)) for _ in range(8))]
    damages = [*cuts(data, 2, marks), *of_place(), written("longer", "content", data + b"\0")]
    check(folder, "model.safetensors", damages, read, same(folder), NAMES)
    check(folder, "model.safetensors", flips(data, 3, 40, within=start), read, same(folder), NAMES)
    check(folder, "model.safetensors", flips(data[:start] + data[start:], 4, 10), read, same(folder, 1), NAMES)


def test_an_inconsistent_header_is_refused_before_weights_are_read(folder: Path):
    header, data = header_of(folder / "model.safetensors")
    first, second = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])[:2]
    lies: dict[str, Any] = {
        "overlapping": {second: header[second] | {"data_offsets": header[first]["data_offsets"]}},
        "behind the end": {first: header[first] | {"data_offsets": [len(data), 2 * len(data)]}},
        "backwards": {first: header[first] | {"data_offsets": header[first]["data_offsets"][::-1]}},
        "negative": {first: header[first] | {"data_offsets": [-4, header[first]["data_offsets"][1]]}},
        "huge": {first: header[first] | {"data_offsets": [0, 1 << 62], "shape": [1 << 60]}},
        "beyond 64 bits": {first: header[first] | {"data_offsets": [0, 1 << 70], "shape": [1 << 68]}},
        "another shape": {first: header[first] | {"shape": [*header[first]["shape"], 2]}},
        "a shape without end": {first: header[first] | {"shape": [1] * 10_000}},
        "integers": {first: header[first] | {"dtype": "I32"}},
        "no such dtype": {first: header[first] | {"dtype": "F33"}},
        "a dtype that is not text": {first: header[first] | {"dtype": {}}},
        "a list": {first: []},
        "another name": {"unknown": header[first], first: None},
        "names exchanged": {first: header[second], second: header[first]},
    }
    damages = []
    for what, changes in lies.items():
        lied = {name: entry for name, entry in (header | changes).items() if entry is not None}
        damages.append(written(what, "cut", with_header(lied, data)))
    for length in (0, 1, 1 << 31, 1 << 40, (1 << 64) - 1):
        damages.append(written(f"a header of {length} bytes", "cut", with_header(header, data, length)))
    bomb = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    damages.append(written("nested without end", "cut", struct.pack("<Q", len(bomb)) + bomb + data))
    check(folder, "model.safetensors", damages, read, same(folder), NAMES)


def test_weights_that_are_missing_or_of_another_model_are_named(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: t for name, t in tensors.items() if name != lost}, folder / "model.safetensors")
    with limits(), pytest.raises(UnloadedParamsError, match=lost.replace(".", r"\.")):
        load_causal_lm(folder)
    save_file({**tensors, "model.layers.2.mlp.up_proj.weight": tensors[lost].clone()}, folder / "model.safetensors")
    with limits(), pytest.raises(UnloadedParamsError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_causal_lm(folder)
    save_file({**tensors, lost: tensors[lost].T.contiguous()}, folder / "model.safetensors")
    with limits(), pytest.raises(UnloadedParamsError, match=lost.replace(".", r"\.")):
        load_causal_lm(folder)


def test_a_damaged_config_json_is_refused_or_means_the_same_weights(folder: Path):
    data = (folder / "config.json").read_bytes()
    check(folder, "config.json", [*of_json(data, 5, 40, "doubtful"), *of_place()], read, _no_place(folder), NAMES)
    facts = json.loads(data)
    huge = [
        written(f"{key} = {value}", "cut", json.dumps(facts | {key: value}).encode())
        for key in ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        for value in (0, -1, facts[key] + 1, 1000 * facts[key], 10**9, 10**18, 10**40, 0.5, "two", None)
    ]
    huge += [
        written(f"{key} = {value}", "cut", json.dumps(facts | {key: value}).encode())
        for key in ("head_dim", "num_key_value_heads")
        for value in (10**8, 10**10, 10**12, 10**18, 10**40)
    ]
    check(folder, "config.json", huge, read, same(folder), NAMES)


def _no_place(folder: Path) -> Callable[[Damage, Any], str | None]:
    judge = same(folder)
    return lambda damage, now: judge(Damage(damage.name, "content", damage.put), now)


def test_a_damaged_generation_config_is_not_treated_as_missing(folder: Path):
    data = (folder / "generation_config.json").read_bytes()
    damages = [d for d in [*of_json(data, 6, 15, "doubtful"), *of_place()] if d.name not in ("nothing there",)]
    named = [*NAMES, "generation_config.json"]
    check(folder, "generation_config.json", damages, read, _no_place(folder), named)


def test_a_damaged_index_is_refused_and_no_file_outside_is_read(sharded: Path):
    name = "model.safetensors.index.json"
    data = (sharded / name).read_bytes()
    check(sharded, name, [*of_json(data, 7, 30, "doubtful"), *of_place()], read, _no_place(sharded), NAMES)
    index = json.loads(data)
    first, second = sorted(set(index["weight_map"].values()))
    tensor = next(iter(index["weight_map"]))
    shutil.copy(sharded / first, sharded.parent / "outside.safetensors")
    shutil.copy(sharded / first, sharded / "inside.bin")
    outside, long = str(sharded.parent / "outside.safetensors"), f"{'x' * 300}.safetensors"
    others = ["../outside.safetensors", outside, "inside.bin", "none.safetensors", "a\0.safetensors", long, second]
    damages = []
    for file in [*others, "", ".", "..", 7, None]:
        places = {n: file if f == first else f for n, f in index["weight_map"].items()}
        damages.append(written(f"all in {file!r:.40}", "cut", json.dumps(index | {"weight_map": places}).encode()))
        places = index["weight_map"] | {tensor: file}
        damages.append(written(f"one in {file!r:.40}", "cut", json.dumps(index | {"weight_map": places}).encode()))
    check(sharded, name, damages, read, same(sharded), NAMES)


def test_a_shard_under_another_shards_name_is_refused(sharded: Path):
    first, second = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    for name, other in ((first, second), (second, first)):
        swapped = [written("the other shard", "cut", (sharded / other).read_bytes()), *of_place()]
        check(sharded, name, swapped, read, same(sharded), NAMES)


class _Runs:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def test_pickled_weights_are_never_opened(folder: Path):
    mark = folder / "ran"
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(_Runs(mark)))
        with limits(), pytest.raises((ConfigError, UnloadedParamsError), match=r"pickle|model\.safetensors"):
            load_causal_lm(folder)
        (folder / name).unlink()
    torch.save({"a": _Runs(mark)}, folder / "pytorch_model.bin")
    with limits(), pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle, which can run code"):
        load_causal_lm(folder)
    assert not mark.exists()


def test_code_in_the_models_folder_is_not_run(folder: Path):
    """A class of Transformers is used in place of its code; if there is none, the model is refused."""
    mark = folder / "ran"
    for module in ("configuration_evil", "modeling_evil"):
        (folder / f"{module}.py").write_text(f"open({str(mark)!r}, 'w')\n")
    facts = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    intact = same(folder)
    (folder / "config.json").write_text(json.dumps(facts | {"auto_map": code}))
    with limits():
        assert intact(Damage("", "content", lambda path: None), read(folder)) is None
    (folder / "config.json").write_text(json.dumps(facts | {"auto_map": code, "model_type": "evil"}))
    with limits(), pytest.raises(ConfigError, match=r"auto_map names code of its own .*never runs"):
        load_causal_lm(folder)
    assert not mark.exists()


def test_a_folder_does_not_load_another_model(folder: Path):
    adapter = folder / "adapter_config.json"
    adapter.write_text(json.dumps({"base_model_name_or_path": "/nowhere/else", "peft_type": "LORA"}))
    with limits(), pytest.raises(ConfigError, match=r"adapter_config\.json: this folder holds an adapter"):
        load_causal_lm(folder)
    adapter.unlink()
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"transformers_weights": "adapter_model.bin"}))
    with limits(), pytest.raises(ConfigError, match=r"config\.json: transformers_weights names other weights"):
        load_causal_lm(folder)
