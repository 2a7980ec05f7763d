"""Registers, shared memory and spills of each Triton kernel, compiled for GPUs on a machine without one.

    .venv-vllm/bin/python benchmarks/kernel_resources.py      # 30 s; any environment with Triton

The functions that launch kernels are called with tensors on the meta device, in the shapes of a 7B model, and each
launch is compiled as Triton would compile it: with the same types, constants and options. Nothing is run. Printed are
the rows of the table in docs/perf/gpu.md.

registers         of a thread; a device has 255
shared_bytes      of a program, with those that the system reserves
spilled_bytes     of a thread: its stack, where registers are stored that do not fit
tensor_core       number of matrix instructions of tensor cores (mma, wgmma or tcgen05.mma) in the PTX
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from measure import Report, parser
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from meshrl.model import kernels as head
from meshrl.model.attention import Rotation
from meshrl.model.logprob import CHUNK_LOGITS
from meshrl.rollout.embedded import kernels as decode
from meshrl.sync import kernels as sync

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # that a program may have, by architecture
TOKENS, DIM, VOCAB = 16384, 3584, 151936
MATRIX = re.compile(r"^\s*(?:@\S+ )?(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", re.M)
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
POINTERS[torch.int16] = "*i16"


class Launches:
    """Takes the place of a kernel, and records the source of each of its launches."""

    def __init__(self, kernel: Any):
        self.kernel, self.found = kernel, list[tuple[ASTSource, dict[str, int]]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        """As Triton does it: None, 1 and constexpr parameters are constants, and addresses and numbers that 16 divides
        are known to be so."""
        names = self.kernel.arg_names
        given: dict[str, Any] = dict(zip(names, args)) | constants
        signature, fixed, known = {}, dict(constants), {}
        for index, name in enumerate(names):
            value = given[name]
            if name in constants or value is None or (isinstance(value, int) and value == 1):
                signature[name], fixed[name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                known[index,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, known)
        self.found.append((source, {"num_warps": num_warps, "num_stages": num_stages}))


def score(
    bias: bool = False, softcap: float | None = None, tokens: int = TOKENS, vocab: int = VOCAB, with_lse: bool = False
) -> None:
    """Forward and backward of the head on the meta device, with entropies in the loss; with_lse: and the sums of
    exp(logits), as the ranks of tensor parallelism take them."""
    x, w = (torch.empty(n, DIM, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (tokens, vocab))
    b = torch.empty(vocab, dtype=torch.bfloat16, device="meta", requires_grad=True) if bias else None
    targets, ones = torch.empty(tokens, dtype=torch.int64, device="meta"), torch.ones(tokens, device="meta")
    chunk = min(tokens, CHUNK_LOGITS // vocab)
    logp, entropy, lse = head.TiledLogprob.apply(x, w, b, targets, ones, 1.0, softcap, chunk, True)
    loss = logp.sum() + entropy.sum()
    (loss + lse.sum() if with_lse else loss).backward()


def digest() -> None:
    """Of several pieces of a gigabyte, and with casts into them."""
    raw = torch.empty(1 << 30, dtype=torch.uint8, device="meta")
    keys = torch.empty(16384, dtype=torch.int64, device="meta")
    sync.sum64([(0, raw, 0)] * 3, 1, keys, keys, 0x01010101)
    masters = torch.empty(1 << 29, device="meta")
    sync.sum64([(0, raw, 0)] * 3, 1, keys, keys, 0x01010101, [masters] * 3, torch.bfloat16)


def delta() -> None:
    """The launches of `take_changes`, which would read the number of changes between them."""
    source, base = torch.empty(DIM * DIM), torch.empty(DIM * DIM, dtype=torch.bfloat16)
    indices, sums = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    bits = base.view(torch.int16)
    constants = {"ELEMENTS": sync.ELEMENTS, **sync.LAUNCH}
    sync.count_kernel[(1,)](source, base, bits, sums, len(base), **constants)
    sync.compact_kernel[(1,)](source, base, bits, sums, indices, bits, len(base), **constants)


def decode_attention(rows: int, heads: int, kv_heads: int, size: int, rotates: bool, norms: bool = False) -> None:
    """Of a layer, over pages of 128 tokens, of which a row has up to 64. rotates: as for the fast decoder; norms: whose
    heads have norms."""
    qkv = torch.empty(rows, heads + 2 * kv_heads, size, dtype=torch.bfloat16, device="meta")
    integers = torch.empty(3, rows, dtype=torch.int64, device="meta")
    table = integers[0, :2], torch.empty(rows, 130, dtype=torch.int32, device="meta"), *integers[1:]
    rotation = Rotation(qkv[:, :1], qkv[:, :1], (qkv[0, 0], qkv[0, 0], 1e-6) if norms else None)
    parts = qkv.split([heads, kv_heads, kv_heads], dim=1)
    decode.attend(*parts, *table, 128, 0.1, None, rotation if rotates else None)


def between_products() -> None:
    """What the fast decoder computes there, for 256 rows."""
    qkv, x = (torch.empty(256, *shape, dtype=torch.bfloat16, device="meta") for shape in ((36, 128), (2 * DIM,)))
    head.rotate(qkv, (28, 4), Rotation(qkv[:, :1], qkv[:, :1], (qkv[0, 0], qkv[0, 0], 1e-6)))
    head.gate(x)
    head.norm(x, x[0], 1e-6, x)


HEAD = ("forward_kernel", "backward_kernel")
ATTEND = ("attend_kernel", "merge_kernel")
DECODER = ("norm_kernel", "rotate_kernel", "gate_kernel")
CASES: dict[str, tuple[Any, tuple[str, ...], Callable[[], None]]] = {
    "logprob, entropy": (head, HEAD, score),
    "with bias, softcap": (head, HEAD, lambda: score(True, 30.0)),
    "a part of the vocabulary": (head, HEAD, lambda: score(vocab=VOCAB // 4, with_lse=True)),  # of one of 4 tp ranks
    "one token, 129 columns": (head, HEAD, lambda: score(tokens=1, vocab=129)),  # the last slice has one column
    "decode, 256 rows": (decode, ATTEND, lambda: decode_attention(256, 28, 4, 128, rotates=True)),
    "with norms of heads": (decode, ATTEND, lambda: decode_attention(256, 28, 4, 128, rotates=True, norms=True)),
    "own forward": (decode, ATTEND, lambda: decode_attention(256, 28, 4, 128, rotates=False)),
    "decode, one row": (decode, ATTEND, lambda: decode_attention(1, 14, 2, 64, rotates=True)),
    "fast decoder": (head, DECODER, between_products),
    "digest of a transfer": (sync, ("sum64_kernel",), digest),
    "changes, fp32 to bf16": (sync, ("count_kernel", "compact_kernel"), delta),
}


def launches(case: str) -> dict[str, list[tuple[ASTSource, dict[str, int]]]]:
    """By kernel: the launches of a case that Triton would compile, each once."""
    module, names, work = CASES[case]
    kernels = {name: getattr(module, name) for name in names}
    recorders = {name: Launches(kernel) for name, kernel in kernels.items()}
    try:
        for name, recorder in recorders.items():
            setattr(module, name, recorder)
        work()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    distinct = {name: {source.hash(): (source, o) for source, o in each.found} for name, each in recorders.items()}
    return {name: list(each.values()) for name, each in distinct.items()}


def resources(source: ASTSource, options: dict[str, int], arch: int) -> dict[str, int]:
    """Compile one launch, and read what its machine code states."""
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert found is not None, text
    return {
        "registers": int(found[1]),
        "shared_bytes": compiled.metadata.shared + int(found[3]),
        "spilled_bytes": int(found[2]),
        "tensor_core": len(MATRIX.findall(compiled.asm["ptx"])),
    }


def main() -> None:
    args = parser(__doc__, rounds=1).parse_args()
    report = Report("kernel_resources", args)
    rows: list[dict[str, Any]] = []
    for case in list(CASES)[1:] if args.smoke else CASES:
        for kernel, found in launches(case).items():
            for arch in (80, 90) if args.smoke else SHARED_BYTES:
                for source, options in found:
                    used = resources(source, options, arch)
                    rows.append({"case": case, "kernel": kernel, "arch": f"sm_{arch}", **options, **used})
                    rows[-1]["free_shared_bytes"] = SHARED_BYTES[arch] - used["shared_bytes"]
                    report.print_line(" | ".join(["", *(str(value) for value in rows[-1].values()), ""]).strip())
    report.raw["kernels"] = rows
    products = [row for row in rows if row["kernel"] in (*HEAD, "attend_kernel")]
    report.bar("free_shared_bytes", min(row["free_shared_bytes"] for row in rows), at_least=0)
    report.bar("tensor_core_min", min(row["tensor_core"] for row in products), at_least=1)
    report.figure("spilled_bytes_max", max(row["spilled_bytes"] for row in rows))
    report.finish()


if __name__ == "__main__":
    main()
