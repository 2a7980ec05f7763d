"""What a run needs to know of a model before it is loaded, from its config: the context length, the vocabulary size,
whether it has experts, and the tokens of a micro-batch; and facts about families that neither Transformers' class nor
the config states in a form that code can read, with the packages that add families."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from math import prod
from typing import Any

from transformers import AutoConfig

from meshrl.config.model import ModelConfig, num_positions
from meshrl.config.train import MOST_TOKENS, TrainConfig
from meshrl.core.errors import ConfigError
from meshrl.data.files import require_reachable

ACTIVATION_BYTES = 4 << 30  # of a micro-batch
FEWEST_TOKENS = 1024


def limits_of(path: str, asked: int | None) -> tuple[int, int]:
    """(max_context_tokens, vocab_size). asked: rollout.max_context_tokens; None = the model's own limit."""
    config = text_config(path)
    positions = num_positions(config.to_dict())
    tokens = asked or positions
    if tokens is None or (positions is not None and tokens > positions):
        raise ConfigError(
            f"rollout.max_context_tokens is {'null' if asked is None else asked}; {path} has "
            f"{'no max_position_embeddings' if positions is None else f'{positions} positions'}. Set the "
            "key to a number, at most that of the model; null works only if the model has one"
        )
    return tokens, config.vocab_size


def micro_batch_tokens(model: ModelConfig, train: TrainConfig) -> int:
    """The value of train.max_tokens_per_microbatch when it is null: a power of two, and a function of the configs
    alone, so that a run's micro-batches are the same on every machine."""
    config = text_config(model.path)
    stored = config.hidden_size if train.activation_checkpointing else stored_numbers(config, train.torch_compile)
    num_bytes = stored * config.num_hidden_layers * (4 if model.dtype == "float32" else 2)
    fitting = 1 << (ACTIVATION_BYTES // num_bytes).bit_length() - 1
    return min(MOST_TOKENS, max(FEWEST_TOKENS, fitting))


def stored_numbers(config: Any, compiled: bool = False) -> int:
    """About how many numbers a decoder block stores of each token for its backward pass: what its norms, products and
    attention read again. torch.compile computes some of them again. With activation checkpointing it stores its input
    alone."""
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return 7 * hidden + 3 * inner if compiled else 10 * hidden + 4 * inner


def has_experts(path: str) -> bool:
    """Whether layers of the model have experts, of which a router chooses."""
    counts = [count for name, count in text_config(path).to_dict().items() if name.endswith("experts")]
    return any(isinstance(count, int) and count > 1 for count in counts)


def note_on_balance_loss(model: ModelConfig, train: TrainConfig) -> str | None:
    """Of a model whose config.json has a load-balance loss that is not used."""
    coef = getattr(text_config(model.path), "router_aux_loss_coef", None)
    if not coef or train.router_aux_loss_coef > 0:
        return None
    return (
        f"the model's config.json has router_aux_loss_coef {coef}, which is not used: train.router_aux_loss_coef is 0, "
        "so no loss balances the experts' loads"
    )


def text_config(path: str) -> Any:
    """Transformers' config of the language model."""
    require_reachable(path)
    import_plugins()
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except Exception as cause:  # on damaged files it may raise anything
        raise ConfigError(
            f"model.path {path!r}: Transformers can't read its config.json: {type(cause).__name__}: {cause!s:.1000}. "
            "Give a folder made by save_pretrained"
        ) from cause


PLUGINS = "meshrl.models"  # the group of the entry points of packages that add families

HEAD_SCALES: dict[str, Callable[[float], float]] = {  # a key of configs -> from its value to the factor of the logits
    "logit_scale": float,  # Cohere
    "logits_scaling": lambda value: 1.0 / value,  # Granite
}

# Model types of mixtures whose routers' output is not (logits, scores, selected experts), or its reverse: DBRX returns
# logits alone, and Gemma 4 probabilities in their place.
OTHER_ROUTERS = ("dbrx", "gemma4_text")


def head_scale(config: Any) -> float:
    """The factor of the logits. A key that a config does not have, or whose value is None or 0, has no effect."""
    return prod(scale(value) for key, scale in HEAD_SCALES.items() if (value := getattr(config, key, None)))


@cache
def import_plugins() -> None:
    """Import the installed packages that add families; before a config is read."""
    for plugin in entry_points(group=PLUGINS):
        plugin.load()
