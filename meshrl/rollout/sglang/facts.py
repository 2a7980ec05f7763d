"""What a running SGLang server says of itself, and whether it will do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from meshrl.core.errors import ConfigError
from meshrl.rollout.sglang.workers import LOADER

OLDEST = (0, 5, 19)  # the first read that names the weights of each token (weight_versions)
_WITH_SESSIONS = (0, 5, 21)
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """Read once, when the engine is made. gib: memory of each part, as measured by the server, of all its ranks."""

    release: tuple[int, ...]
    tp_size: int
    lends_memory: bool
    deterministic: bool  # draws by seed and place, whatever else is in the batch
    weight_version: str  # the label of what was loaded from the folder
    gib: dict[str, float]

    @property
    def has_sessions(self) -> bool:
        return self.release >= _WITH_SESSIONS

    def num_bytes(self, parts: set[str]) -> int:
        return int(sum(self.gib[part] for part in parts) * _GIB)


def facts_of(info: dict[str, Any], model_info: dict[str, Any], engine_id: str, deterministic: bool) -> ServerFacts:
    """From /server_info and /model_info. Raises: ConfigError for a server that this engine can't work with."""
    release = tuple(int(part) for part in re.findall(r"\d+", str(info["version"]))[:3])
    if release < OLDEST:
        raise ConfigError(
            f"{engine_id} runs SGLang {info['version']}; this engine needs {'.'.join(map(str, OLDEST))} or later, "
            "which name the weights that made each token"
        )
    if LOADER not in (info.get("custom_weight_loader") or []):
        raise ConfigError(
            f"{engine_id} was started without --custom-weight-loader {LOADER}, through which weights reach it; it has "
            f"{info.get('custom_weight_loader')}. meshrl must be installed beside SGLang"
        )
    if bool(info.get("enable_deterministic_inference")) != deterministic:
        raise ConfigError(
            f"rollout.sglang.deterministic is {deterministic}, but {engine_id} was started "
            f"{'without' if deterministic else 'with'} --enable-deterministic-inference. Make them agree"
        )
    memory = (info.get("internal_states") or [{}])[0].get("memory_usage") or {}
    gib = {"weights": float(memory.get("weight", 0)), "kv_cache": float(memory.get("kvcache", 0))}
    tp_size = int(info["tp_size"])
    return ServerFacts(
        release=release,
        tp_size=tp_size,
        lends_memory=bool(info.get("enable_memory_saver")),
        deterministic=deterministic,
        weight_version=str(model_info["weight_version"]),
        gib={part: value * tp_size for part, value in gib.items()},
    )
