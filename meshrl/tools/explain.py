"""`--explain` of `meshrl train` and `meshrl sft`: what a config means, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from meshrl.config.load import Loaded
from meshrl.config.model import missing_files
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.errors import DataError, MeshrlError
from meshrl.core.terminal import print_output
from meshrl.data.check import count_rows
from meshrl.plan.explain import explain, memory_lines


def explain_config(loaded: Loaded[RunConfig] | Loaded[SftRunConfig]) -> None:
    """Print the sizes of a step, each value with its origin, the memory of a rank, and the first prompt."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched, and no hub is waited for
    config, run_plan = loaded.config, None
    with suppress(ImportError):  # the lines of the memory give the reason
        from meshrl.cluster.launch import plan_of

        run_plan = plan_of(config)
    print_output(explain(loaded, count_rows(config), run_plan), end="")
    print_output(f"\n{_if_here('memory', partial(_memory, config))}")
    if not isinstance(loaded.config, SftRunConfig):
        data, model = loaded.config.data, Path(loaded.config.model.path)
        paths = [model, data.path, data.eval_path, *(s.path for s in data.named().values())]
        complete = all(path is None or Path(path).exists() for path in paths) and not any(missing_files(model))
        print_output(_if_here("first prompt", partial(_first_prompt, loaded.config), complete))


def _if_here(what: str, text: Callable[[], str], complete: bool = False) -> str:
    """A text for which files of the model or of the data are read, or why there is none: a config is explained, too,
    where they are missing. complete: whether all are here; then what is wrong with them is an error."""
    try:
        return text()
    except (MeshrlError, ImportError) as error:
        if complete and isinstance(error, DataError):
            raise
        return f"# {what}: can't be shown from what is on this machine: {error}".replace("\n", "\n# ")


def _memory(config: RunConfig | SftRunConfig) -> str:
    from meshrl.core.device import device_type
    from meshrl.model.costs import run_memory

    on_cpu = config.cluster.executor != "ray" and device_type() == "cpu"
    return memory_lines(*run_memory(config, "cpu" if on_cpu else None))


def _first_prompt(config: RunConfig) -> str:
    from meshrl.run.inputs import Objects
    from meshrl.run.task import first_prompt, load_task

    text = first_prompt(load_task(config, Objects(), training=True))
    return f"# first prompt: {text or f'rendered by the agent {config.agent.kind}'}"
