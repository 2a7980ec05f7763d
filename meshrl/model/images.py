"""The families of vision-language models that are trained with their tower, and what a config does not state: how
arrays of several images are joined, which positions the tokens of an image have, which of them see each other, how many
features an image has, and the least image.

Letters: P side of a patch, S side of a square image, in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

MEDIA_IDS = ("image_token_id", "video_token_id", "audio_token_id")  # keys of configs
Outputs = Mapping[str, np.ndarray]  # of an image processor for one image, by argument of the model's forward


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """smallest: from Transformers' config to the arrays of a small image. features: from config and arrays to the
    number of an image's features. axis: along which the arrays of several images are joined. has_grid: positions of an
    image's tokens are time, height and width. mutual: the tokens of an image see each other, within the sliding window
    ("image"), or in layers with such a window alone ("window"). types: the argument by which Transformers' own forward
    gets the kind of each token."""

    smallest: Callable[[Any], Outputs]
    features: Callable[[Any, Outputs], int]
    axis: int = 0
    has_grid: bool = False
    mutual: Literal["", "image", "window"] = ""
    types: str = ""


def _pixels(*shape: int) -> np.ndarray:
    """Values that differ, since some families ignore an image of zeros, and others can't be compared on it."""
    return np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _patches(config: Any) -> int:
    """Patches of a side of a square image."""
    return _side(config.vision_config.image_size) // _side(config.vision_config.patch_size)


def _square(config: Any) -> Outputs:
    side = _side(config.vision_config.image_size)
    return {"pixel_values": _pixels(1, 3, side, side)}


def _per_tile(num_tokens: Callable[[Any], int], dim: int = 0) -> Callable[[Any, Outputs], int]:
    return lambda config, outputs: outputs["pixel_values"].shape[dim] * num_tokens(config)


def _llava(config: Any) -> Outputs:
    return _pixtral(config) if config.vision_config.model_type == "pixtral" else _square(config)


def _of_llava(config: Any, outputs: Outputs) -> int:
    if (tower := config.vision_config.model_type) == "pixtral":
        return _of_pixtral(config, outputs)
    added = tower.startswith("clip") - (config.vision_feature_select_strategy == "default")  # a class token, or not
    return int(outputs["pixel_values"].shape[0] * (_patches(config) ** 2 + added))


def _tiles(config: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the tiles of an image."""
    from transformers.image_processing_utils import select_best_resolution

    side = _side(config.vision_config.image_size)
    rows, columns = select_best_resolution((height, width), config.image_grid_pinpoints)
    return rows // side, columns // side


def _tiled(config: Any) -> Outputs:
    side = _side(config.vision_config.image_size)
    rows, columns = _tiles(config, side, side)
    return {"pixel_values": _pixels(1, 1 + rows * columns, 3, side, side), "image_sizes": np.array([[side, side]])}


def _of_tiled(config: Any, outputs: Outputs) -> int:
    """The scaled image, and its tiles without the features of padding, with a token at the end of each row. Source: Liu
    et al., LLaVA-NeXT (2024); the largest number: Li et al., LLaVA-OneVision (2024)."""
    height, width = outputs["image_sizes"][0].tolist()
    rows, columns = (n * _patches(config) for n in _tiles(config, height, width))
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    most = int(getattr(config, "vision_aspect_ratio", "0").rpartition("_")[2] or 0)
    if most and (ratio := math.sqrt(rows * columns / (most * _patches(config) ** 2))) > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return _patches(config) ** 2 + rows * (columns + 1)


def _grid(config: Any) -> Outputs:
    vision = config.vision_config
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", 3)
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": _pixels(merge**2, size), "image_grid_thw": np.array([[1, merge, merge]])}


def _of_grid(config: Any, outputs: Outputs) -> int:
    return int(outputs["image_grid_thw"][0].prod()) // config.vision_config.spatial_merge_size**2


def _crops(config: Any) -> Outputs:
    side = _side(config.vision_config.image_size)
    return {"pixel_values": _pixels(1, 1, 3, side, side), "pixel_attention_mask": np.ones((1, 1, side, side), bool)}


def _pixtral(config: Any) -> Outputs:
    side = _pixtral_side(config)  # the class of Mistral 3 fails with a single token
    return {"pixel_values": _pixels(1, 3, side, 2 * side), "image_sizes": np.array([[side, 2 * side]])}


def _of_pixtral(config: Any, outputs: Outputs) -> int:
    return int(outputs["image_sizes"][0].prod()) // _pixtral_side(config) ** 2


def _pixtral_side(config: Any) -> int:
    """Of the pixels of a token."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


def _gemma4(config: Any) -> Outputs:
    side, size = config.vision_config.pooling_kernel_size, 3 * config.vision_config.patch_size**2
    places = np.indices((side, side)).reshape(1, 2, -1).transpose(0, 2, 1)
    return {"pixel_values": np.abs(_pixels(1, side**2, size)), "image_position_ids": places}


def _of_gemma4(config: Any, outputs: Outputs) -> int:
    num_patches = int((outputs["image_position_ids"][..., 0] >= 0).sum())
    return num_patches // config.vision_config.pooling_kernel_size**2


def _siglip2(config: Any) -> Outputs:
    side, size = config.downsample_factor, 3 * config.vision_config.patch_size**2
    outputs = {"pixel_values": _pixels(1, side**2, size), "spatial_shapes": np.array([[side, side]])}
    return outputs | {"pixel_attention_mask": np.ones((1, side**2), np.int64)}


def _of_siglip2(config: Any, outputs: Outputs) -> int:
    return int(np.ceil(outputs["spatial_shapes"] / config.downsample_factor).prod(-1).sum())


_QWEN = ImageFamily(_grid, _of_grid, has_grid=True, types="mm_token_type_ids")
_IDEFICS = ImageFamily(_crops, _per_tile(lambda c: _patches(c) ** 2 // c.scale_factor**2, 1), axis=1)

FAMILIES: dict[str, ImageFamily] = {
    "aya_vision": ImageFamily(_square, _per_tile(lambda c: (_patches(c) // c.downsample_factor) ** 2)),
    "gemma3": ImageFamily(
        _square, _per_tile(lambda c: int(c.mm_tokens_per_image)), mutual="image", types="token_type_ids"
    ),
    "gemma4": ImageFamily(_gemma4, _of_gemma4, mutual="window", types="mm_token_type_ids"),
    "glm4v": _QWEN,
    "idefics3": _IDEFICS,
    "internvl": ImageFamily(_square, _per_tile(lambda c: int(_patches(c) * c.downsample_ratio) ** 2)),
    "lfm2_vl": ImageFamily(_siglip2, _of_siglip2),
    "llava": ImageFamily(_llava, _of_llava),
    "llava_next": ImageFamily(_tiled, _of_tiled),
    "llava_onevision": ImageFamily(_tiled, _of_tiled),
    "mistral3": ImageFamily(_pixtral, _of_pixtral),
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "smolvlm": _IDEFICS,
}
