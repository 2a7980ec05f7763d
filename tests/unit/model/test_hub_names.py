"""Hub names of a model's tensors, compared with the files that Transformers writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_lm, tiny_qwen2

from meshrl.config.model import LoraConfig
from meshrl.model.facts import meta_copy
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lora import adapters_of, add_adapters, named_weights

MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3")


def _boxes(tensor: torch.Tensor, count: int, dim: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Shards along one dim; the full tensor if it does not have this dim."""
    if tensor.dim() <= dim:
        yield (0,) * tensor.dim(), tensor
        return
    at = 0
    for shard in tensor.chunk(count, dim):
        yield tuple(at if d == dim else 0 for d in range(tensor.dim())), shard
        at += shard.shape[dim]


def _joined(lm: torch.nn.Module, names: HubNames, count: int, dim: int) -> dict[str, torch.Tensor]:
    """The hub tensors, joined from the boxes of all shards; each element exactly once."""
    found = {name: torch.full(shape, float("nan")) for name, shape in names.tensors.items()}
    for name, tensor in (dict(named_weights(lm)) | persistent_buffers(lm)).items():
        for offsets, local in _boxes(tensor.detach(), count, dim):
            for hub_name, at, values in names.split(name, offsets, local):
                assert values.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                index = tuple(slice(start, start + size) for start, size in zip(at, values.shape, strict=True))
                assert found[hub_name][index].isnan().all()
                found[hub_name][index] = values.float()
    return found


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi3", "gemma4_text", "phimoe", *MIXTURES])
def test_boxes_of_hub_tensors_are_the_files_that_transformers_writes(tmp_path: Path, family: str):
    """Without this test, a wrong name or cut would only show in a server's answers."""
    lm = tiny_lm(family)
    lm.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    names = HubNames(meta_copy(lm))
    assert not names.computed and {name: tuple(t.shape) for name, t in written.items()} == names.tensors
    for count, dim in ((1, 0), (3, 0), (3, 1)):
        joined = _joined(lm, names, count, dim)
        assert [name for name, tensor in written.items() if not torch.equal(joined[name], tensor.float())] == []


def test_experts_have_the_names_of_the_files():
    names = HubNames(tiny_lm("qwen3_moe"))
    layer = "model.layers.0.mlp.experts"
    assert names.of(f"{layer}.down_proj") == tuple(f"{layer}.{e}.down_proj.weight" for e in range(8))
    assert set(names.of(f"{layer}.gate_up_proj")) == {
        f"{layer}.{e}.{matrix}.weight" for e in range(8) for matrix in ("gate_proj", "up_proj")
    }
    assert names.tensors[f"{layer}.3.up_proj.weight"] == (16, 32)


def test_a_box_of_several_experts_is_cut_at_its_own_borders():
    """The box has experts 2 and 3, columns 4 to 9; tensors outside of it are not listed."""
    names, local = HubNames(tiny_lm("qwen3_moe")), torch.arange(2 * 32 * 6).view(2, 32, 6)
    found = {name: (at, t) for name, at, t in names.split("model.layers.1.mlp.experts.gate_up_proj", (2, 0, 4), local)}
    assert {name.split("experts.")[1] for name in found} == {
        f"{e}.{m}.weight" for e in (2, 3) for m in ("gate_proj", "up_proj")
    }
    at, values = found["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert at == (0, 4) and torch.equal(values, local[1, 16:])


def test_a_tied_tensor_has_one_hub_name_and_its_alias_has_its_own():
    names = HubNames(tiny_qwen2(tie=True))
    assert "lm_head.weight" not in names.tensors and names.of("lm_head.weight") == ("lm_head.weight",)


def test_a_tensor_that_the_rules_compute_keeps_its_name_and_is_listed():
    """Interleaved rows are not a view."""
    from transformers.core_model_loading import Interleave, WeightConverter

    lm = tiny_qwen2()
    rule = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Interleave(dim=0)])
    lm._weight_conversions = [rule]
    names = HubNames(lm)
    computed = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
    assert sorted(names.computed) == computed and names.of(computed[0]) == (computed[0],)
    assert "leave no views of" in names.computed[computed[0]]


def test_transposed_tensors_are_views():
    from transformers.core_model_loading import Transpose, WeightConverter

    lm = tiny_qwen2()
    lm._weight_conversions = [WeightConverter("mlp.kernel", "mlp.down_proj.weight", [Transpose(0, 1)])]
    names = HubNames(lm)
    weight = lm.model.layers[0].mlp.down_proj.weight.detach()
    ((name, at, values),) = names.split("model.layers.0.mlp.down_proj.weight", (8, 0), weight[8:20])
    assert (name, at) == ("model.layers.0.mlp.kernel", (0, 8)) and torch.equal(values, weight[8:20].T)


@pytest.mark.parametrize("family", ["qwen2", *MIXTURES])
def test_adapters_have_the_names_of_their_layers_weights(family: str):
    """peft itself would give adapters to the experts instead of these layers, and one name to two tensors."""
    lm = tiny_lm(family)
    linear = {name for name, m in lm.named_modules() if type(m) is torch.nn.Linear and name != "lm_head"}
    add_adapters(lm, LoraConfig(enabled=True, rank=2, alpha=4, targets=["all-linear"]), torch.float32, "x")
    assert {name.removesuffix(".weight") for name in adapters_of(lm)} == linear
    assert max(Counter(name for name, _ in named_weights(lm)).values()) == 1
    names = HubNames(lm)
    expected = {f"{layer}.lora_{letter}.weight" for layer in linear for letter in "AB"}
    assert expected == {name for name in names.tensors if ".lora_" in name}
    name = "model.layers.0.self_attn.o_proj.lora_A.weight"
    assert torch.equal(_joined(lm, names, 3, 0)[name], dict(named_weights(lm))[name])


def test_an_adapter_follows_the_name_of_its_layer_in_the_files():
    from transformers.core_model_loading import WeightRenaming

    lm = tiny_qwen2()
    lm._weight_conversions = [WeightRenaming("attention.q.weight", "self_attn.q_proj.weight")]
    add_adapters(lm, LoraConfig(enabled=True, rank=2, alpha=4, targets=["q_proj"]), torch.float32, "x")
    names = HubNames(lm)
    assert names.of("model.layers.0.self_attn.q_proj.lora_B.weight") == ("model.layers.0.attention.q.lora_B.weight",)
