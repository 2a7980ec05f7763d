"""What a GPU would do at best with the shapes that the GPU benchmarks measure: the roofline of its data sheet.

A phase takes at least FLOP / peak FLOP/s, and at least bytes / memory bandwidth; the larger of the two is its time. The
bytes are those that no implementation avoids: weights once for each forward of a decode step, the keys and values that
attention reads, the optimizer's state. So a measured time below its prediction is an error of the measurement or of
this file, and the ratio of the two shows what launches, unfused kernels and waits cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from measure import Report

# Dense bf16 FLOP/s, bytes/s of memory, by a part of the product name; from NVIDIA's data sheets.
_PEAKS = {
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "B200": (2.25e15, 8.0e12),
    "A100": (312e12, 2.039e12),
}
HALF, WIDE = 2, 4  # bytes of bf16 and fp32
ATTENTION_FLOP = 14  # of a pair of query and key, per number of a head: 4 forward, and flash attention's backward 2.5x
ADAMW_BYTES = 7 * WIDE + HALF  # of a parameter: reads gradient, master and two moments, writes the last three, in bf16


@dataclass(frozen=True, slots=True)
class Roofline:
    """name: of the device whose data sheet is used."""

    name: str
    flop_per_s: float
    bytes_per_s: float

    def seconds(self, flop: float, num_bytes: float) -> float:
        return max(flop / self.flop_per_s, num_bytes / self.bytes_per_s)


def predict(report: Report, name: str, value: float) -> None:
    """Record the prediction of a figure of this name; gpu_table.py prints both."""
    report.raw.setdefault("predictions", {})[name] = float(f"{value:.5g}")


def roofline_of(report: Report, peak_tflops: float | None = None) -> Roofline:
    """Of the data sheet of the report's device; of an H200's for a device without one here. The report gets the name.
    peak_tflops: instead of the data sheet's."""
    name = next((part for part in _PEAKS if part in report.raw["device"]["name"]), "H200")
    flop, memory = _PEAKS[name]
    report.raw["data_sheet"] = name
    return Roofline(name, flop if peak_tflops is None else peak_tflops * 1e12, memory)


@dataclass(frozen=True, slots=True)
class Shape:
    """block: parameters of the products of all blocks. head: of the head, to which the embedding may be tied. total: of
    the model. queries: heads x head size of all layers. token: bytes of a token's keys and values in bf16."""

    block: int
    head: int
    total: int
    queries: int
    token: int


def shape_of(config: Any) -> Shape:
    hidden, layers = config.hidden_size, config.num_hidden_layers
    size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    products = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config.intermediate_size
    others = queries + 2 * keys + 2 * hidden  # biases and norms
    head = config.vocab_size * hidden
    total = layers * (products + others) + hidden + (head if config.tie_word_embeddings else 2 * head)
    return Shape(layers * products, head, total, layers * queries, layers * 2 * keys * HALF)


def product(device: Roofline, size: int) -> float:
    """Seconds of a product of two square bf16 matrices."""
    return device.seconds(2 * size**3, 3 * size**2 * HALF)


def pairs(lengths: Sequence[int]) -> float:
    """Pairs of query and key that a causal mask allows in rows of these lengths."""
    return sum(n * (n + 1) / 2 for n in lengths)


def pairs_of_segments(bounds: Sequence[int], parents: Sequence[int]) -> float:
    """As `pairs`, for segments of which each continues the row of its parent (-1 = none), all of whose keys it sees."""
    before: list[int] = []
    found = 0.0
    for start, end, parent in zip(bounds[:-1], bounds[1:], parents, strict=True):
        before.append(0 if parent < 0 else before[parent] + bounds[parent + 1] - bounds[parent])
        found += (end - start) * before[-1] + pairs([end - start])
    return found


def attention(device: Roofline, num_pairs: float, tokens: int, heads: int, kv_heads: int, size: int) -> float:
    """Seconds of one layer of attention, forward and backward. Bytes: queries, outputs, keys and values, each with its
    gradient, once in each pass."""
    flop = ATTENTION_FLOP * num_pairs * heads * size
    return device.seconds(flop, 2 * 2 * tokens * (2 * heads + 2 * kv_heads) * size * HALF)


def train_step(
    device: Roofline, shape: Shape, tokens: int, num_pairs: float, scored: int, checkpointing: bool
) -> float:
    """Seconds of forward, backward and AdamW on one GPU. With checkpointing the blocks run forward once more."""
    passes = 8 if checkpointing else 6
    flop = passes * shape.block * tokens + 6 * shape.head * scored
    flop += (ATTENTION_FLOP + 4 * checkpointing) * shape.queries * num_pairs
    weights = (passes / 2) * shape.total * HALF
    return device.seconds(flop, weights) + device.seconds(0, ADAMW_BYTES * shape.total)


def rollout(
    device: Roofline, shape: Shape, prompts: Sequence[int], rows: Sequence[tuple[int, int]], max_running: int
) -> float:
    """Seconds of sampling. prompts: lengths of the contexts that are computed. rows: (prompt, tokens to sample), which
    run in this order, at most max_running at a time."""
    flop = 2 * shape.block * sum(prompts) + 4 * shape.queries * pairs(prompts) + 2 * shape.head * len(rows)
    spent = device.seconds(flop, shape.total * HALF + shape.token * sum(prompts))
    for contexts in _steps(rows, max_running):
        flop = 2 * (shape.block + shape.head) * len(contexts) + 4 * shape.queries * sum(contexts)
        spent += device.seconds(flop, shape.total * HALF + shape.token * sum(contexts))
    return spent


def _steps(rows: Sequence[tuple[int, int]], max_running: int) -> Iterator[list[int]]:
    """The contexts of the rows of each decode step. The first token of a row follows from its prompt."""
    waiting, running = list(reversed(rows)), list[list[int]]()  # context, tokens left
    while waiting or running:
        while waiting and len(running) < max_running:
            prompt, tokens = waiting.pop()
            running.append([prompt, tokens - 1])
        running = [[context + 1, left - 1] for context, left in running if left]
        if running:
            yield [context for context, _ in running]


def padded_rollout(device: Roofline, shape: Shape, rows: Sequence[tuple[int, int]]) -> float:
    """As `rollout`, for one batch that is padded to its longest prompt and runs to its longest answer."""
    longest, tokens = max(prompt for prompt, _ in rows), max(n for _, n in rows)
    return rollout(device, shape, [longest] * len(rows), [(longest, tokens)] * len(rows), len(rows))


def sync_in_place(device: Roofline, shape: Shape) -> float:
    """Seconds of a sync within one process: read fp32 masters, write bf16, which is digested meanwhile, and read it
    back."""
    return device.seconds(0, shape.total * (WIDE + 2 * HALF))
