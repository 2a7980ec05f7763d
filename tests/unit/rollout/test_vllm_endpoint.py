"""A real vLLM server as an endpoint, which only samples. /v1/completions needs the tokenizer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from sglang_servers import save_with_tokenizer
from tiny_engines import ask, check_samples_from
from vllm_servers import MAX_CONTEXT_TOKENS, MISSING, serving, tiny_vllm_lm

from meshrl.config.rollout import EndpointConfig
from meshrl.rollout.completions import CompletionsDialect
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.vllm.dialect import http_of

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(400)]

CONTEXT = list(range(10, 40))


@pytest.mark.slow
async def test_a_vllm_server_is_an_endpoint(tmp_path):
    """Its logprobs are the model's, and a request that was aborted can be continued."""
    lm = tiny_vllm_lm()
    folder = save_with_tokenizer(lm, tmp_path / "model")
    with serving(lm, folder, "--no-skip-tokenizer-init") as server:
        http = http_of(server)
        (served,) = (await http.get("/v1/models"))["data"]
        dialect = CompletionsDialect(http, EndpointConfig(), served["id"], folder, 4)
        facts = {"stop_token_ids": (2,), "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": 64}
        engine = ServerEngine(dialect, **facts)
        engine.trust_loaded_weights()
        await check_samples_from(engine, lm, CONTEXT, "a")
        same = {"max_new_tokens": 800, "ignore_eos": True}
        task = asyncio.create_task(engine.generate(ask("b", CONTEXT, **same)))
        while engine.stats().decode_tokens < 16 + 5:
            await asyncio.sleep(0.001)
        assert await engine.abort(["b"]) == 1
        part = await task
        assert part.stop_reason == "abort" and 0 < len(part.output_ids) < 800
        rest = await engine.generate(ask("c", CONTEXT, prefix_output=part.output_ids, **same))
        assert len(part.output_ids) + len(rest.output_ids) == 800 and rest.stop_reason == "length"
        await check_samples_from(engine, lm, [*CONTEXT, *np.concatenate([part.output_ids, rest.output_ids])], "d")
        await engine.close()
