"""`meshrl serve`: a model behind the routes of the endpoint, sampled by the embedded engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

import numpy as np

from meshrl.agent.endpoint.conversation import Ask, Conversation, ModelReply
from meshrl.agent.endpoint.server import Endpoint
from meshrl.agent.loop import AgentContext, start_trajectory
from meshrl.agent.parsing import parse
from meshrl.config.chat import chat_settings
from meshrl.core.errors import ConfigError
from meshrl.core.terminal import print_message
from meshrl.core.types import Prompt
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.tools.chat import KEY_VARIABLE, LoadedModel, load_subject

_POLL_S = 0.01
_MARKER_CHARS = 16  # of a text's end that may be the beginning of a marker such as <think>


class ServedModel:
    """Answers of a model, with the sampling that each client asks for; the settings are the defaults."""

    def __init__(self, model: LoadedModel, engine: EmbeddedEngine):
        self._model, self._engine = model, engine
        self._numbers = itertools.count()
        is_set = "max_new_tokens" in model.settings.model_fields_set
        self._max_tokens = model.settings.max_new_tokens if is_set else engine.max_context_tokens

    async def parts(self, ask: Ask, digest: bytes) -> AsyncIterator[str | ModelReply]:
        model, settings = self._model, self._model.settings
        seed = ask.sampling.get("seed", settings.seed)
        ctx = AgentContext(
            tokenizer=model.tokenizer,
            sampling=model.sampling,
            max_new_tokens=self._max_tokens if ask.max_tokens is None else ask.max_tokens,
            max_context_tokens=self._engine.max_context_tokens,
            run_seed=int(seed),
            group_id=f"served-{next(self._numbers)}",
        )
        prompt = Prompt(id=ctx.group_id, ordinal=0, messages=ask.messages)
        trajectory = start_trajectory(prompt, 0, ctx)
        conversation = Conversation(trajectory, self._engine.generate, ctx, print_message, own_sampling=True)
        answer = asyncio.create_task(conversation.reply(ask, digest))
        try:
            sent = ""
            while ask.stream and not ask.tools and not answer.done():
                await asyncio.wait({answer}, timeout=_POLL_S)
                text = self._complete_text(f"{trajectory.id}/0")
                if not answer.done() and len(text) > len(sent) and text.startswith(sent):
                    yield text[len(sent) :]
                    sent = text
            yield await answer
        finally:
            answer.cancel()
            await conversation.close()

    def _complete_text(self, request_id: str) -> str:
        """The text of a running request without its end, which later tokens may turn into a marker or a character."""
        ids = np.array(self._engine.output_so_far(request_id), np.int32)
        if not len(ids):
            return ""
        text = parse(self._model.tokenizer, ids, stop_ids=self._model.sampling.stop_token_ids).content
        marker = text.find("<", max(0, len(text) - _MARKER_CHARS))
        return (text if marker < 0 else text[:marker]).rstrip("\ufffd")


def serve(name: str, words: Sequence[str], host: str, port: int) -> None:
    """Serve a model until Ctrl-C or SIGTERM. name: as for `meshrl chat`. words: settings such as
    temperature=0, which clients may change in each request."""
    settings, question = chat_settings(words)
    if question is not None:
        raise ConfigError(f"{question!r:.80} is no setting; write temperature=0.7. A question is for `meshrl chat`")
    with ExitStack() as stack:
        model = load_subject(name, settings, stack)
        asyncio.run(_serve(model, name, host, port))


async def _serve(model: LoadedModel, name: str, host: str, port: int) -> None:
    key = os.environ.get(KEY_VARIABLE) or secrets.token_hex(16)
    engine = model.engine()
    served = ServedModel(model, engine)

    def find(given: str) -> ServedModel | None:
        return served if secrets.compare_digest(given.encode(), key.encode()) else None

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    endpoint = Endpoint(find, name, engine.max_context_tokens, print_message)
    async with endpoint.opened(host, port) as url:
        print_message(f"serving {name} at {url}/v1; Ctrl-C ends it")
        if KEY_VARIABLE not in os.environ:
            print_message(f"its key, which {KEY_VARIABLE} would set: {key}")
        print_message(f"try: {KEY_VARIABLE}={key} meshrl chat --url {url} 'hello'")
        await ended.wait()
        await engine.abort()
