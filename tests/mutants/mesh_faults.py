"""Faults of the mesh's axes tp and ulysses: sums that are missing or counted twice, and cuts in wrong places."""

from __future__ import annotations

from fault import Fault

_ROWS = "tests/dist/test_mesh_equal.py::test_the_gradient_of_packed_rows_does_not_depend_on_the_mesh"
_FAMILY = "tests/dist/test_mesh_equal.py::test_the_gradient_of_a_family_does_not_depend_on_the_mesh"
_STATE = "tests/dist/test_mesh_state.py::test_state_moves_from_mesh_to_mesh_and_to_samplers"
_GRAPHS = "tests/dist/test_compiled_blocks.py::test_blocks_of_a_kind_and_packs_of_any_length_share_their_graphs"

FAULTS = [
    Fault(
        "the gradients of norms are not summed over tp",
        "meshrl/parallel/exchange.py::_SummedGradients.backward",
        "ctx.axis.sum(own.to(torch.promote_types(own.dtype, torch.float32))) => own",
        _FAMILY + "[norms of heads-shard 2 x tp 2]",
    ),
    Fault(
        "the gradients of norms are summed in the compute dtype",
        "meshrl/parallel/exchange.py::_SummedGradients.backward",
        "own.to(torch.promote_types(own.dtype, torch.float32)) => own",
        "tests/dist/test_mesh_equal.py::test_parts_of_a_bf16_gradient_are_rounded_once",
    ),
    Fault(
        "a released shard is cut before its values are on the host",
        "meshrl/parallel/boxes.py::boxes",
        "local = readable(local) => pass",
        _STATE + "[fused experts]",
    ),
    Fault(
        "each length of a pack is compiled",
        "meshrl/model/recipe.py::compile_blocks",
        "torch.compile(module.forward, dynamic=True) => torch.compile(module.forward, dynamic=False)",
        _GRAPHS,
    ),
    Fault(
        "attention, with the lengths of a pack, is compiled",
        "meshrl/model/recipe.py::compile_blocks",
        "attention.register(outside_graphs=True) => attention.register()",
        _GRAPHS,
    ),
    Fault(
        "the gradient of gathered tokens has only this rank's part",
        "meshrl/parallel/exchange.py::gathered",
        "axis.reduce_scatter => axis.own",
        _ROWS + "[tp 2]",
    ),
    Fault(
        "a rank of ulysses gets every n-th head",
        "meshrl/model/attention.py::UlyssesAttention._all_tokens",
        "x.unflatten(1, (self.axis.size, -1)).transpose(0, 1) => x.unflatten(1, (-1, self.axis.size)).movedim(2, 0)",
        _ROWS + "[ulysses 2]",
    ),
    Fault(
        "a rank of tp computes with the key head of other query heads",
        "meshrl/model/tensor_parallel.py::_cut_of_heads",
        "tp.axis.index * shared // n => tp.axis.index % shared",
        _ROWS + "[tp 4]",
    ),
    Fault(
        "tokens are counted once for each rank of tp",
        "meshrl/plan/ranks.py::coordinates",
        "prod(shape[:3]) => prod(shape)",
        _ROWS + "[tp 2]",
    ),
    Fault(
        "gradients are averaged over ulysses",
        "meshrl/plan/ranks.py::coordinates",
        "prod(shape[:3]) => prod(shape[:2])",
        _ROWS + "[ulysses 2]",
    ),
    Fault(
        "AdamW's step computes with DTensors",
        "meshrl/train/optim.py::_AdamW._init_group",
        "local_shard => (lambda tensor: tensor)",
        "tests/dist/test_optimizer_step.py::test_a_step_computes_with_shards_and_not_with_dtensors[tp]",
    ),
    Fault(
        "the norm counts a tensor once for each rank that holds it",
        "meshrl/train/optim.py::clip_gradients",
        "torch.nn.utils.get_total_norm(grads, foreach=True).square() / n => "
        "torch.nn.utils.get_total_norm(grads, foreach=True).square()",
        _ROWS + "[tp 2]",
    ),
    Fault(
        "the norm leaves out the axes of the peers",
        "meshrl/parallel/mesh.py::replica_group",
        "AXES[1:] => AXES[1:2]",
        _ROWS + "[tp 2]",
    ),
    Fault(
        "a row's sums have only the tokens of this rank's chunk",
        "meshrl/train/engine.py::TrainEngine._outputs",
        "peers.sum_chunks(values) => values",
        _ROWS + "[ulysses 2]",
    ),
    Fault(
        "each rank of tp adds the bias to the sum",
        "meshrl/parallel/tp.py::TensorParallel.local",
        "tensors[i] / self.axis.size => tensors[i]",
        _FAMILY + "[biases, layer norms-shard 2 x tp 2]",
    ),
    Fault(
        "a fused tensor is cut as if it were one",
        "meshrl/model/tensor_parallel.py::_cut",
        "_OUTPUTS[style] => 1",
        _FAMILY + "[fused experts-shard 2 x tp 2]",
    ),
    Fault(
        "the entropy leaves out how much of the distribution each rank has",
        "meshrl/model/logprob.py::_over_full_vocabulary",
        "parts[:, 2] - log_share => parts[:, 2]",
        _ROWS + "[tp 2]",
    ),
    Fault(
        "the log of the sum of a rank's words has no gradient",
        "meshrl/model/logprob.py::_ChunkedLogprob.backward",
        "-g if grad_lse is None else grad_lse[rows, None].to(dtype) - g => -g",
        _ROWS + "[tp 2]",
    ),
    Fault(
        "a token is scored by the rank that has it, not by the one that has the token before",
        "meshrl/train/packing.py::pack",
        "previous[scored] => scored",
        _ROWS + "[ulysses 2]",
    ),
    Fault(
        "FSDP2 does not sum over ulysses",
        "meshrl/parallel/mesh.py::fsdp_mesh",
        "mesh['ulysses'].size() > 1 => False",
        _ROWS + "[ulysses 2]",
    ),
    Fault(
        "a module that each rank computes in full is summed",
        "meshrl/parallel/tp.py::TensorParallel._between_slices",
        "sum_scattered(out[0], self.axis) if is_cut else self.axis.own(out[0]) => sum_scattered(out[0], self.axis)",
        _FAMILY + "[words and features that tp does not divide-shard 2 x tp 2]",
    ),
    Fault(
        "the check at the start compares cut parameters with cut parameters",
        "meshrl/parallel/tp.py::TensorParallel._full",
        "cuts.movedim(0, cut.dim + 1) => cuts.movedim(0, cut.dim)",
        _STATE + "[fused experts]",
    ),
]
