"""The time of a training step and of a sampling step by kind of operation, as shares.

    python benchmarks/where_time_goes.py

One rank's part of a GRPO step with 5 M parameters (4 groups of 8, GSM8K's lengths), on one thread, as many as each of
two ranks has on two cores. Training: forward and backward over the packed batch, a group's prompt once. Sampling: steps
of the embedded engine while 32, 16 and 4 rows run. Shares are of wall time under PyTorch's profiler, which slows
dispatch down. "dispatch_and_rest" is the time outside of the listed kernels: Python, arguments, views, allocation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from measure import Report, parser
from rollout import build_engine, mixed
from torch.profiler import ProfilerActivity, profile
from workload import gsm8k_groups, model_folder, start_single_rank, training_samples

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY, Request, SamplingParams
from meshrl.model.recipe import DTYPES, load_causal_lm
from meshrl.train.engine import TrainEngine
from meshrl.train.packing import pack

SAMPLING_STEPS = 20
ROWS = (32, 16, 4)
KINDS = {
    "matrix_products": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"),
    "attention": (
        "aten::bmm",
        "aten::baddbmm",
        "aten::baddbmm_",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "exp_and_sums": ("aten::exp", "aten::exp_", "aten::sum", "aten::cumsum", "aten::amax", "aten::log"),
    "moving": (
        "aten::copy_",
        "aten::cat",
        "aten::index_select",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::scatter_add_",
        "aten::fill_",
    ),
    "elementwise": (
        "aten::mul",
        "aten::mul_",
        "aten::add",
        "aten::add_",
        "aten::addcmul_",
        "aten::addcmul",
        "aten::sub",
        "aten::div",
        "aten::div_",
        "aten::neg",
        "aten::pow",
        "aten::rsqrt",
        "aten::rsqrt_",
        "aten::silu",
        "aten::silu_backward",
        "aten::linalg_vector_norm",
        "aten::mean",
    ),
}


def shares(report: Report, name: str, work: Callable[[], Any]) -> None:
    """Run `work` under the profiler, and report a figure for each kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        began = time.perf_counter()
        work()
        wall = time.perf_counter() - began
    own = Counter({event.key: event.self_cpu_time_total / 1e6 for event in found.key_averages()})
    report.raw[name] = {"wall_s": wall, "operations_s": dict(own.most_common(40))}
    left = wall
    for kind, names in KINDS.items():
        seconds = sum(own[key] for key in names)
        left -= seconds
        report.figure(f"share_{name}_{kind}", seconds / wall, digits=2)
    report.figure(f"share_{name}_dispatch_and_rest", left / wall, digits=2)


def training(report: Report, folder: Any, dtype: str, scale: float, mesh: Any) -> None:
    """One rank's forward and backward of a step."""
    cfg = TrainConfig(activation_checkpointing=False)
    engine = TrainEngine.wrap(load_causal_lm(folder), cfg, mesh, POLICY, DTYPES[dtype])
    samples = training_samples(gsm8k_groups(4, 8, seed=100, scale=scale), seed=100)
    batches, loss = [pack(samples, list(range(len(samples))), share_prefix=True)], make_policy_loss(AlgoConfig())
    for _ in range(3):
        engine.forward_backward(batches, loss)
        engine.model.zero_grad(set_to_none=True)
    report.figure(f"trained_rows_{dtype}", len(samples))
    shares(report, f"training_{dtype}", lambda: engine.forward_backward(batches, loss))


def sampling(report: Report, folder: Any, dtype: str, scale: float) -> None:
    """Steps of the engine, at 32 running rows, at 16 and at 4."""
    engine = build_engine(folder, dtype)
    for rows in ROWS:
        for i, spec in enumerate(mixed(32, 100, scale)[:rows]):
            params = SamplingParams(ignore_eos=True)
            engine.submit(Request(id=f"{i}", context_ids=spec.prompt, sampling=params, seed=i, max_new_tokens=512))
        for _ in range(60):
            engine.step()
        shares(report, f"sampling_{dtype}_{rows}_rows", lambda: [engine.step() for _ in range(SAMPLING_STEPS)])
        while engine.has_work:
            engine.step()


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.set_defaults(threads=1)
    p.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = p.parse_args()
    report = Report("where_time_goes", args)
    folder = model_folder(args.model, "smoke" if args.smoke else "5M")
    mesh = start_single_rank(args.threads)
    for dtype in args.dtypes:
        training(report, folder, dtype, 0.1 if args.smoke else 1.0, mesh)
        sampling(report, folder, dtype, 0.1 if args.smoke else 1.0)
    report.finish()


if __name__ == "__main__":
    main()
