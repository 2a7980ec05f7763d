"""What a request to vLLM carries for its images: arrays of the image processor, in the form of vLLM's own function. The
trainer has the same arrays, so both see equal pixels; vLLM's image processor is not used."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from meshrl.core.types import Media, Request
from meshrl.model.inputs import ModelInputs, in_order

_CACHE_BYTES = 256 << 20  # of the last images: the samples of a prompt have the same ones


class EncodedImages:
    """The last images as text. A worker of the server encodes each one, since only its Python has vLLM."""

    def __init__(self, inputs: ModelInputs, encode: Callable[[dict[str, Any]], Awaitable[str]]):
        """inputs: of the server's model. encode: has a worker run its step "encode"."""
        self._inputs, self._encode = inputs, encode
        self._texts: OrderedDict[str, str] = OrderedDict()  # by digest of the image
        self._num_bytes = 0
        self._lock = asyncio.Lock()  # the first samples of a prompt wait for one encoding

    async def features(self, request: Request) -> dict[str, Any]:
        """The field of that name in a request's body."""
        spans = in_order(request)
        images = [request.media[media_id] for media_id, _, _ in spans]
        return {
            "mm_hashes": {"image": [image.digest for image in images]},
            "mm_placeholders": {"image": [{"offset": start, "length": length} for _, start, length in spans]},
            "kwargs_data": {"image": [await self._text(image) for image in images]},
        }

    async def _text(self, image: Media) -> str:
        async with self._lock:
            if (text := self._texts.pop(image.digest, None)) is None:
                self._inputs.require_features(image)  # vLLM's engine ends when it gets other numbers
                text = await self._encode({name: _to_json(array) for name, array in image.outputs.items()})
                self._num_bytes += len(text)
            self._texts[image.digest] = text
            while self._num_bytes > _CACHE_BYTES and len(self._texts) > 1:
                self._num_bytes -= len(self._texts.popitem(last=False)[1])
        return text


def _to_json(array: np.ndarray) -> dict[str, Any]:
    data = b64encode(array.tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def array_of(values: dict[str, Any]) -> np.ndarray:
    """The reverse of `_to_json`."""
    return np.frombuffer(b64decode(values["data"]), values["dtype"]).reshape(values["shape"]).copy()
