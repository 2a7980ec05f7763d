"""`meshrl model-check`: what is proven of a model, what is not, and what to do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.utils import logging

from meshrl.core.errors import ConfigError
from meshrl.process.connect import LOOPBACK, interface_of
from meshrl.tools.model_check.chat_template import template_lines
from meshrl.tools.model_check.checks import findings
from meshrl.tools.model_check.small_model import write_first_layers

GUIDE = "docs/add_a_model.md states what to do about it"
RANKS_TIMEOUT_S = 300.0


def check_model(model: str, show: Callable[[str], None]) -> bool:
    """Show the result of each check; whether all are proven. model: a model's folder, or a hub id."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        show(write_first_layers(model, Path(name)))
        all_proven = True
        try:
            for check, finding in findings(Path(name), on_ranks):
                show(f"{'proven' if finding.proven else 'NOT PROVEN':11} {check}: {finding}")
                all_proven &= finding.proven
        except ConfigError as cause:
            raise ConfigError(f"{str(cause).replace(name, model)}; {GUIDE}") from cause
    for line in template_lines(model):
        show(line)
    show("nothing has to be written: this model trains and samples" if all_proven else GUIDE)
    return all_proven


def on_ranks(function: Callable[..., float], world: int, *args: Any) -> list[float]:
    """The results of function(rank, world, *args) in processes that form a gloo process group."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, mp_context=get_context("spawn")) as ranks:
        calls = [ranks.submit(_in_group, f"{folder}/store", function, rank, world, *args) for rank in range(world)]
        return [call.result() for call in calls]


def _in_group(store: str, function: Callable[..., float], rank: int, world: int, *args: Any) -> float:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(LOOPBACK) or "lo")
    timeout = timedelta(seconds=RANKS_TIMEOUT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    try:
        return function(rank, world, *args)
    finally:
        dist.destroy_process_group()
