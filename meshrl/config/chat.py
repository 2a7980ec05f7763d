"""The settings of `meshrl chat`, which has no config file: words such as temperature=0 on its command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, ValidationError

from meshrl.config.rollout import SamplingConfig
from meshrl.config.values import scalar
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import did_you_mean

_SETTING = re.compile(r"[a-z_]+=\S*")


class ChatSettings(SamplingConfig):
    """Sampling as in rollout.sampling, with other defaults, and the seed and the dtype in which the model computes."""

    temperature: float = Field(0.7, ge=0)
    max_new_tokens: int = Field(512, ge=1)
    seed: int = 0
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


def chat_settings(words: Sequence[str]) -> tuple[ChatSettings, str | None]:
    """The settings in these words, and the one that is no setting: a question.

    Raises: ConfigError for a setting that is unknown or wrong, and for several questions.
    """
    pairs = [word.partition("=") for word in words if _SETTING.fullmatch(word)]
    questions = [word for word in words if not _SETTING.fullmatch(word)]
    names = [name for name in ChatSettings.model_fields if not name.startswith("stop")]  # those are lists
    for name, _, _ in pairs:
        if name not in names:
            text = f"{name} is no setting of a chat; there are {', '.join(names)}{did_you_mean(name, names)}"
            raise ConfigError(text)
    if len(questions) > 1:
        raise ConfigError(f"{len(questions)} questions are given ({questions!r:.200}); put one question in quotes")
    try:
        settings = ChatSettings.model_validate({name: scalar(text) for name, _, text in pairs}, strict=True)
    except ValidationError as cause:
        first = cause.errors(include_url=False)[0]
        raise ConfigError(f"{first['loc'][0]}={first['input']!r:.80}: {first['msg']}") from cause
    return settings, questions[0] if questions else None
