"""What a vision-language model needs of an image: the arrays of its image processor and the text of its placeholders.

Each image is processed alone and once, here, for samplers and trainer alike. The class is that of the model's family
with Pillow's image processor, on every machine: the one of torchvision makes other pixels. Video parts are left out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.config.model import IMAGE_MODELS
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.types import Media
from meshrl.data.chat import IMAGE_LITERALS, IMAGE_TOKEN
from meshrl.data.images import RowImage, thumbnail_of
from meshrl.data.media import MediaArrays

_COUNTS = {"rows", "cols", "num_patches", "num_crops"}  # outputs that only count tokens: the model does not take them
# Settings of processors and their names in config.json. Aya Vision's processor counts in another unit.
_STATED_TWICE = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "spatial_merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
    "vision_feature_select_strategy": "vision_feature_select_strategy",
    "image_seq_length": "mm_tokens_per_image",
}
_OTHER_UNITS = {"aya_vision"}


class Vision:
    """The image part of a vision-language model's processor, which is loaded for the first image.

    config: of the model. cache_bytes: arrays of images that stay in memory. placeholder: the id that the model replaces
    by the features of images. num_animated: images of which only the first frame is used.
    """

    def __init__(self, path: str, config: Any, tokenizer: Any, cache_bytes: int):
        self._path, self._config, self._tokenizer, self._cache_bytes = path, config, tokenizer, cache_bytes
        self.placeholder, self.num_animated = int(config.image_token_id), 0
        named = ((name, i) for name, i in config.to_dict().items() if name.endswith(("_token_id", "_token_index")))
        of_media = [i for name, i in named if name.startswith(("image", "video", "vision", "boi", "eoi"))]
        known = [i for i in (*of_media, self.placeholder) if isinstance(i, int) and i < len(tokenizer)]
        tokenizer.init_kwargs[IMAGE_LITERALS] = sorted({*tokenizer.convert_ids_to_tokens(known)} - {None})
        self._cached: OrderedDict[str, Media] = OrderedDict()
        self._num_cached_bytes = 0

    @functools.cached_property
    def _processor(self) -> Any:
        processor = _load_processor(self._path, self._config, self._tokenizer)
        self._tokenizer.init_kwargs[IMAGE_TOKEN] = processor.image_token
        return processor

    @property
    def backend(self) -> str:
        """pil, or torchvision for the families that have no other. The two make other pixels, so a run has one."""
        return str(self._processor.image_processor.backend)

    @functools.cached_property
    def _settings(self) -> tuple[dict[str, Any], bytes]:
        """Arguments of the image processor, and the digest of all that decides its outputs."""
        processor = self._processor
        kwargs = processor._merge_kwargs(processor.valid_processor_kwargs, return_tensors="np")["images_kwargs"]
        own = {name: value for name, value in vars(processor).items() if isinstance(value, int | str | None)}
        stated = [type(processor).__name__, self.backend, processor.image_processor.to_dict(), kwargs, own]
        return kwargs, hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).digest()

    def draft(self, image: RowImage) -> Media:
        """The image after a look at its header, with one token as its text."""
        image.require_header()
        text = str(self._processor.image_token)
        return Media(kind="image", digest="", source=image.name, outputs={}, num_tokens=0, text=text)

    def media(self, image: RowImage) -> Media:
        """The image as the model takes it. Raises: DataError, with a text that follows the row's place."""
        key, made = self._lookup(image)
        digest = made.digest

        def arrays() -> Mapping[str, np.ndarray]:
            now = self._cached.get(key) or self._lookup(image)[1]
            if now.digest != digest:
                raise DataError(f"image {image.name!r} has changed since the run read it first; restore it")
            return now.outputs

        return replace(made, source=image.name, outputs=MediaArrays(arrays))

    def _lookup(self, image: RowImage) -> tuple[str, Media]:
        """The key of an image in the cache, and the image with its arrays."""
        key, image = image.read()
        if key in self._cached:
            self._cached.move_to_end(key)
            return key, self._cached[key]
        made = self._cached[key] = self._process(image)
        self._num_cached_bytes += _num_bytes(made)
        while self._num_cached_bytes > self._cache_bytes:
            self._num_cached_bytes -= _num_bytes(self._cached.popitem(last=False)[1])
        return key, made

    def _process(self, image: RowImage) -> Media:
        pixels, is_animated = image.pixels()
        self.num_animated += is_animated
        kwargs, settings = self._settings
        try:
            outputs, (text,) = self._processor._process_images([pixels], **kwargs)
        except Exception as cause:  # processors refuse sizes by several kinds of errors
            where, reason = f"image {image.name!r} of size {pixels.size}", f"{type(cause).__name__}: {cause!s:.300}"
            raise DataError(f"{where}: the image processor refuses it: {reason}") from cause
        left_out = {*_COUNTS, *self._processor.unused_input_names}
        arrays = {name: np.asarray(array) for name, array in outputs.items() if name not in left_out}
        for array in arrays.values():
            array.flags.writeable = False
        digest = hashlib.sha256(settings + f"{pixels.size}".encode() + pixels.tobytes()).hexdigest()
        token = self._tokenizer.convert_ids_to_tokens(self.placeholder)
        if not (count := text.count(token)):
            raise ConfigError(
                f"{self._path}: for an image its processor writes no {token!r}, config.json's image token"
            )
        return Media(
            kind="image",
            digest=digest,
            source=image.name,
            outputs=arrays,
            num_tokens=count,
            text=text,
            thumbnail=thumbnail_of(pixels),
        )


def _num_bytes(media: Media) -> int:
    return len(media.thumbnail) + sum(array.nbytes for array in media.outputs.values())


def load_vision(path: str, tokenizer: Any, cache_bytes: int) -> Vision | None:
    """The image part of a model; None for a model that reads text only."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=Path(path).is_dir(), trust_remote_code=False)
    has_tower = getattr(config, "vision_config", None) is not None and hasattr(config, "image_token_id")
    return Vision(path, config, tokenizer, cache_bytes) if has_tower else None


def _load_processor(path: str, config: Any, tokenizer: Any) -> Any:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    source = {"local_files_only": Path(path).is_dir()}
    try:
        # Not by AutoImageProcessor, which needs torchvision before Transformers 5.19.
        of_images, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(path, **source)
        stated, _ = transformers.ProcessorMixin.get_processor_dict(path, **source)
        # As AutoProcessor: the folder's class first. Pixtral is a llava with Pixtral's processor.
        named = stated.get("processor_class") or of_images.get("processor_class")
        own = PROCESSOR_MAPPING_NAMES[config.model_type]
        known = {PROCESSOR_MAPPING_NAMES[kind] for kind in IMAGE_MODELS}
        family: Any = getattr(transformers, str(named if named in known else own))
        kind = re.sub("(Fast|Pil)$", "", of_images["image_processor_type"])
        name = f"{kind}Pil" if hasattr(transformers, f"{kind}Pil") else kind
        images = getattr(transformers, name).from_pretrained(path, **source)

        class TextAndImages(family):  # type: ignore[misc, valid-type]
            """The family's processor, which takes None in place of its video processor."""

            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                if argument is not None:
                    return super().check_argument_for_proper_class(argument_name, argument)

        parts = {"image_processor": images, "tokenizer": tokenizer}
        made = TextAndImages.from_args_and_dict([parts.get(name) for name in family.get_attributes()], stated)
        processor = made[0] if isinstance(made, tuple) else made
    except Exception as cause:  # files of users, and imports of packages that are not installed
        advice = "Copy preprocessor_config.json and processor_config.json of the original model"
        if isinstance(cause, ImportError) or "torchvision" in str(cause):
            advice = "Processors of some families import torchvision or num2words: pip install 'meshrl[vision]'"
        raise ConfigError(
            f"{path}: the rows have images, and the image processor of this {config.model_type} can't be loaded: "
            f"{type(cause).__name__}: {' '.join(str(cause).split())[:300].rstrip('.')}. {advice}"
        ) from cause
    if config.model_type not in _OTHER_UNITS:
        _require_same_settings(path, processor, config)
    return processor


def _require_same_settings(path: str, processor: Any, config: Any) -> None:
    """Raises: ConfigError when processor and config differ in a setting that both have, so that an image would have
    another number of features than of placeholders. A setting that the processor lacks is that of the config."""
    for name, in_config in _STATED_TWICE.items():
        wanted = getattr(config, in_config, getattr(config.vision_config, in_config, None))
        wanted = wanted[0] if isinstance(wanted, list | tuple) else wanted
        if getattr(processor, name, wanted) is None:
            setattr(processor, name, wanted)
        stated = (getattr(part, name, None) for part in (processor, processor.image_processor))
        others = {value for value in stated if isinstance(value, int | str)} - {wanted}
        if wanted is not None and others:
            raise ConfigError(
                f"{path}: {name} is {others.pop()!r} in the processor's files and {wanted!r} in config.json, so images "
                "would have other numbers of placeholders than of features. Copy the files of the original model"
            )
