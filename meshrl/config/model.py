from typing import Literal

from meshrl.config.base import Slice, field


class LoraConfig(Slice):
    enabled: bool = field(False, "train low-rank adapters instead of all weights; off: full training is the reference")


class ModelConfig(Slice):
    path: str = field(..., "folder (or hub id) with config.json, safetensors and tokenizer files")
    dtype: Literal["bfloat16", "float16", "float32"] = field(
        "bfloat16", "compute dtype of trainer and sampler; masters stay fp32 (train.master_dtype)"
    )
    attn_implementation: str = field(
        "auto", "auto | sdpa | eager | flash_attention_2: falls back by hardware, and says so"
    )
    lora: LoraConfig = field(LoraConfig(), "low-rank adapters")
    vision: Literal["shard", "replicate", "freeze"] = field("shard", "what happens to a vision tower, if there is one")
