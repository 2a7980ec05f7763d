"""The forward of a decode step is one graph, as a CUDA graph needs it: torch.compile takes it without a break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engines import ask, run, tiny_engine
from tiny_models import tiny_lm

from meshrl.rollout.embedded.cached_attention import DecodeAttention


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # of constants on a device
def test_the_forward_of_a_decode_step_is_one_graph_that_later_steps_use_again() -> None:
    """All sizes in it are constants, and no tile is allocated in it. After a warm-up no step makes a graph, whatever
    its rows, their lengths and their order. The tokens are those of an engine without graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        assert all(type(size) is int for x in inputs if isinstance(x, torch.Tensor) for size in x.shape)
        graphs.append(graph)
        return graph.forward

    model = tiny_lm("qwen2", num_hidden_layers=1)
    lengths = [(31, 12), (125, 8)]
    requests = [
        ask(str(i), [3 + j % 60 for j in range(length)], seed=i, max_new_tokens=tokens)
        for i, (length, tokens) in enumerate(lengths)
    ]
    engine = tiny_engine(model)
    plain = engine._runner._hidden
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, backend=backend)
    num_steps = 0

    def hidden(tokens: torch.Tensor, positions: torch.Tensor, context: Any) -> torch.Tensor:
        nonlocal num_steps
        if not isinstance(context, DecodeAttention):
            return plain(tokens, positions, context)
        num_steps += 1
        result: torch.Tensor = compiled(tokens, positions, context)
        return result

    engine._runner._hidden = hidden
    torch._dynamo.reset()
    expected = run(tiny_engine(model), requests)
    counts = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(3):
            turns = run(engine, requests)
            assert all(turns[name].output_ids.tolist() == turn.output_ids.tolist() for name, turn in expected.items())
            counts.append(len(graphs))
    assert counts[2] == counts[1] < num_steps / 2
