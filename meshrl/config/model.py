from typing import Literal

from meshrl.config.base import Slice, field


class LoraConfig(Slice):
    enabled: bool = field(False, "train low-rank adapters instead of all weights")
    rank: int = field(16, "rows of A, columns of B: what an adapter can learn, and its size", ge=1)
    alpha: float = field(32.0, "an adapter's output is multiplied by alpha / rank; twice the rank is usual", gt=0)
    targets: list[str] = field(
        ["all-linear"],
        "last parts of the names of linear layers to adapt; all-linear, alone, is every one but the head",
    )

    @property
    def scale(self) -> float:
        """Of B A."""
        return self.alpha / self.rank


class ModelConfig(Slice):
    path: str = field(..., "folder with config.json, safetensors and tokenizer, or a hub id organisation/name")
    dtype: Literal["bfloat16", "float16", "float32"] = field(
        "bfloat16", "dtype in which trainer and sampler compute; parameters are stored as train.master_dtype says"
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = field(
        "auto", "one packed attention over torch's SDPA serves all four names; it picks its kernel by hardware"
    )
    lora: LoraConfig = field(LoraConfig(), "low-rank adapters")
    vision: Literal["shard", "replicate", "freeze"] = field(
        "shard", "what becomes of a vision tower: sharded, a copy in each rank, or not trained"
    )
