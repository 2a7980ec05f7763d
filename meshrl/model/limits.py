"""What a run needs to know of a model before it is loaded, from its config: the context length, the vocabulary size,
the numbers of a plan, and whether it has experts; and facts about families that neither Transformers' class nor
the config states in a form that code can read, with the packages that add families."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from math import prod
from typing import Any

from transformers import AutoConfig

from meshrl.config.model import ModelConfig, num_positions
from meshrl.config.train import TrainConfig
from meshrl.core.errors import ConfigError
from meshrl.data.files import require_reachable
from meshrl.plan.decisions import ModelNumbers


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


def model_numbers(path: str) -> ModelNumbers:
    """What plans read of the model's config.json."""
    config = text_config(path)
    return ModelNumbers(
        num_positions=num_positions(config.to_dict()),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None),
        num_layers=config.num_hidden_layers,
    )


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
    return full_config(path).get_text_config()


def full_config(path: str) -> Any:
    """Transformers' config of the model, also of its tower."""
    require_reachable(path)
    import_plugins()
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
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
