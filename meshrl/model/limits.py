"""How many tokens a model knows, and how many it can look back on: what a sampler in another process has to be told."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from meshrl.core.errors import ConfigError


def limits_of(path: str, asked: int | None) -> tuple[int, int]:
    """(max_context_tokens, vocab_size). asked: rollout.max_context_tokens; None takes the model's own.

    Raises: ConfigError when it is more than the model has positions, or neither says.
    """
    config = _text_config(path)
    positions = getattr(config, "max_position_embeddings", None)
    tokens = asked or positions
    if tokens is None or (positions is not None and tokens > positions):
        raise ConfigError(
            f"rollout.max_context_tokens is {asked}; {path} has max_position_embeddings {positions}. Give a number up "
            "to that (null takes the model's own)"
        )
    return tokens, config.vocab_size


def vocab_size_of(path: str) -> int:
    """How many ids the model can read: rows of its embedding. Raises: ConfigError."""
    return _text_config(path).vocab_size


def _text_config(path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except Exception as cause:  # of damaged files it may raise anything
        raise ConfigError(
            f"model.path {path!r}: Transformers can't take its config.json: {type(cause).__name__}: {cause!s:.1000}. "
            "Give a folder made by save_pretrained"
        ) from cause
