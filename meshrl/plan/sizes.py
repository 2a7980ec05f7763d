"""The sizes of a run in rows, tokens and pages, by its config."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from meshrl.config.run import RunConfig, SftRunConfig

PAGE_TOKENS = {"cpu": 64}  # of a page of the embedded engine's KV cache: narrower ones make more and smaller products
DEVICE_PAGE_TOKENS = 128  # the kernels of a device read as many positions at a time


def page_tokens(device_type: str) -> int:
    return PAGE_TOKENS.get(device_type, DEVICE_PAGE_TOKENS)


def pages_with_memory(num_pages: int) -> int:
    """Pages for which memory is allocated when num_pages are needed: at most a quarter more, so that it grows a few
    times only."""
    step = 1 << max(0, (num_pages - 1).bit_length() - 3)
    return -(-num_pages // step) * step


def room_for(num_rows: int, length: int, width: int = DEVICE_PAGE_TOKENS) -> int:
    """Tokens for which the embedded engine's cache has memory when it holds num_rows rows of this length, in pages of
    this width."""
    return pages_with_memory(num_rows * -(-length // width)) * width


def merged(sizes: Sequence[int], limit: int) -> list[range]:
    """Neighbours that together have at most this size, by their indices; a larger one is alone."""
    groups, total = list[range](), 0
    for i, size in enumerate(sizes):
        total += size
        if groups and total <= limit:
            groups[-1] = range(groups[-1].start, i + 1)
        else:
            groups.append(range(i, i + 1))
            total = size
    return groups


def micro_batches(config: RunConfig | SftRunConfig, num_ranks: int) -> tuple[int | None, int | None]:
    """(tokens of a micro-batch, of the ranks of ulysses together; micro-batches of an optimizer step on each rank, at
    most), None where they follow from a model that is not known. num_ranks: that train."""
    longest, budget = config.longest_row_tokens, config.train.max_tokens_per_microbatch
    if budget is None:
        return None, None
    tokens, rows = budget * config.train.mesh.ulysses, rows_of_a_rank(config, num_ranks)
    return tokens, None if longest is None else ceil(rows / max(1, tokens // longest))


def rows_of_a_rank(config: RunConfig | SftRunConfig, num_ranks: int) -> int:
    """In an optimizer step, at most."""
    return ceil(config.rows_per_update / prod(config.train.mesh_shape(num_ranks)[:2]))


def micro_batch_tokens(config: RunConfig | SftRunConfig, num_ranks: int) -> tuple[int, int, bool]:
    """(tokens of the largest micro-batch on a rank; of its longest row; whether an optimizer step has only one)."""
    longest, (budget, number) = config.longest_row_tokens or 0, micro_batches(config, num_ranks)
    of_a_step = longest * rows_of_a_rank(config, num_ranks) or 1 << 62
    tokens = ceil(min(max(budget or 0, longest), of_a_step) / config.train.mesh.ulysses)
    return tokens, min(tokens, longest or tokens), number == 1
