"""What a vision-language model needs of an image: the arrays of its image processor and the text of its placeholders.

Each image is processed alone and once, here, for samplers and trainer alike. The class is that of the model's family
with Pillow's image processor, on every machine: the one of torchvision makes other pixels. Video parts are left out.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.errors import ConfigError, DataError
from meshrl.core.types import Media
from meshrl.data.chat import set_image_literals, set_image_token
from meshrl.data.images import RowImage
from meshrl.data.media import MediaArrays

# Of the image processor's outputs, those that only count tokens: the model does not take them.
_COUNTS = {"rows", "cols", "num_patches", "num_crops"}
# Settings that a processor and a model's config state both, by other names in some families.
_STATED_TWICE = {
    "patch_size": ("patch_size",),
    "merge_size": ("spatial_merge_size",),
    "spatial_merge_size": ("spatial_merge_size",),
    "temporal_patch_size": ("temporal_patch_size",),
    "vision_feature_select_strategy": ("vision_feature_select_strategy",),
    "image_seq_length": ("mm_tokens_per_image", "image_seq_length"),
}
_OTHER_UNITS = {"aya_vision"}  # its processor counts in patches after pooling
_EXTRA = "Processors of some families import torchvision or num2words: pip install 'meshrl[vision]'"


class Vision:
    """The image part of a vision-language model's processor. The processor is loaded for the first image.

    config: of the model. cache_bytes: arrays of images that stay in memory. placeholder: the id that the model replaces
    by the features of images.
    """

    def __init__(self, path: str, config: Any, tokenizer: Any, cache_bytes: int):
        self._path, self._config, self._tokenizer, self._cache_bytes = path, config, tokenizer, cache_bytes
        self.placeholder = int(config.image_token_id)
        stated = {
            name: value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))
        }
        of_media = [i for name, i in stated.items() if name.startswith(("image", "video", "vision", "boi", "eoi"))]
        known = [i for i in (*of_media, self.placeholder) if isinstance(i, int) and i < len(tokenizer)]
        set_image_literals(tokenizer, {text for text in tokenizer.convert_ids_to_tokens(known) if text})
        self._cached: OrderedDict[str, Media] = OrderedDict()
        self._num_cached_bytes = 0
        self.num_animated = 0  # images of which only the first frame is used

    @functools.cached_property
    def _processor(self) -> Any:
        processor = _load_processor(self._path, self._config, self._tokenizer)
        set_image_token(self._tokenizer, processor.image_token)
        return processor

    @property
    def backend(self) -> str:
        """pil, or torchvision for the families that have no other. The two make other pixels, so a run has one."""
        return str(self._processor.image_processor.backend)

    def note(self) -> str | None:
        """What a user should know of the images that were processed so far."""
        return (
            f"of {self.num_animated} images with several frames only the first is used" if self.num_animated else None
        )

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
        loaded = self._lookup(image)
        digest = loaded.digest

        def again() -> Mapping[str, np.ndarray]:
            now = self._lookup(image)
            if now.digest != digest:
                raise DataError(f"image {image.name!r} has changed since the run read it first; restore it")
            return now.outputs

        return replace(loaded, source=image.name, outputs=MediaArrays(again))

    def _lookup(self, image: RowImage) -> Media:
        image = image.read()
        key = image.digest()
        if (cached := self._cached.get(key)) is not None:
            self._cached.move_to_end(key)
            return cached
        made = self._cached[key] = self._process(image)
        self._num_cached_bytes += _num_bytes(made)
        while self._num_cached_bytes > self._cache_bytes and self._cached:
            self._num_cached_bytes -= _num_bytes(self._cached.popitem(last=False)[1])
        return made

    def _process(self, image: RowImage) -> Media:
        pixels, is_animated = image.pixels()
        self.num_animated += is_animated
        kwargs, settings = self._settings
        try:
            outputs, (text,) = self._processor._process_images([pixels], **kwargs)
        except Exception as cause:  # processors refuse sizes by several kinds of errors
            size = " x ".join(map(str, pixels.size))
            reason = f"{type(cause).__name__}: {cause!s:.300}"
            raise DataError(
                f"image {image.name!r} ({size} pixels): the image processor refuses it: {reason}"
            ) from cause
        left_out = {*_COUNTS, *self._processor.unused_input_names}
        arrays = {name: np.asarray(array) for name, array in outputs.items() if name not in left_out}
        for array in arrays.values():
            array.flags.writeable = False
        token = self._tokenizer.convert_ids_to_tokens(self.placeholder)
        if not (num_tokens := text.count(token)):
            raise ConfigError(
                f"{self._path}: its processor writes no {token!r} for an image, the image token of config.json"
            )
        digest = hashlib.sha256(settings + f"{pixels.size}".encode() + pixels.tobytes()).hexdigest()
        return Media(kind="image", digest=digest, source=image.name, outputs=arrays, num_tokens=num_tokens, text=text)


def _num_bytes(media: Media) -> int:
    return sum(array.nbytes for array in media.outputs.values())


def load_vision(path: str, tokenizer: Any, cache_bytes: int) -> Vision | None:
    """The image part of a model; None for a model that reads text only."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=Path(path).is_dir(), trust_remote_code=False)
    has_tower = getattr(config, "vision_config", None) is not None
    return Vision(path, config, tokenizer, cache_bytes) if has_tower and hasattr(config, "image_token_id") else None


def _load_processor(path: str, config: Any, tokenizer: Any) -> Any:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    source = {"local_files_only": Path(path).is_dir()}
    try:
        family = getattr(transformers, PROCESSOR_MAPPING_NAMES[config.model_type])
        images = transformers.AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False, **source)
        stated, _ = family.get_processor_dict(path, **source)

        class TextAndImages(family):  # type: ignore[misc, valid-type]
            """The family's processor, which takes None in place of its video processor."""

            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                if argument is not None:
                    return super().check_argument_for_proper_class(argument_name, argument)

        parts = {"image_processor": images, "tokenizer": tokenizer}
        processor = TextAndImages.from_args_and_dict([parts.get(name) for name in family.get_attributes()], stated)
        processor = processor[0] if isinstance(processor, tuple) else processor
    except Exception as cause:  # files of users, and imports of packages that are not installed
        is_import = isinstance(cause, ImportError) or "torchvision" in str(cause)
        advice = (
            _EXTRA if is_import else "Copy preprocessor_config.json and processor_config.json from the original model"
        )
        raise ConfigError(
            f"{path}: the rows have images, and the image processor of this {config.model_type} can't be loaded: "
            f"{type(cause).__name__}: {' '.join(str(cause).split())[:300].rstrip('.')}. {advice}"
        ) from cause
    _require_same_settings(path, processor, config)
    return processor


def _require_same_settings(path: str, processor: Any, config: Any) -> None:
    """Raises: ConfigError when processor and config differ in a setting that both have, so that an image would have
    another number of features than of placeholders. A setting that the processor lacks is that of the config."""
    for name, in_config in _STATED_TWICE.items() if config.model_type not in _OTHER_UNITS else ():
        of_model = [getattr(part, each, None) for part in (config, config.vision_config) for each in in_config]
        wanted = next((value for value in of_model if value is not None), None)
        wanted = wanted[0] if isinstance(wanted, list | tuple) else wanted
        for owner in (processor, processor.image_processor):
            value = getattr(owner, name, wanted)
            if value is None and owner is processor:
                setattr(owner, name, wanted)
            elif wanted is not None and isinstance(value, int | str) and value != wanted:
                raise ConfigError(
                    f"{path}: {name} is {value!r} in the processor's files and {wanted!r} in config.json, so "
                    "images would have other numbers of placeholders than of features. Copy the files of the original"
                )
