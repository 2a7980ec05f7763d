"""Folders of tiny vision-language models without weights: config, tokenizer with chat template, and image processor."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tiny_tokenizers import tiny_tokenizer

SIZE = {"height": 28, "width": 28}
TEXT = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = {**TOWER, "image_size": 28, "patch_size": 14}


@dataclass(frozen=True)
class VisionFolder:
    """written: what a chat template writes for an image. placeholder: the token that stands for a feature. tokens: all
    that the family's tokenizer has in addition. processor: arguments of the processor's class."""

    written: str
    placeholder: str
    image_processor: str
    sizes: dict[str, Any]
    vision: dict[str, Any]
    tokens: tuple[str, ...] = ()
    named: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)


QWEN = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
FOLDERS = {
    "qwen2_vl": VisionFolder(
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|image_pad|>",
        "Qwen2VLImageProcessorPil",
        QWEN,
        {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
        ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    ),
    "llava": VisionFolder(
        "<image>",
        "<image>",
        "LlavaImageProcessorPil",
        {"size": {"shortest_edge": 28}, "crop_size": SIZE},
        {"model_type": "clip_vision_model", **SQUARE},
        processor=LLAVA,
    ),
    "llava_next": VisionFolder(
        "<image>",
        "<image>",
        "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 28}, "crop_size": SIZE, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        {"model_type": "clip_vision_model", **SQUARE},
        processor=LLAVA,
        config={"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "gemma3": VisionFolder(
        "<start_of_image>",
        "<image_soft_token>",
        "Gemma3ImageProcessorPil",
        {"size": SIZE},
        {"model_type": "siglip_vision_model", **SQUARE},
        ("<start_of_image>", "<end_of_image>"),
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"mm_tokens_per_image": 4},
        {"image_seq_length": 4},
    ),
    "idefics3": VisionFolder(
        "<image>",
        "<image>",
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        SQUARE,
        ("<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))),
        processor={"image_seq_len": 4},
        config={"scale_factor": 1},
    ),
    "internvl": VisionFolder(
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>",
        "GotOcr2ImageProcessorPil",
        {"size": SIZE, "crop_to_patches": True, "max_patches": 4},
        {**TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        ("<img>", "</img>", "<video>"),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        {"image_seq_length": 1},
        {"image_seq_length": 1},
    ),
}
PIXTRAL = VisionFolder(  # a llava with another processor, which needs torchvision
    "[IMG]",
    "[IMG]",
    "PixtralImageProcessorPil",
    {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
    {"model_type": "pixtral", **SQUARE},
    ("[IMG_BREAK]", "[IMG_END]"),
    processor={"processor_class": "PixtralProcessor", "patch_size": 14},
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_folder(
    folder: Path, family: str = "qwen2_vl", template: str = TEMPLATE, made: VisionFolder | None = None
) -> Path:
    """A folder with all files but weights. made: in place of the family's own."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    made = made or FOLDERS[family]
    tokenizer = tiny_tokenizer(template.replace("IMAGE", made.written))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*made.tokens, made.placeholder]}, replace_extra_special_tokens=False
    )
    for name, token in made.named.items():
        tokenizer._set_model_specific_special_tokens({name: token})
    tokenizer.save_pretrained(folder)
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(made.placeholder)}
    if family == "qwen2_vl":
        ids |= {
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>")
            for name in ("vision_start", "vision_end")
        }
        ids |= {"video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>")}
    family_of = transformers.AutoConfig.for_model(family)
    text = {**TEXT, **HEADS, "head_dim": 8}
    if isinstance(family_of.text_config.model_type, str):
        text["model_type"] = family_of.text_config.model_type
    transformers.AutoConfig.for_model(
        family, text_config=text, vision_config=made.vision, **ids, **made.config
    ).save_pretrained(folder)
    images = getattr(transformers, made.image_processor)(**made.sizes)
    images.save_pretrained(folder)
    stated = {"processor_class": PROCESSOR_MAPPING_NAMES[family], **made.processor}
    (folder / "processor_config.json").write_text(json.dumps(stated))
    return folder


def drawing(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
