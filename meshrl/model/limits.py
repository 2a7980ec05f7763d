"""A model's vocabulary size and context length, for a sampler in another process."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from meshrl.core.errors import ConfigError


def limits_of(path: str, asked: int | None) -> tuple[int, int]:
    """(max_context_tokens, vocab_size). asked: rollout.max_context_tokens; None = the model's own limit.

    Raises: ConfigError when `asked` exceeds the model's positions, or neither number is given.
    """
    config = text_config(path)
    positions = getattr(config, "max_position_embeddings", None)
    tokens = asked or positions
    if tokens is None or (positions is not None and tokens > positions):
        raise ConfigError(
            f"rollout.max_context_tokens is {'null' if asked is None else asked}; {path} has "
            f"{'no max_position_embeddings' if positions is None else f'max_position_embeddings {positions}'}. Set the "
            "key to a number, at most that of the model; null works only if the model has one"
        )
    return tokens, config.vocab_size


def vocab_size_of(path: str) -> int:
    """The number of ids that the model can read: rows of its embedding. Raises: ConfigError."""
    return text_config(path).vocab_size


def text_config(path: str) -> Any:
    """Transformers' config of the language model. Raises: ConfigError."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except Exception as cause:  # on damaged files it may raise anything
        raise ConfigError(
            f"model.path {path!r}: Transformers can't read its config.json: {type(cause).__name__}: {cause!s:.1000}. "
            "Give a folder made by save_pretrained"
        ) from cause
