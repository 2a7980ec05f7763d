"""TrainEngine: the model of one rank, or its shard, in any role. Samples -> Batch -> gradients -> new weights.

All methods are collectives: every rank of the mesh calls them in the same order, with the same number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.config.train import TrainConfig
from meshrl.core.batch import Batch, LossFn, Outputs
from meshrl.core.device import arithmetic, current_device, deterministic_kernels, fetched, has_own_memory
from meshrl.core.errors import MeshrlError
from meshrl.core.files import CONTINUE_LATER, output_errors
from meshrl.core.types import Metric, RoleSpec, Sample
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.costs import ModelFlops, model_flops
from meshrl.model.facts import ModelFacts
from meshrl.model.folder import not_finite
from meshrl.model.hub_names import HubNames
from meshrl.model.lora import (
    ADAPTER_FOLDER,
    joint_experts,
    named_weights,
    save_adapter,
    trained_weights,
    without_adapters,
)
from meshrl.model.recipe import DTYPES, Recipe, build_model, parallelize
from meshrl.model.routing import RouterSums, Routing, require_routing
from meshrl.model.save import save_pretrained, write_configs
from meshrl.monitor.recorder import recorder
from meshrl.parallel.fsdp import full_tensor, local_shard, reshard
from meshrl.parallel.mesh import replica_group
from meshrl.parallel.timing import timed, timed_collective
from meshrl.plan.ranks import coordinates
from meshrl.sync.digest import tensor_digests
from meshrl.train.checkpoint import Tensors, stage, write_in_background
from meshrl.train.checkpoint_files import FileFact
from meshrl.train.offload import HostMemory
from meshrl.train.optim import build_optimizer, clip_gradients
from meshrl.train.packing import pack, require_independent_rows
from meshrl.train.state import NO_TENSORS, base_digest, load_state, reference_digest, state_bytes, state_tensors
from meshrl.train.weights import RankWeights, rank_weights

if TYPE_CHECKING:
    from meshrl.model.causal import PreTrainedModel

MAX_SKIPPED_IN_A_ROW = 5
RowArrays = dict[int, np.ndarray]  # step-wide row index -> float32[T]


@dataclass(kw_only=True, slots=True)
class ForwardBackward:
    """metrics: this rank's, undivided. logprobs, entropies: those of the forward, by row; in an on-policy update the
    logprobs verify the sampler's without an extra forward. entropies: empty unless requested."""

    metrics: list[Metric]
    logprobs: RowArrays = field(default_factory=dict)
    entropies: RowArrays = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardDigests:
    """Digests of one rank's shard of each trained parameter, by name: of its gradient before clipping, and of its value
    after the optimizer step. computes: what their bits depend on besides the inputs."""

    gradients: dict[str, int]
    weights: dict[str, int]
    computes: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """grad_norm: before clipping, equal on all ranks. skipped: it was not finite, so no parameter was updated.
    not_finite: the first parameter of which this rank's shard is not finite in the compute dtype after the update; ""
    if there is none. shards: if requested, the digests of each rank."""

    grad_norm: float
    skipped: bool
    not_finite: str = ""
    shards: list[ShardDigests] = field(default_factory=list)


class TrainEngine:
    """Build with `TrainEngine.build`."""

    def __init__(self, model: CausalModel, mesh: DeviceMesh, cfg: TrainConfig, role: RoleSpec, recipe: Recipe):
        self.model, self.mesh, self.cfg, self.role = model, mesh, cfg, role
        self.lora, self.compute_dtype, self.device = recipe.lora, recipe.compute_dtype, recipe.device
        self.coordinates = coordinates(mesh.shape, mesh.get_rank())
        self._moments_on_host = cfg.optimizer_offload and has_own_memory(self.device)
        trains = role.optimizer is not None
        self.optimizer = build_optimizer(model, cfg.optimizer, self._moments_on_host) if trains else None
        self._host = HostMemory(self.device)
        self.num_optimizer_steps = 0
        self.num_skipped_in_a_row = 0
        self.attention: dict[int, tuple[str, str]] = {}  # PackedAttention.used of the newest forward
        self.on_batch: Callable[[], None] = lambda: None  # called after each micro-batch, computed or queued
        self._write: Future[tuple[str, FileFact]] | None = None

    @classmethod
    def build(
        cls,
        model_cfg: ModelConfig,
        train_cfg: TrainConfig,
        mesh: DeviceMesh,
        role: RoleSpec,
        facts: ModelFacts | None = None,
    ) -> TrainEngine:
        """Shard, then read this rank's rows from the folder. Masters in train.master_dtype, compute in model.dtype.
        facts: of this folder, with its values in the files or in an engine of the same mesh."""
        lora = model_cfg.lora if role.trains and model_cfg.lora.enabled else None
        compute, masters = DTYPES[model_cfg.dtype], DTYPES[train_cfg.master_dtype]
        recipe = replace(
            _recipe(train_cfg, mesh, role, compute, masters, lora),
            attention=model_cfg.attn_implementation,
            router_dtype=DTYPES.get(model_cfg.router_dtype),
            freezes_vision=model_cfg.vision == "freeze",
        )
        engine = cls(build_model(model_cfg.path, recipe, facts), mesh, train_cfg, role, recipe)
        if train_cfg.router_aux_loss_coef > 0:
            require_routing(engine.model.routing, model_cfg.path, "train.router_aux_loss_coef=0")
        engine.require_independent_rows()
        return engine

    @classmethod
    def wrap(
        cls,
        lm: PreTrainedModel,
        cfg: TrainConfig,
        mesh: DeviceMesh,
        role: RoleSpec,
        compute_dtype: torch.dtype,
        lora: LoraConfig | None = None,
    ) -> TrainEngine:
        """An engine over a Transformers causal LM that has the same values on every rank. lora: the config that
        `add_adapters` was called with."""
        recipe = _recipe(cfg, mesh, role, compute_dtype, compute_dtype, lora)
        model = CausalModel(lm.eval()).to(recipe.device)
        if lora is None:  # else add_adapters has chosen the trained parameters
            lm.requires_grad_(recipe.trains)
        parallelize(model, recipe)
        return cls(model, mesh, cfg, role, recipe)

    @cached_property
    def _replica(self) -> Any:
        """The process group of one replica of the model (a collective)."""
        return replica_group(self.mesh)

    @cached_property
    def names(self) -> HubNames:
        """The hub names of the model's tensors."""
        return HubNames(self.model.lm)

    @cached_property
    def flops(self) -> ModelFlops | None:
        return model_flops(self.model.lm)

    def require_independent_rows(self) -> None:
        """`packing.require_independent_rows` for this model (a collective)."""
        require_independent_rows(
            type(self.model.lm).__name__,
            self.model.vocab_size,
            lambda rows: self.forward([self.pack(rows, range(len(rows)))]),
        )

    # ---- scoring and training

    def pack(self, samples: Sequence[Sample], rows: Sequence[int], has_images: bool = False) -> Batch:
        """`packing.pack` for this engine's model, device and mesh."""
        at, inputs = self.coordinates, self.model.inputs
        return pack(samples, rows, self.device, self.cfg.share_prompts, at.num_ulysses, at.num_tp, inputs, has_images)

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], adapter: bool = True) -> RowArrays:
        """Logprobs of the masked tokens by row, 0 elsewhere. No gradient.

        adapter: with the LoRA adapters; without them this is the reference model. A reference selects its own experts.
        """
        reads = list[Callable[[], RowArrays]]()
        adapters = nullcontext() if adapter else without_adapters(self.model.lm)
        with adapters, deterministic_kernels(self.cfg.full_determinism):
            for batch in batches:
                with timed("forward", "compute", self.device, tokens=batch.num_tokens):
                    out = self._outputs(batch, False, replays=adapter and self.role.trains)
                reads.append(_rows(batch, out.logprobs))
                self.on_batch()
        reshard(self.model)
        return {row: values for read in reads for row, values in read().items()}

    def forward_backward(
        self,
        batches: Sequence[Batch],
        loss: LossFn,
        entropy: bool = True,
        entropies: bool = False,
        num_scored: int = 0,
    ) -> ForwardBackward:
        """Add the gradient of the loss, summed over ALL ranks; may be called several times before optim_step.
        entropies: whether those of each token are returned. num_scored: the loss of this many leading batches has no
        gradient, in all ranks; they get no backward pass.

        FSDP averages gradients over ranks, so each local sum is multiplied by their number. The batches of all ranks
        are those of one optimizer step if train.router_aux_loss_coef is not 0.
        """
        routing, result = self.model.routing, ForwardBackward(metrics=[])
        reads = list[tuple[Iterable[Metric], Callable[[], RowArrays], Callable[[], RowArrays]]]()
        with deterministic_kernels(self.cfg.full_determinism):
            if routing is not None:
                self._balance_experts(routing, batches)
            for at, batch in enumerate(batches):
                trains = at >= num_scored
                if at == num_scored:
                    reshard(self.model)  # after forward passes without backward passes
                timing = timed("forward", "compute", self.device, tokens=batch.num_tokens)
                with timing, torch.set_grad_enabled(trains):
                    out = self._outputs(batch, entropy, counts=True)
                    if batch.is_dummy:
                        total = out.logprobs.sum() * 0.0
                    else:
                        total, metrics = loss(out, batch)
                        of_tokens = out.entropy if entropies else None
                        reads.append((metrics, _rows(batch, out.logprobs), _rows(batch, of_tokens)))
                if trains:
                    with timed("backward", "compute", self.device, tokens=batch.num_tokens):
                        (total * self.coordinates.loss_scale).backward()
                self.on_batch()
        for metrics, read_logprobs, read_entropies in reads:
            result.metrics.extend(metrics)
            result.logprobs |= read_logprobs()
            result.entropies |= read_entropies()
        if routing is not None:
            of_all_ranks = self._router_sums(routing).metrics()  # in every rank, and reported once
            result.metrics += of_all_ranks if self.mesh.get_rank() == 0 else []
        return result

    def optim_step(self, lr: float, digests: bool = False) -> StepReport:
        """Clip, step, check, clear. If the gradient norm is not finite, every rank skips the step. digests: whether the
        report has those of gradients and weights."""
        if self.optimizer is None:
            raise ValueError(f"a {self.role.name} engine has no optimizer")
        trained, shards = trained_weights(self.model.lm), list[ShardDigests]()
        if digests:
            gradients = self._digests({name: p.grad for name, p in trained.items() if p.grad is not None})
        with timed("clip", "compute", self.device):
            norm = clip_gradients(self.model, self.cfg.optimizer.clip, self._replica)
        skipped, bad = not np.isfinite(norm), list[str]()
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if self.num_skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise MeshrlError(
                f"the gradient norm was {norm} in {self.num_skipped_in_a_row} optimizer steps in a row, and all "
                "were skipped: the run can't learn any more. Look at loss/* of the last step that was not "
                "skipped, and try a lower train.optimizer.lr"
            )
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with timed("optimizer", "compute", self.device):
                self.optimizer.step()
                bad = not_finite(trained, self.compute_dtype)
            self.num_optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        if digests:
            shards = [ShardDigests(gradients, self._digests(trained), arithmetic(self.device))]
        return StepReport(grad_norm=norm, skipped=skipped, not_finite=bad[0] if bad else "", shards=shards)

    def _digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        with timed("digest", "compute", self.device), torch.no_grad():  # with gradients, to_local is slow
            return tensor_digests({name: local_shard(tensor) for name, tensor in tensors.items()})

    def _balance_experts(self, routing: Routing, batches: Sequence[Batch]) -> None:
        """Start the counts of a step. The loss that balances the experts needs them before any gradient: with it, they
        are made by a forward pass."""
        routing.sums = None
        routing.balance(None)
        if self.cfg.router_aux_loss_coef == 0:
            return
        with torch.no_grad():
            for batch in batches:
                self._outputs(batch, entropy=False, counts=True)
        reshard(self.model)
        at = self.coordinates
        routing.balance(self._router_sums(routing), self.cfg.router_aux_loss_coef * at.loss_scale / at.num_tp)

    def _router_sums(self, routing: Routing) -> RouterSums:
        """The sums of all ranks (a collective), which start again at 0. Ranks of tp have counted the same tokens."""
        sums, routing.sums = routing.sums, None
        assert sums is not None, "each rank computes a batch"
        for total in (sums.selected, sums.probabilities, sums.entropy):
            if self.coordinates.tp > 0:
                total.zero_()
            with timed_collective("all_reduce", total, self.mesh.size()):
                dist.all_reduce(total)
        return sums

    def _outputs(self, batch: Batch, entropy: bool, replays: bool = True, counts: bool = False) -> Outputs:
        """Model outputs scattered to [T]; 0 outside the mask. Each rank of ulysses scores the tokens whose previous
        ones are in its chunk. replays: the sampler's choices of experts. counts: the experts' loads."""
        cu_seqlens, parents, peers = batch.cu_seqlens.tolist(), batch.parents, self.model.peers
        scored = batch.scored
        if peers is not None:
            cu_seqlens = peers.padded(cu_seqlens)
            parents = parents + [-1] * (len(cu_seqlens) - len(batch.cu_seqlens))
            scored = scored.split(batch.scored_of_chunk)[self.coordinates.ulysses]
        previous = batch.previous.index_select(0, scored)
        if peers is not None:
            previous = previous - peers.first(batch.num_tokens)
        context = PackedAttention(cu_seqlens, self.device, parents, mutual=batch.mutual)
        self._begin_routing(batch, replays, counts)
        logp, ent = self.model(
            batch.tokens,
            batch.position_ids,
            context,
            scored,
            previous,
            batch.temperature.index_select(0, scored),
            self.cfg.logprob_chunk_tokens,
            entropy,
            self._model_kwargs(batch),
        )
        if self.model.routing is not None:
            self.model.routing.end()
        self.attention = context.used
        zeros = torch.zeros(batch.num_tokens, dtype=logp.dtype, device=logp.device)
        outputs = [None if values is None else zeros.index_copy(0, scored, values) for values in (logp, ent)]
        if peers is not None:
            outputs = [None if values is None else peers.sum_chunks(values) for values in outputs]
        logprobs, entropies = outputs
        assert logprobs is not None
        return Outputs(logprobs=logprobs, entropy=entropies)

    def _begin_routing(self, batch: Batch, replays: bool, counts: bool) -> None:
        routing, peers = self.model.routing, self.model.peers
        routes = batch.routed_experts if replays else None
        if routing is None:
            if routes is not None and not self.model.replays_routing:
                raise ValueError(
                    f"samples carry routed_experts, but {type(self.model.lm).__name__} can't replay them; turn off "
                    "their recording in the sampler"
                )
            return
        rows = batch.rows_of_tokens()
        if peers is not None:
            rows = peers.own_tokens(rows)
            routes = None if routes is None else peers.own_tokens(routes.movedim(0, -1)).movedim(-1, 0)
        routing.begin(rows, routes, counts)

    def _model_kwargs(self, batch: Batch) -> dict[str, Any]:
        """The model's inputs other than tokens: processed media, and choices of experts if it takes them."""
        routes = {"routed_experts": batch.routed_experts} if self.model.replays_routing else {}
        return {**batch.model_kwargs, **routes}

    # ---- weights for samplers and files

    def weights(self, merged: bool = False) -> RankWeights:
        """This rank's boxes of each tensor that samplers need (with merged, a collective; see `rank_weights`)."""
        reshard(self.model)
        return rank_weights(self.model.lm, self.names, self.compute_dtype, merged)

    def frozen(self) -> frozenset[str]:
        """Hub names of the tensors that no optimizer step changes."""
        frozen = [name for name, p in named_weights(self.model.lm) if not p.requires_grad]
        return frozenset(hub_name for name in frozen for hub_name in self.names.of(name))

    def model_bytes(self) -> int:
        """Bytes of an exported model's weights."""
        return sum(p.numel() for p in self.model.parameters()) * self.compute_dtype.itemsize

    def export(self, path: str | Path, tokenizer_from: str | Path | None = None, weights: bool = True) -> float | None:
        """Write a folder that `from_pretrained` loads, in the compute dtype (a collective). Each rank writes one file,
        all of about the same size, and gathers only the tensors in it. LoRA adapters are merged into these weights, and
        also written for peft into a folder below. weights: False = the first rank writes all other files.

        Returns: `save_pretrained`'s share of the adapters' change."""
        reshard(self.model)
        with output_errors(Path(path), CONTINUE_LATER):
            if not weights:
                if dist.get_rank() == 0:
                    write_configs(self.model.lm, self.compute_dtype, Path(path), tokenizer_from)
                return None
            share = save_pretrained(self.model.lm, self.compute_dtype, Path(path), tokenizer_from)
            if self.lora is not None:
                tensors = {name: full_tensor(p.detach()) for name, p in trained_weights(self.model.lm).items()}
                if dist.get_rank() == 0:
                    base = str(self.model.lm.config.name_or_path)
                    is_mixture = bool(joint_experts(self.model.lm))
                    save_adapter(tensors, self.lora, base, Path(path) / ADAPTER_FOLDER, is_mixture)
            return share

    # ---- checkpoints

    def save(self, folder: str | Path, continues: bool = True, reference: Tensors = NO_TENSORS) -> None:
        """Start to write the full training state into `folder` (a collective). continues: whether training goes on
        meanwhile, so that the state is copied first. reference: its `reference_digest`."""
        reshard(self.model)
        counters = (self.num_optimizer_steps, self.num_skipped_in_a_row)
        state = state_tensors(self.model.lm, self.optimizer, counters, self.device) | dict(reference)
        with recorder.span("stage", "copy", bytes=self.state_bytes()):
            slices = stage(state, self._host.readable, copy=continues)
        self._write = write_in_background(Path(folder), self.role.name, slices)

    def finish_save(self) -> tuple[str, FileFact]:
        """Wait until this rank's file is on disk. Returns its name, size and hash."""
        assert self._write is not None, "call save before finish_save"
        write, self._write = self._write, None
        return write.result()

    def load(self, folder: str | Path, reference: Tensors = NO_TENSORS) -> None:
        """Load a state that any number of ranks saved (a collective). The parameters must be on the device. If it
        fails, nothing is changed."""
        reshard(self.model)
        parts = self.model.lm, self.optimizer, self.device, reference
        self.num_optimizer_steps, self.num_skipped_in_a_row = load_state(Path(folder), self.role.name, *parts)

    def state_bytes(self) -> int:
        """Bytes of this rank's share of a checkpoint."""
        return state_bytes(self.model.lm, self.optimizer)

    # ---- memory of the device

    def release(self, frozen: bool = True) -> None:
        """Move the parameters to host memory. Saving reads them there; everything else needs `restore` first. A
        collective, with frozen parameters. frozen: also those that are not trained."""
        reshard(self.model)
        base_digest(self.model.lm)  # saved with adapters, and computed once
        if not self.role.trains:
            reference_digest(self.model.lm)
        self._host.release(p for p in self.model.parameters() if frozen or p.requires_grad)

    def restore(self) -> None:
        """Move the parameters back to the device, if they were released."""
        self._host.restore(self.model.parameters())

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds on its device: params, grads, optimizer, buffers."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        slots = [] if self.optimizer is None or self._moments_on_host else self.optimizer.state.values()
        return {
            "params": _num_bytes(list(self.model.parameters())),
            "grads": _num_bytes(grads),
            "optimizer": _num_bytes([t for slot in slots for t in slot.values() if isinstance(t, torch.Tensor)]),
            "buffers": _num_bytes(list(self.model.buffers())),
        }


def _recipe(
    cfg: TrainConfig,
    mesh: DeviceMesh,
    role: RoleSpec,
    compute: torch.dtype,
    masters: torch.dtype,
    lora: LoraConfig | None,
) -> Recipe:
    return Recipe(
        dtype=masters if role.trains and lora is None else compute,
        lora=lora,
        adapter_dtype=masters,
        trains=role.trains,
        mesh=mesh,
        compute_dtype=compute,
        activation_checkpointing=role.trains and cfg.activation_checkpointing,
        keep_unsharded=cfg.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD"),
        group_bytes=cfg.fsdp_group_bytes,
        prefetch=cfg.fsdp_prefetch,
        torch_compile=cfg.torch_compile,
        device=current_device(mesh.device_type),
    )


def _rows(batch: Batch, values: torch.Tensor | None) -> Callable[[], RowArrays]:
    """Start to copy these values of the batch's tokens, if any, to the host; returns a function that waits for them."""
    if values is None:
        return dict
    read, cu = fetched(values.detach().float()), batch.cu_seqlens.tolist()
    places = [(row, offset, slice(*cu[s : s + 2])) for s, (row, offset) in enumerate(zip(batch.rows, batch.offsets))]

    def rows() -> RowArrays:
        array = read().cpu().numpy()
        return {row: np.concatenate([np.zeros(at, np.float32), array[part]]) for row, at, part in places if row >= 0}

    return rows


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    shards = [local_shard(t) for t in tensors]
    return sum(t.numel() * t.element_size() for t in shards if t.untyped_storage().nbytes())
