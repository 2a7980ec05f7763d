"""vLLM's own loader takes the names under which the weights of each family are sent, and they fill its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, SAMPLE, config_of
from tiny_engines import layout_of
from vllm_servers import MISSING

from meshrl.model.facts import model_facts
from meshrl.rollout.server.name_map import trace_loader
from meshrl.tools.model_check.small_model import write_random_model

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(120)]
LOADED = [family for family, entry in FAMILIES.items() if not entry.refused]


def _vllm_config(folder: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
    )
    return args.create_engine_config()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups of one rank, which models are built with; a mixture needs one more."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    folder = tmp_path_factory.mktemp("vllm")
    write_random_model(config_of("mixtral"), folder)
    with set_current_vllm_config(_vllm_config(folder)):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in LOADED])
def test_vllm_loads_the_names_of_a_family_or_does_not_as_its_entry_states(family: str, groups: None, tmp_path: Path):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    from meshrl.rollout.vllm.worker import _make_placeholder

    write_random_model(config_of(family), tmp_path)
    layout = layout_of(model_facts(tmp_path).lm)
    try:
        config = _vllm_config(tmp_path)
        with set_current_vllm_config(config):
            model = initialize_model(config)
    # vLLM can't build it from this config, or not on a CPU, where a package for GPUs is missing.
    except (AttributeError, ImportError, NotImplementedError, ValueError) as cause:
        assert FAMILIES[family].vllm, cause
        return
    with set_current_vllm_config(config):
        name_map = trace_loader(model, layout, _make_placeholder)
    ignored = layout.by_name.keys() - name_map.patches.keys() - name_map.refused.keys() - {*name_map.hidden}
    problems = [name_map.refused, name_map.hidden, name_map.unfilled, ignored]
    assert any(problems) == bool(FAMILIES[family].vllm), problems
