"""The families of vision-language models: a tiny config of each, images as its processor would give them, and what
Transformers' own forward computes of a row with images. tests/contract/test_vision_families.py proves them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshrl.core.types import Media, Sample, unsampled_row
from meshrl.model.recipe import cast_parameters

BREAK, CROP, BEGIN, END, IMAGE, VIDEO = 58, 59, 60, 61, 62, 63  # BREAK, CROP: text tokens between parts of an image
IDS = {"image_token_id": IMAGE, "tie_word_embeddings": False}
TEXT_IDS = range(3, BREAK)
P = 4  # pixels of a patch's side
Size = tuple[int, int]  # height and width, in pixels
Processed = tuple[dict[str, np.ndarray], list[int]]  # the outputs of one image, and its expanded token ids
Processor = Callable[[Size, np.random.Generator], Processed]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """config: fields of its config. process: an image -> what its processor makes of it. sizes: of two images; equal
    where the processor scales all images to one size. axis: on which the outputs of several images are joined; they
    are padded with 0 on the others. types: the keyword of the kinds of tokens, which its processor gives. model_type:
    "" = the entry's name. refused: a part of the error with which meshrl does not load it."""

    config: dict[str, Any]
    process: Processor
    sizes: tuple[Size, Size]
    axis: int = 0
    types: str = ""
    model_type: str = ""
    refused: str = ""


def placed(*parts: int, begin: Sequence[int] = (), end: Sequence[int] = ()) -> list[int]:
    """Ids of an image of several runs of placeholders, with a text token before each but the first."""
    runs = [[CROP] * (i > 0) + [IMAGE] * count for i, count in enumerate(parts)]
    return [*begin, *(token for run in runs for token in run), *end]


def grid(size: Size, draw: np.random.Generator) -> Processed:
    """Two frames of patches, of which 2 x 2 become one feature."""
    rows, cols = size[0] // P, size[1] // P
    pixels = draw.standard_normal((rows * cols, 3 * 2 * P * P), np.float32)
    outputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, cols]])}
    return outputs, placed(rows * cols // 4, begin=[BEGIN], end=[END])


def one_size(features: int, begin: Sequence[int] = (), end: Sequence[int] = ()) -> Processor:
    """Every image has the same number of features."""

    def process(size: Size, draw: np.random.Generator) -> Processed:
        return {"pixel_values": draw.standard_normal((1, 3, *size), np.float32)}, placed(features, begin=begin, end=end)

    return process


def tiles(inner: bool) -> Processor:
    """Tiles of 16 x 16, of 4 features each; if there are several, then also the scaled image. inner: with a text token
    before each tile."""

    def process(size: Size, draw: np.random.Generator) -> Processed:
        count = (size[0] // 16) * (size[1] // 16)
        count += count > 1
        outputs = {"pixel_values": draw.standard_normal((count, 3, 16, 16), np.float32)}
        return outputs, placed(*([4] * count if inner else [4 * count]), begin=[BEGIN], end=[END])

    return process


def crops(size: Size, draw: np.random.Generator) -> Processed:
    """Tiles on axis 1; the right patches of the first one are padding."""
    outputs, _ = tiles(True)(size, draw)
    pixels = outputs["pixel_values"][None]
    mask = np.ones((1, pixels.shape[1], 16, 16), np.int64)
    mask[0, 0, :, 12:], pixels[0, 0, :, :, 12:] = 0, 0
    ids = placed(*[4] * pixels.shape[1], begin=[BEGIN, CROP], end=[BREAK, BEGIN])
    return {"pixel_values": pixels, "pixel_attention_mask": mask}, ids


def any_resolution(max_tiles: int) -> Processor:
    """The scaled image (2 x 2 patches) and tiles of 8 x 8; the features of padding are cut off, each row of features
    ends with a newline. max_tiles: more features than of so many are scaled down; 0 = no limit."""

    def process(size: Size, draw: np.random.Generator) -> Processed:
        tile_rows, tile_cols = {(16, 9): (2, 2), (8, 16): (1, 2)}[size]
        rows, cols = {(16, 9): (4, 2), (8, 16): (2, 4)}[size]
        if max_tiles and (ratio := (rows * cols / (max_tiles * 4)) ** 0.5) > 1.1:
            rows, cols = int(rows // ratio), int(cols // ratio)
        pixels = draw.standard_normal((1, 1 + tile_rows * tile_cols, 3, 8, 8), np.float32)
        return {"pixel_values": pixels, "image_sizes": np.array([size])}, placed(4 + rows * (cols + 1))

    return process


def rows_of_features(merge: int) -> Processor:
    """merge x merge patches become one feature; a token ends each row of features."""

    def process(size: Size, draw: np.random.Generator) -> Processed:
        rows, cols = size[0] // (merge * P), size[1] // (merge * P)
        ids = [*([IMAGE] * cols + [BREAK]) * (rows - 1), *[IMAGE] * cols, END]
        return {"pixel_values": draw.standard_normal((1, 3, *size), np.float32), "image_sizes": np.array([size])}, ids

    return process


def padded_patches(size: Size, draw: np.random.Generator) -> Processed:
    """At most 24 patches, of which 2 x 2 become one feature; with their number of rows and columns."""
    rows, cols = size[0] // P, size[1] // P
    mask = (np.arange(24) < rows * cols)[None]
    pixels = np.where(mask[..., None], draw.standard_normal((1, 24, 3 * P * P), np.float32), 0)
    outputs = {"pixel_values": pixels, "spatial_shapes": np.array([[rows, cols]])}
    ids = placed(rows * cols // 4, begin=[BEGIN], end=[END])
    return {**outputs, "pixel_attention_mask": mask.astype(np.int64)}, ids


def placed_patches(size: Size, draw: np.random.Generator) -> Processed:
    """At most 24 patches, of which 2 x 2 become one feature; with the place (x, y) of each."""
    outputs, ids = padded_patches(size, draw)
    y, x = np.divmod(np.arange(24), size[1] // P)
    places = np.where(outputs["pixel_attention_mask"][..., None] > 0, np.stack([x, y], -1)[None], -1)
    return {"pixel_values": outputs["pixel_values"], "image_position_ids": places}, ids


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
    "tie_word_embeddings": False,
}
HEADS = {"head_dim": 8}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
SHORT_WINDOWS = {**WINDOWS, "sliding_window": 3}  # shorter than an image
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}}
GRID_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "intermediate_size": 48,
    "mlp_ratio": 2,
    "num_heads": 2,
    "patch_size": P,
    "num_position_embeddings": 9,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": P,
    "image_size": 12,
}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
ENDS = {"begin": [BEGIN], "end": [END]}
GRID_IDS = {**IDS, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
GRID_SIZES = ((16, 24), (24, 8))  # 2 x 3 and 3 x 1 features
TILE_SIZES = ((16, 32), (16, 16))
RESOLUTIONS = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]}


def of_grid(text: dict[str, Any], tower: dict[str, Any] | None = None, **fields: Any) -> VisionFamily:
    """A family whose positions follow the grid of an image."""
    dropped = "embed_dim" if tower is not None else "out_hidden_size"
    vision = {k: v for k, v in {**GRID_TOWER, **(tower or {})}.items() if k != dropped}
    config = {"text_config": {**COMMON, **MROPE, **text}, "vision_config": vision, **GRID_IDS, **fields}
    return VisionFamily(config, grid, GRID_SIZES, types="mm_token_type_ids")


def of_tower(
    text: dict[str, Any], tower: dict[str, Any], process: Processor, *sizes: Size, **rest: Any
) -> VisionFamily:
    """A family that has a tower and a language model of other families. rest: other fields of its config, and of its
    entry."""
    entry = {key: rest.pop(key) for key in ("axis", "types", "model_type", "refused") if key in rest}
    config = {"text_config": {**COMMON, **text}, "vision_config": tower, **IDS, **rest}
    first, *others = sizes
    return VisionFamily(config, process, (first, others[0] if others else first), **entry)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-3,  # as in model_families
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.25},
}
QWEN2, LLAMA = {"model_type": "qwen2"}, {"model_type": "llama"}
DEEP = {"deepstack_visual_indexes": [0]}
GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 32,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    **SHORT_WINDOWS,
    "final_logit_softcapping": 3.0,
}
GEMMA4_TOWER = {
    **TOWER,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 32,
}
GEMMA4_IDS = {"boi_token_id": BEGIN, "eoi_token_id": END, "video_token_id": VIDEO, "audio_token_id": VIDEO}
PALIGEMMA = {"types": "token_type_ids", "projection_dim": 32, "hidden_size": 32, "refused": "vision tower"}
TIED = {"tie_word_embeddings": True}

FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": of_grid({}),
    "qwen2_5_vl": of_grid({}, {"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": of_grid(HEADS, DEEP),
    "qwen3_vl_moe": of_grid({**HEADS, **EXPERTS}, DEEP),
    "qwen3_5": of_grid(DELTA, {}),
    "glm4v": of_grid({}, {"image_size": 12}, image_start_token_id=BEGIN, image_end_token_id=END),
    "llava": of_tower(LLAMA, {**TOWER, "model_type": "clip_vision_model"}, one_size(9), (12, 12)),
    "llava with siglip": of_tower(
        QWEN2, SIGLIP, one_size(9), (12, 12), model_type="llava", vision_feature_select_strategy="full"
    ),
    "llava with pixtral": of_tower(
        {"model_type": "mistral", **HEADS},
        {**TOWER, "model_type": "pixtral", "head_dim": 16},
        rows_of_features(1),
        *((8, 12), (12, 4)),
        model_type="llava",
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    ),
    "llava_next": of_tower(
        {"model_type": "mistral"},
        {**TOWER, "model_type": "clip_vision_model", "image_size": 8},
        any_resolution(0),
        *((16, 9), (8, 16)),
        **RESOLUTIONS,
    ),
    "llava_onevision": of_tower(
        QWEN2,
        {**SIGLIP, "image_size": 8},
        any_resolution(1),
        *((16, 9), (8, 16)),
        **RESOLUTIONS,
        vision_aspect_ratio="anyres_max_1",
        video_token_id=VIDEO,
    ),
    "internvl": of_tower(QWEN2, {**TOWER, "image_size": 16}, tiles(False), *TILE_SIZES, image_seq_length=4),
    "idefics3": of_tower(LLAMA, {**TOWER, "image_size": 16}, crops, *TILE_SIZES, axis=1, pad_token_id=0),
    "smolvlm": of_tower(
        {**LLAMA, **TIED}, {**TOWER, "image_size": 16}, crops, *TILE_SIZES, axis=1, pad_token_id=0, **TIED
    ),
    "mistral3": of_tower(
        {"model_type": "mistral", **HEADS, "sliding_window": 6},
        {**TOWER, "head_dim": 16},
        rows_of_features(2),
        *GRID_SIZES,
    ),
    "aya_vision": of_tower(
        {"model_type": "cohere2", **WINDOWS, "logit_scale": 0.25},
        {**SIGLIP, "image_size": 16},
        tiles(True),
        *TILE_SIZES,
    ),
    "lfm2_vl": of_tower(
        {"model_type": "lfm2", "full_attn_idxs": [1]},
        {**TOWER, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        padded_patches,
        *GRID_SIZES,
        projector_hidden_size=32,
    ),
    "gemma3": of_tower(
        {"model_type": "gemma3_text", **HEADS, **SHORT_WINDOWS, "query_pre_attn_scalar": 8, **TIED},
        {**SIGLIP, "image_size": 16},
        one_size(4, **ENDS),
        (16, 16),
        types="token_type_ids",
        mm_tokens_per_image=4,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        **TIED,
    ),
    "gemma4": of_tower(
        {**GEMMA4, "use_bidirectional_attention": "vision"},
        GEMMA4_TOWER,
        placed_patches,
        *GRID_SIZES,
        types="mm_token_type_ids",
        **GEMMA4_IDS,
    ),
    "gemma4 with audio": of_tower(
        {**GEMMA4, **TIED},
        {**GEMMA4_TOWER, "standardize": True},
        placed_patches,
        *GRID_SIZES,
        types="mm_token_type_ids",
        model_type="gemma4",
        audio_config=AUDIO,
        **GEMMA4_IDS,
        **TIED,
    ),
    "paligemma": of_tower({"model_type": "gemma", **HEADS}, SIGLIP, one_size(9), (12, 12), **PALIGEMMA),
    "paligemma with gemma2": of_tower(
        {"model_type": "gemma2", **HEADS, **WINDOWS, "query_pre_attn_scalar": 8},
        SIGLIP,
        one_size(9),
        (12, 12),
        **PALIGEMMA,
        model_type="paligemma",
    ),
}

SAMPLE = ("qwen2_vl", "gemma3", "llava", "qwen3_5")  # one of each mechanism; the other families are slow tests


def config_of(family: str) -> Any:
    from transformers import AutoConfig

    entry = FAMILIES[family]
    return AutoConfig.for_model(entry.model_type or family, **entry.config)


def tiny_vision_lm(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, freezes: bool = False) -> Any:
    """Transformers' own model, all of whose weights matter. freezes: its tower and projector are not trained."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    lm: Any = AutoModelForImageTextToText.from_config(
        config_of(family), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for p in lm.parameters():
            p += (0.1 if p.ndim == 1 else 0.15) * torch.randn_like(p)
        for name, buffer in lm.named_buffers():
            if name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.uniform_(0.5, 0.8)
            elif name.endswith(("put_min", "put_max")):  # of clipped layers: infinite without a checkpoint
                buffer.fill_(3.0 if name.endswith("max") else -3.0)
    lm.requires_grad_(not freezes)
    if freezes:
        lm.get_decoder().requires_grad_()
        lm.get_output_embeddings().requires_grad_()
    return cast_parameters(lm, dtype)


def image(family: str, size: Size, seed: int) -> tuple[Media, list[int]]:
    """A random image as its processor gives it, and its token ids."""
    outputs, ids = FAMILIES[family].process(size, np.random.default_rng(seed))
    digest = hashlib.sha256(b"".join(array.tobytes() for array in outputs.values())).hexdigest()
    media = Media(kind="image", digest=digest, source="drawn", outputs=outputs, num_tokens=ids.count(IMAGE))
    return media, ids


def row(family: str, name: str, prompt: Sequence[int | tuple[Size, int]], answer: int, seed: int = 0) -> Sample:
    """A row with an answer of so many tokens. prompt: numbers of text tokens, and images as (size, seed). Rows of one
    seed have the same prompt, and answers that differ. A span of media is from the first to the last placeholder of an
    image."""
    draw, draw_answer = np.random.default_rng(seed), np.random.default_rng([seed, answer])
    tokens: list[int] = []
    media, spans = dict[str, Media](), list[tuple[str, int, int]]()
    for part in prompt:
        if isinstance(part, int):
            tokens += draw.choice(TEXT_IDS, part).tolist()
            continue
        one, ids = image(family, *part)
        first, last = ids.index(IMAGE), len(ids) - 1 - ids[::-1].index(IMAGE)
        media[one.digest] = one
        spans.append((one.digest, len(tokens) + first, last - first + 1))
        tokens += ids
    context = len(tokens)
    tokens += draw_answer.choice(TEXT_IDS, answer).tolist()
    made = unsampled_row(name, np.array(tokens, np.int32), np.arange(len(tokens)) >= context)
    made.media, made.media_spans, made.prefix_len = media, spans, context
    return made


def reference_inputs(family: str, row: Sample) -> dict[str, torch.Tensor]:
    """What the family's processor gives for one row: token ids, their kinds, and all images of the row."""
    entry = FAMILIES[family]
    tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if entry.types == "token_type_ids" and config_of(family).model_type == "paligemma":  # 1 = after the prompt
        inputs[entry.types] = (torch.arange(len(row)) >= row.prefix_len)[None].long()
    elif entry.types:
        inputs[entry.types] = (tokens == IMAGE).long()
    outputs = [row.media[media_id].outputs for media_id, _, _ in row.media_spans]
    for name in outputs[0] if outputs else ():
        inputs[name] = torch.from_numpy(_joined([each[name] for each in outputs], entry.axis))
    return inputs


def _joined(arrays: Iterable[np.ndarray], axis: int) -> np.ndarray:
    arrays = list(arrays)
    shape = np.max([array.shape for array in arrays], axis=0)
    shape[axis] = 0
    padded = [np.pad(a, [(0, max(0, n - m)) for n, m in zip(shape, a.shape, strict=True)]) for a in arrays]
    return np.concatenate(padded, axis)


def media_ids(config: Any) -> list[int]:
    """The ids that stand for the features of media: a model never samples them, so they have no probability."""
    ids = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    return sorted({i for i in ids if i is not None})


def reference_logits(family: str, lm: Any, row: Sample) -> torch.Tensor:
    """[T, V], by Transformers' own forward of the row alone; position t scores the token after t. Ids of media have
    none."""
    if hasattr(lm.base_model, "rope_deltas"):
        lm.base_model.rope_deltas = None  # of the last call
    dtype = next(lm.parameters()).dtype
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in reference_inputs(family, row).items()}
    logits = lm(**inputs, use_cache=False).logits[0]
    is_media = torch.zeros(logits.shape[-1], dtype=torch.bool)
    is_media[media_ids(lm.config)] = True
    return logits.masked_fill(is_media, -1e30)


def reference_logprobs(family: str, lm: Any, row: Sample) -> torch.Tensor:
    """As reference_logits."""
    return torch.log_softmax(reference_logits(family, lm, row).float(), -1)
