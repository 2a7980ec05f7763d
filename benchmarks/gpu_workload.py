"""Shared by the GPU benchmarks: models by shape, the device and its clock, and the FLOP of a training step."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_predict import Roofline, predict, product, roofline_of
from measure import Report, median, parser
from torch.distributed.device_mesh import DeviceMesh

from meshrl.core.device import dist_backend, local_device, memory_stats, synchronize
from meshrl.parallel.mesh import build_mesh

# Shapes of Qwen2.5: 494 M and 1.54 B parameters, with embeddings that are tied to the head; and 14 of the 28 layers of
# 7B, whose full state for training leaves too little of an H200's memory for activations: 4.35 B parameters.
SHAPES: dict[str, dict[str, int]] = {
    "0.5B": dict(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=131072,
    ),
    "1.5B": dict(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=131072,
    ),
    "7B_14": dict(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=14,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "smoke": dict(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    ),
}

GEMM = 8192  # rows and columns of the matrices of `measure_gemm`


def gpu_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The shared options, and those of a GPU benchmark. --smoke runs on the CPU."""
    p = parser(description, rounds)
    p.add_argument(
        "--peak-tflops",
        type=float,
        help="dense bf16 TFLOP/s of the device (default: of its data sheet, or of an H200's)",
    )
    return p


def start(name: str, args: argparse.Namespace) -> tuple[Report, torch.device]:
    """The report, with the facts of the device, and the device. --smoke forces the CPU."""
    if args.smoke:
        os.environ["MESHRL_DEVICE"] = "cpu"
        args.rounds = 2
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    device = local_device(0)
    if device.type == "cpu" and not args.smoke:
        raise SystemExit(f"{name} measures an accelerator, and this machine has none; --smoke runs it on the CPU")
    report = Report(name, args)
    report.raw["device"] = device_facts(device)
    report.print_line(f"on {report.raw['device']['name']}, torch {torch.__version__}")
    return report, device


def device_facts(device: torch.device) -> dict[str, Any]:
    """The facts of the device that a reader needs to judge a figure."""
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "type": device.type}
    facts = torch.cuda.get_device_properties(device)
    found = {
        "name": facts.name,
        "type": device.type,
        "memory_bytes": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        found["driver, clocks, power limit"] = done.stdout.splitlines()[0] if done.stdout else done.stderr.strip()
    return found


def config_of(shape: str) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{"tie_word_embeddings": True, **SHAPES[shape]})


def random_model(shape: str, device: torch.device) -> torch.nn.Module:
    """fp32 random weights in the device's memory, with meshrl's attention."""
    from transformers import Qwen2ForCausalLM

    from meshrl.model import attention

    attention.register()
    config = config_of(shape)
    config._attn_implementation = attention.NAME
    config.use_cache = False
    torch.manual_seed(0)
    with device:
        return Qwen2ForCausalLM(config)


def model_folder(given: Path | None, shape: str, device: torch.device) -> Path:
    """The given folder, or a new one with random bf16 weights of that shape."""
    if given is not None:
        return given
    folder = Path(tempfile.mkdtemp(prefix=f"model-{shape}-"))
    model = random_model(shape, device).to(torch.bfloat16)
    model.config.use_cache = True  # by `generate`
    model.save_pretrained(folder)
    return folder


def start_single_rank(device: torch.device) -> DeviceMesh:
    """A process group of one rank in this process, and its mesh on the device."""
    dist.init_process_group(dist_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    return build_mesh((1, 1, 1, 1), device.type)


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Wall time of the work, including everything that it has queued on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def measure_gemm(report: Report, device: torch.device, size: int, roofline: Roofline) -> float:
    """Measure FLOP/s of a large bf16 matrix product on this device: the upper limit of other figures."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = [seconds(device, lambda: [a @ b for _ in range(10)]) / 10 for _ in range(6)][1:]
    report.figure("gemm_tflop_per_s", 2 * size**3 / median(took) / 1e12)
    predict(report, "gemm_tflop_per_s", 2 * size**3 / product(roofline, size) / 1e12)
    return 2 * size**3 / median(took)


def measure_copy(report: Report, device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a large copy within the device's memory, read plus written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    took = [seconds(device, lambda: [target.copy_(source) for _ in range(10)]) / 10 for _ in range(4)][1:]
    rate = 2 * num_bytes / median(took)
    report.figure("copy_gb_per_s", rate / 1e9)
    predict(report, "copy_gb_per_s", roofline_of(report).bytes_per_s / 1e9)
    return rate


def peak_bytes(device: torch.device) -> int:
    """Peak bytes of the device's memory since reset_peak_memory; 0 on the CPU, which records no peak."""
    return memory_stats(device).get("peak_bytes", 0)


def step_flop(config: Any, lengths: Sequence[int], scored: int) -> float:
    """FLOP of forward and backward of these rows, in the usual count, without recomputation.

    6 for each parameter of a matrix product and each token (2 forward, 4 backward): for the blocks every token counts,
    for the head every scored token; the embedding is a lookup. Causal attention of a row of l tokens: 6 l^2 H D a layer
    (forward has two products of 2 l^2 H D and needs half of them, because it is causal; backward needs twice as much).
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    block = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config.intermediate_size
    products = layers * block * sum(lengths) + config.vocab_size * hidden * scored
    return 6.0 * products + 6.0 * layers * queries * sum(n * n for n in lengths)
