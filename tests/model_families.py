"""The families of causal language models, one entry of data for each. tests/contract/test_model_families.py proves the
entries, and scripts/make_docs.py writes them into docs/models.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshrl.model import images


@dataclass(frozen=True, slots=True)
class Family:
    """config: fields of its config, in addition to COMMON. without: for each check that it does not pass, the reason.
    vllm: the reason why vLLM does not load its names; "" if it does. refused: the reason why meshrl does not load it,
    a part of the error."""

    config: dict[str, Any]
    without: dict[str, str] = field(default_factory=dict)
    vllm: str = ""
    refused: str = ""


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HERE = Path(__file__).parent
_ENTRIES = yaml.safe_load((_HERE / "model_families.yaml").read_text(encoding="utf-8"))["families"]
FAMILIES = {name: Family(**entry) for name, entry in _ENTRIES.items()}


# one of each mechanism; the other families are slow tests
SAMPLE = ("gemma2", "gpt2", "deepseek_v3", "diffllama", "lfm2", "mamba2", "bart")

PAGE = (_HERE / "models_page.md").read_text(encoding="utf-8")
COLUMNS = {  # check -> its column; logprobs and gradients are proven of each model that is loaded
    "logprobs": "logprobs",
    "gradients": "gradients",
    "packed": "packed",
    "shared prompts": "shared prompts",
    "two FSDP2 ranks": "FSDP2",
    "embedded sampling": "sampling",
    "export": "export",
    "LoRA": "LoRA",
    "file names": "names",
}


def config_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family].config, **changes})


def page() -> str:
    """docs/models.md."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    proven, refused, notes = [], [], list[str]()
    for family, entry in sorted(FAMILIES.items(), key=lambda item: NAMES[item[0]].lower()):
        begin = f"| {NAMES[family]} | {family} |"
        if entry.refused:
            refused.append(f"{begin} {entry.refused} |")
            continue
        reasons = {**entry.without, "vLLM": entry.vllm} if entry.vllm else entry.without
        notes += [f"{NAMES[family]}, {column}: {reason}." for column, reason in reasons.items()]
        cells = ["no" if column in reasons else "yes" for column in (*COLUMNS, "vLLM")]
        proven.append(f"{begin} {' | '.join(cells)} |")
    return PAGE.format(
        proven=len(proven),
        columns=" | ".join(COLUMNS.values()),
        rule=" | ".join(["---"] * len(COLUMNS)),
        rows="\n".join(proven),
        notes="\n".join(f"- {note}" for note in notes),
        refused="\n".join(refused),
        with_images=len(images.FAMILIES),
        image_rows="\n".join(_image_row(family) for family in sorted(images.FAMILIES)),
    )


def _image_row(family: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    facts = images.FAMILIES[family]
    seen = {"": "see those before them", "image": "see each other", "window": "see each other in windows"}[facts.mutual]
    return f"| {NAMES[family]} | {family} | {seen}{', by place in the image' if facts.has_grid else ''} |"
