"""A GGUF file, as llama.cpp and Ollama use it, as a model folder, by Transformers' reader."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.files import output_errors, replacing
from meshrl.model.save import save_pretrained

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether this is a file in GGUF format, by its first bytes."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def convert_gguf(path: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model, the tokenizer and the chat template of the GGUF file `path` to the new folder `out`, in `dtype`.
    Quantised weights are dequantised; the precision that the quantisation removed is not restored.

    Other files of its folder are not read, and no code is run. Needs host memory for the model in float32, twice.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{path} is a GGUF file, and the package gguf is not installed: pip install 'meshrl[gguf]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = path.name
    try:
        with tempfile.TemporaryDirectory() as folder:  # Transformers also reads a tokenizer_config.json next to it
            Path(folder, name).symlink_to(path.absolute())
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
            result: Any = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
            )
    except Exception as cause:  # Transformers and gguf raise whatever a damaged file or an unknown architecture causes
        raise ConfigError(
            f"{path} could not be read by Transformers' GGUF reader: {type(cause).__name__}: {cause!s:.400}. Copy "
            "the file again, or get the model as a folder with safetensors"
        ) from cause
    quantised, loaded = result
    if wrong := sorted(map(str, {*loaded["missing_keys"], *loaded["mismatched_keys"]})):  # Transformers draws them
        raise ConfigError(
            f"{path} lacks {len(wrong)} of the model's tensors, or has other shapes, such as {', '.join(wrong[:3])}. "
            "Give a complete file; the parts of a split one can be merged by llama.cpp's gguf-split --merge"
        )
    config = quantised.config
    del config.quantization_config  # save_pretrained refuses a model that is still marked as quantised
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.load_state_dict(quantised.state_dict())
    with output_errors(out, "Make room, or give another folder"), replacing(out) as aside:
        save_pretrained(model, dtype, aside)
        tokenizer.save_pretrained(aside)
