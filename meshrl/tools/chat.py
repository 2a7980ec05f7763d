"""`meshrl chat`: talk to a model in the terminal, through the embedded engine and the model's chat template."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from meshrl.config.chat import ChatSettings, chat_settings
from meshrl.config.data import MEDIA_CACHE_BYTES
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import EmbeddedConfig, RolloutConfig
from meshrl.core.device import local_device
from meshrl.core.errors import ConfigError, DataError, RequestError
from meshrl.core.terminal import print_message, print_output
from meshrl.core.types import Request, SamplingParams, turn_seed
from meshrl.data.chat import Message, image_literal, load_tokenizer, render, stop_token_ids
from meshrl.data.decode import answer_text
from meshrl.data.images import image_of
from meshrl.data.media import find_spans
from meshrl.data.processor import load_vision
from meshrl.rollout.embedded.engine import EmbeddedEngine, build_embedded_engine
from meshrl.rollout.server.http import HttpClient, authorization
from meshrl.run.folder import config_of
from meshrl.run.subject import find_subject
from meshrl.tools.convert import convert

KEY_VARIABLE = "MESHRL_SERVE_KEY"
_NOT_SAMPLING = {"seed", "dtype", "max_new_tokens", "stop", "stop_token_ids"}
HELP = "/reset forgets the conversation; Ctrl-C stops an answer; /exit or Ctrl-D ends the chat"


def chat(
    models: Sequence[str], words: Sequence[str], system: str | None, images: Sequence[str] = (), url: str | None = None
) -> None:
    """Answer one question, or those that are typed until the end of the input, with each of these models.

    models: model folders, hub ids, or folders of runs, as find_subject. words: settings, such as temperature=0, and at
    most one question. system: the text of a system message. images: files that the first question is about. url: of a
    server, in place of models.
    """
    settings, question = chat_settings(words)
    with contextlib.ExitStack() as stack:
        chats: list[Chat | RemoteChat] = []
        if url is not None:
            if images:
                raise ConfigError("--image does not fit --url: a server takes text only. Remove one of them")
            chats.append(RemoteChat(url, system, settings))
        for name in models:
            chats.append(Chat(load_subject(name, settings, stack), name, system, images))
        if question is not None:
            _answer(chats, question)
            return
        print_message(HELP)
        while (question := _typed()) not in (None, "/exit", "/quit"):
            if question == "/reset":
                for each in chats:
                    each.reset()
                print_message("The conversation is forgotten.")
            elif question.startswith("/"):
                print_message(f"{question!r:.80} is not a command. {HELP}")
            elif question:
                try:
                    _answer(chats, question)
                except (RequestError, DataError) as error:  # the next question may be shorter
                    hint = ". After /reset there is more room" if isinstance(error, RequestError) else ""
                    print_message(f"meshrl: {error}{hint}")


class LoadedModel:
    """A model to talk to: its tokenizer and how it is sampled. path: its folder, or a hub id."""

    def __init__(self, path: str, settings: ChatSettings):
        self.path, self.settings, self.tokenizer = path, settings, load_tokenizer(path)
        stops = stop_token_ids(self.tokenizer, path)
        self.sampling = SamplingParams(**settings.model_dump(exclude=_NOT_SAMPLING), stop_token_ids=stops)

    def engine(self) -> EmbeddedEngine:
        cfg = ModelConfig(path=self.path, dtype=self.settings.dtype)
        rollout = RolloutConfig(embedded=EmbeddedConfig(prefix_cache=True))
        engine = build_embedded_engine(cfg, rollout, local_device(0), "chat", self.sampling.stop_token_ids)
        engine.trust_loaded_weights()
        return engine


def load_subject(name: str, settings: ChatSettings, stack: contextlib.ExitStack) -> LoadedModel:
    """The model that find_subject names. stack: removes the model that is made of a checkpoint without one."""
    subject = find_subject(name)
    model = str(subject.model)
    if subject.state is not None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshrl-chat-"))
        model = f"{folder}/model"
        convert(subject.state, Path(model))
    print_message(f"loading {subject.text}")
    if (kind := config_of(subject.run).get("agent", {}).get("kind", "single_turn")) not in ("single_turn", "endpoint"):
        print_message(f"trained with agent.kind {kind}, but a chat uses no agent, and so none of its tools")
    return LoadedModel(model, settings)


class Chat:
    """A conversation with one model. Its first question begins with the images."""

    def __init__(self, model: LoadedModel, name: str, system: str | None, images: Sequence[str] = ()):
        self.name, self._model, self._tokenizer = name, model, model.tokenizer
        self._vision = vision = load_vision(model.path, self._tokenizer, MEDIA_CACHE_BYTES)
        if images and vision is None:
            raise ConfigError(
                f"{name} reads text only: its config.json has no vision_config. Remove --image, or give a "
                "vision-language model"
            )
        read = [vision.media(image_of(path, "")) for path in images if vision]
        self._media = {f"image-{i}": media for i, media in enumerate(read)}
        self._engine = model.engine()
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turn = 0
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = list(self._start)
        self._asked_about = [{"type": "image", "image": name} for name in self._media]

    def answer(self, question: str) -> Iterator[str]:
        """The answer so far, after each of its tokens. What was sampled before an interruption is part of the
        conversation."""
        self._turn += 1
        if literal := image_literal(self._tokenizer, question):
            raise DataError(f"the question has {literal!r}, which stands for an image of the model; use --image FILE")
        content = [*self._asked_about, {"type": "text", "text": question}] if self._asked_about else question
        messages = [*self.messages, {"role": "user", "content": content}]
        ids = render(self._tokenizer, messages, media=self._media)
        request = Request(
            id=str(self._turn),
            context_ids=ids,
            media=self._media,
            media_spans=find_spans(ids, self._media, self._vision.placeholder) if self._vision else [],
            sampling=self._model.sampling,
            max_new_tokens=self._model.settings.max_new_tokens,
            seed=turn_seed(self._model.settings.seed, 0, 0, len(messages)),
        )
        self._engine.submit(request)
        self._asked_about = []
        text, reason = "", None
        try:
            while reason is None:
                done = self._engine.step()
                output = done[0][1].output_ids if done else self._engine.output_so_far(request.id)
                now = answer_text(self._tokenizer, np.array(output, np.int32), self._model.sampling.stop_token_ids)
                if done or not now.endswith("\ufffd"):  # the bytes of a character may be in several tokens
                    text = now
                    yield text
                reason = done[0][1].stop_reason if done else None
            if reason != "stop":
                yield f"{text} [cut at {reason} after {len(output)} tokens]"
        finally:
            asyncio.run(self._engine.abort())
            self.messages = [*messages, {"role": "assistant", "content": text}]


class RemoteChat:
    """A conversation with a model behind a server of Chat Completions, such as that of `meshrl serve`."""

    def __init__(self, url: str, system: str | None, settings: ChatSettings):
        self.name = url
        self._url = url.rstrip("/").removesuffix("/v1")
        self._settings = settings.model_dump(include=settings.model_fields_set - {"dtype", "max_new_tokens"})
        if "max_new_tokens" in settings.model_fields_set:
            self._settings["max_tokens"] = settings.max_new_tokens
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = list(self._start)

    def answer(self, question: str) -> Iterator[str]:
        """The answer so far, after each part of it."""
        self.messages.append({"role": "user", "content": question})
        text, headers = "", authorization(KEY_VARIABLE if KEY_VARIABLE in os.environ else None)
        with asyncio.Runner() as runner:
            client = HttpClient(self.name, self._url, headers=headers)
            body = {"model": "", "messages": self.messages, "stream": True, **self._settings}
            events = client.stream("/v1/chat/completions", body)
            try:
                while (event := runner.run(anext(events, None))) is not None:
                    for choice in event.get("choices", ()):
                        text += choice["delta"].get("content") or ""
                        yield text
            finally:
                runner.run(events.aclose())
                runner.run(client.close())
                self.messages.append({"role": "assistant", "content": text})


def _typed() -> str | None:
    """A line of the user; None at the end of the input. Ctrl-C in a terminal leaves an empty line: it may have been for
    an answer that has just ended."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt) as end:
        print_message("")
        return "" if isinstance(end, KeyboardInterrupt) and sys.stdin.isatty() else None


def _answer(chats: Sequence[Chat | RemoteChat], question: str) -> None:
    """Print the answers as they are sampled: those of several models in turn."""
    try:
        for each in chats:
            if len(chats) > 1:
                print_output(f"== {each.name}")
            shown = 0
            for text in each.answer(question):
                print_output(text[shown:], end="")
                shown = len(text)
            print_output("")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print_message("\n[stopped]")
