"""How far an exported model is from the run's, both read by Transformers and scoring the same tokens; the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from meshrl.config.source import HUB_ID
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.types import Sample
from meshrl.model.facts import as_config_error

TOKENS_OF_ROW = 64  # that are scored, at most


class Difference(NamedTuple):
    """kl_mean, kl_max: of a token, in nats. agreement: share of the num_tokens tokens for which both have the same most
    likely one. tensor, share: the tensor with the largest difference, and its norm as a share of the tensor's."""

    kl_mean: float
    kl_max: float
    agreement: float
    num_tokens: int
    tensor: str
    share: float


def read_policy(folder: str | Path, adapter: Path | None = None) -> Any:
    """The model of a folder in float32 on the CPU, as Transformers builds it; adapter: a folder of peft, whose change
    is merged in float32."""
    from transformers import AutoModelForCausalLM

    with as_config_error(folder, OSError):
        lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        if adapter is not None:
            from peft import PeftModel

            lm = PeftModel.from_pretrained(lm, str(adapter)).merge_and_unload()
    return lm.eval()


def _scored(row: Sample) -> np.ndarray:
    """The indices of the first sampled tokens, int64[N]."""
    return np.flatnonzero(row.mask)[:TOKENS_OF_ROW]


@torch.no_grad()
def token_logprobs(lm: Any, rows: Sequence[Sample]) -> torch.Tensor:
    """Log-probabilities of every word at the `_scored` tokens of the rows, at each row's temperature, float32[N, V]."""
    found = []
    for row in rows:
        at = torch.from_numpy(_scored(row)) - 1
        ids = torch.tensor(row.tokens[None, : at[-1] + 1]).long()
        logits = lm(input_ids=ids, logits_to_keep=at).logits[0]
        logits = logits if len(logits) == len(at) else logits[at]  # some classes ignore logits_to_keep
        found.append((logits.float() / row.temperature).log_softmax(-1))
    return torch.cat(found)


def recorded_difference(lm: Any, rows: Sequence[Sample]) -> float:
    """Mean distance of the logprobs of the sampled tokens from those that the run recorded."""
    ids, recorded = (
        torch.cat([torch.tensor(getattr(row, name)[_scored(row)]) for row in rows])
        for name in ("tokens", "rollout_logprobs")
    )
    own = token_logprobs(lm, rows).gather(1, ids.long()[:, None])[:, 0]
    return float((own - recorded).abs().mean())


@torch.no_grad()
def difference(own: Any, other: Any, rows: Sequence[Sample]) -> Difference:
    """own: the run's model. other: the exported one."""
    a, b = token_logprobs(own, rows), token_logprobs(other, rows)
    kl, theirs = (a.exp() * (a - b)).sum(-1), other.state_dict()
    shares = {n: float((t - theirs[n]).norm() / t.norm().clamp_min(1e-9)) for n, t in own.state_dict().items()}
    tensor, same = max(shares, key=shares.__getitem__), (a.argmax(-1) == b.argmax(-1)).float()
    return Difference(float(kl.mean()), float(kl.max()), float(same.mean()), len(kl), tensor, shares[tensor])


def require_token(name: str) -> None:
    """Raises: ConfigError for a name that is none of a repository, and if this machine has no token of the hub."""
    from huggingface_hub import get_token

    if not HUB_ID.fullmatch(name):
        raise ConfigError(f"--push {name}: a repository of the hub is written organisation/name, or user/name")
    if get_token() is None:
        raise ConfigError(f"--push {name} needs a token that may write there; set HF_TOKEN, or run: hf auth login")


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder to a repository of the hub, which is created as a private one if there is none. Returns its
    address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="meshrl export"))
    except (HTTPError, OSError) as cause:
        raise MeshrlError(
            f"{folder} is complete, but was not pushed to {name}: {cause!s:.300}. Push it by: hf upload {name} {folder}"
        ) from cause
