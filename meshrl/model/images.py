"""The families of vision-language models that are trained with their tower, and what only they can tell: how arrays of
several images are joined, which positions the tokens of an image have, which of them see each other, and the least
image. A model's config has the rest.

Letters: P side of a patch, S side of a square image, in pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np

MEDIA_IDS = ("image_token_id", "video_token_id", "audio_token_id")  # keys of configs
Outputs = dict[str, np.ndarray]  # of an image processor for one image, by argument of the model's forward


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """smallest: from Transformers' config to the arrays of a small image, and the number of its tokens. axis: along
    which the arrays of several images are joined. has_grid: positions of an image's tokens are time, height and width.
    mutual: the tokens of an image see each other, within the sliding window ("image"), or in layers with such a window
    alone ("window"). types: the argument by which Transformers' own forward gets the kind of each token."""

    smallest: Callable[[Any], tuple[Outputs, int]]
    axis: int = 0
    has_grid: bool = False
    mutual: Literal["", "image", "window"] = ""
    types: str = ""


def _pixels(*shape: int) -> np.ndarray:
    """Values that differ, since some families ignore an image of zeros, and others can't be compared on it."""
    return np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _patches(config: Any) -> tuple[int, int]:
    """Patches of a side of a square image, and the image's side."""
    side = _side(config.vision_config.image_size)
    return side // _side(config.vision_config.patch_size), side


def _square(num_tokens: Callable[[Any, int], int]) -> Callable[[Any], tuple[Outputs, int]]:
    """Of a model that takes images of one size. num_tokens: from config and patches of a side."""

    def smallest(config: Any) -> tuple[Outputs, int]:
        patches, side = _patches(config)
        return {"pixel_values": _pixels(1, 3, side, side)}, num_tokens(config, patches)

    return smallest


def _of_llava(config: Any, patches: int) -> int:
    has_class_token = config.vision_config.model_type.startswith("clip")
    return patches**2 + has_class_token - (config.vision_feature_select_strategy == "default")


def _tiled(config: Any) -> tuple[Outputs, int]:
    """A square image: once as a tile, and once as the tiles of the best of the resolutions. The features of padding are
    left out, and each row of the others ends with a token of its own. Source: Liu et al., LLaVA-NeXT (2024)."""
    from transformers.image_processing_utils import select_best_resolution

    patches, side = _patches(config)
    height, width = (n // side for n in select_best_resolution((side, side), config.image_grid_pinpoints))
    rows, columns = height * patches, width * patches
    rows, columns = (n - 2 * ((n - min(rows, columns)) // 2) for n in (rows, columns))
    outputs = {"pixel_values": _pixels(1, 1 + height * width, 3, side, side), "image_sizes": np.array([[side, side]])}
    return outputs, patches**2 + rows * columns + rows


def _grid(config: Any) -> tuple[Outputs, int]:
    vision = config.vision_config
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", 3)
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": _pixels(merge**2, size), "image_grid_thw": np.array([[1, merge, merge]])}, 1


def _crops(config: Any) -> tuple[Outputs, int]:
    patches, side = _patches(config)
    outputs = {"pixel_values": _pixels(1, 1, 3, side, side), "pixel_attention_mask": np.ones((1, 1, side, side), bool)}
    return outputs, patches**2 // config.scale_factor**2


def _pixtral(config: Any) -> tuple[Outputs, int]:
    side = config.vision_config.patch_size * config.spatial_merge_size  # of a token; the class fails with one alone
    return {"pixel_values": _pixels(1, 3, side, 2 * side), "image_sizes": np.array([[side, 2 * side]])}, 2


def _gemma4(config: Any) -> tuple[Outputs, int]:
    side, size = config.vision_config.pooling_kernel_size, 3 * config.vision_config.patch_size**2
    places = np.indices((side, side)).reshape(1, 2, -1).transpose(0, 2, 1)
    return {"pixel_values": np.abs(_pixels(1, side**2, size)), "image_position_ids": places}, 1


def _siglip2(config: Any) -> tuple[Outputs, int]:
    side, size = config.downsample_factor, 3 * config.vision_config.patch_size**2
    outputs = {"pixel_values": _pixels(1, side**2, size), "spatial_shapes": np.array([[side, side]])}
    return outputs | {"pixel_attention_mask": np.ones((1, side**2), np.int64)}, 1


_QWEN = ImageFamily(_grid, has_grid=True, types="mm_token_type_ids")

FAMILIES: dict[str, ImageFamily] = {
    "aya_vision": ImageFamily(_square(lambda config, patches: (patches // config.downsample_factor) ** 2)),
    "gemma3": ImageFamily(
        _square(lambda config, _: config.mm_tokens_per_image), mutual="image", types="token_type_ids"
    ),
    "gemma4": ImageFamily(_gemma4, mutual="window", types="mm_token_type_ids"),
    "glm4v": _QWEN,
    "idefics3": ImageFamily(_crops, axis=1),
    "internvl": ImageFamily(_square(lambda config, patches: ceil(patches * config.downsample_ratio) ** 2)),
    "lfm2_vl": ImageFamily(_siglip2),
    "llava": ImageFamily(_square(_of_llava)),
    "llava_next": ImageFamily(_tiled),
    "llava_onevision": ImageFamily(_tiled),
    "mistral3": ImageFamily(_pixtral),
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "smolvlm": ImageFamily(_crops, axis=1),
}
