"""A model's weights as SGLang's tensor-parallel workers store them: fused, padded and sharded. Their loader silently
ignores unknown names. The stand-in server joins the shards again to compute with them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SHARD_DIM = {"o_proj.weight": 1, "down_proj.weight": 1, "embed_tokens.weight": 0, "lm_head.weight": 0}
VOCAB_MULTIPLE = 40  # SGLang pads to 64; 40 gives padding rows for a vocabulary of 64, for any number of ranks


class ShardModel(torch.nn.Module):
    """Parameters of one rank, under SGLang's names. A tied head is the same module as the embedding.

    skip: wire names that load_weights ignores, like a broken loader.
    """

    def __init__(
        self, state: dict[str, torch.Tensor], tied: dict[str, str], num_kv_heads: int, rank: int, num_ranks: int
    ):
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.rank, self.num_ranks, self.tied, self.skip = rank, num_ranks, tied, set[str]()
        for name, tensor in state.items():
            fused = _fused_part(name)
            if fused is not None and not name.endswith(f"{FUSED[fused[0]][0]}.{_leaf(name)}"):
                continue  # the first part creates the fused parameter
            parts = [state[part] for part in _parts(name, fused)] if fused else [tensor]
            rows = sum(len(self._own(_parts(name, fused)[i] if fused else name, part)) for i, part in enumerate(parts))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                rows = _padded(len(tensor)) // num_ranks
            shape = (rows, *self._own(name, tensor).shape[1:])
            self._register(name if fused is None else _fused_name(name, fused), torch.zeros(shape, dtype=tensor.dtype))
        for alias, source in tied.items():
            self._module(alias.rpartition(".")[0].rpartition(".")[0])._modules[alias.split(".")[-2]] = self._module(
                source.rpartition(".")[0]
            )
        self.load_weights(state.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            fused = _fused_part(name)
            target = name if fused is None else _fused_name(name, fused)
            if name in self.tied or target not in params or name in self.skip:
                continue
            own, start = self._own(name, tensor), 0
            if fused is not None:
                kind, part = fused
                num_rows = len(params[target])
                if part:  # the rows after the first part are shared equally by keys and values, or belong to up
                    rest = len(FUSED[kind]) - 1
                    start = num_rows - len(own) * (rest - part + 1)
            params[target].data.narrow(0, start, len(own)).copy_(own)
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                params[target].data[len(own) :].fill_(0)
            loaded.add(target)
        return loaded

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice."""
        fused = _fused_part(name)
        dim = 0 if fused else next((d for end, d in SHARD_DIM.items() if name.endswith(end)), None)
        if dim is None or self.num_ranks == 1:
            return tensor
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            per_rank = _padded(len(tensor)) // self.num_ranks
            start = min(self.rank * per_rank, len(tensor))
            return tensor.narrow(0, start, min(per_rank, len(tensor) - start))
        if name.split(".")[-2] in ("k_proj", "v_proj"):  # with fewer heads than ranks, several ranks have the same head
            head = len(tensor) // self.num_kv_heads
            size = head * max(1, self.num_kv_heads // self.num_ranks)
            return tensor.narrow(0, self.rank * self.num_kv_heads // self.num_ranks * head, size)
        size = tensor.shape[dim] // self.num_ranks
        return tensor.narrow(dim, self.rank * size, size)

    def _module(self, path: str) -> torch.nn.Module:
        module: torch.nn.Module = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module._modules[part] = torch.nn.Module()
            module = module._modules[part]
        return module

    def _register(self, name: str, data: torch.Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        self._module(path)._parameters[leaf] = torch.nn.Parameter(data, requires_grad=False)


def full_state(shards: list[ShardModel], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The full tensors of all shards, under the names and shapes of `like`."""
    params = [dict(shard.named_parameters()) for shard in shards]
    state = {}
    for name, tensor in like.items():
        fused = _fused_part(name)
        pieces = []
        for shard, held in zip(shards, params, strict=True):
            own = shard._own(name, tensor)
            start = 0
            if fused is not None and fused[1]:
                start = len(held[_fused_name(name, fused)]) - len(own) * (len(FUSED[fused[0]]) - fused[1])
            pieces.append(held[name if fused is None else _fused_name(name, fused)].data.narrow(0, start, len(own)))
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        copies = sum(piece.shape[dim] for piece in pieces) // tensor.shape[dim]  # neighbour ranks may have equal shards
        state[name] = torch.cat(pieces[::copies], dim)
    return {name: tensor.clone() for name, tensor in state.items()}


def _fused_part(name: str) -> tuple[str, int] | None:
    """The fused parameter of a name, and the index of its part; None if it is not fused."""
    module = name.split(".")[-2] if "." in name else ""
    return next(((kind, parts.index(module)) for kind, parts in FUSED.items() if module in parts), None)


def _fused_name(name: str, fused: tuple[str, int]) -> str:
    return name.replace(f".{FUSED[fused[0]][fused[1]]}.", f".{fused[0]}.")


def _parts(name: str, fused: tuple[str, int]) -> list[str]:
    return [name.replace(f".{FUSED[fused[0]][fused[1]]}.", f".{part}.") for part in FUSED[fused[0]]]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _padded(rows: int) -> int:
    return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
