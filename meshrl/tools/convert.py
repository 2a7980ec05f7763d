"""`meshrl convert`: from a checkpoint or a GGUF file to a model folder that `from_pretrained` loads, without ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshrl.config.model import LoraConfig, ModelConfig
from meshrl.core.errors import CheckpointError
from meshrl.core.files import is_there, output_errors, replacing
from meshrl.model.gguf import convert_gguf, is_gguf
from meshrl.model.lora import add_adapters
from meshrl.model.recipe import DTYPES, cast_parameters, load_causal_lm
from meshrl.model.save import save_pretrained
from meshrl.run.folder import similar_runs, state_in, write_template
from meshrl.run.subject import find_subject
from meshrl.train.checkpoint_files import CONTROLLER, MANIFEST, read_controller
from meshrl.train.state import load_model

_REMEDY = "Make room, or give another folder"


def convert(checkpoint: Path, out: Path, step: int | None = None) -> str:
    """Write the policy of `checkpoint` to `out`, in the run's compute dtype (model.dtype), with the run's tokenizer and
    chat template. `checkpoint` may also be a run's folder, which names the model of find_subject, or a GGUF file, which
    is written in bfloat16. step: of a run's folder. Returns the model in words.

    Needs the model folder from which the run started, and host memory for the full model in its master dtype, or, with
    LoRA, for two models in the compute dtype.
    Raises: CheckpointError when the checkpoint is incomplete, or when `out` already exists; OutputError when `out`
    can't be written; ConfigError, as find_subject.
    """
    if is_there(out):
        raise CheckpointError(f"{out} already exists; give the name of a new folder")
    if not is_there(checkpoint):
        raise CheckpointError(
            f"{checkpoint} does not exist; give the folder of a run or of a checkpoint, or a GGUF file"
            f"{similar_runs(checkpoint)}"
        )
    if is_gguf(checkpoint):
        convert_gguf(checkpoint, out)
        return str(checkpoint)
    folder, text = state_in(checkpoint), str(checkpoint)
    if step is not None or is_there(checkpoint / "checkpoints"):
        subject = find_subject(checkpoint, step)
        text = subject.text
        if subject.state is None and Path(str(subject.model)).is_dir():
            with output_errors(out, _REMEDY), replacing(out) as aside:
                shutil.copytree(str(subject.model), aside)
            return text
        folder = state_in(subject.state or checkpoint)
    if not is_there(folder / MANIFEST):
        raise CheckpointError(
            f"{checkpoint} is neither a checkpoint, nor a run with one, nor a GGUF file; give a folder such as "
            "runs/NAME or runs/NAME/checkpoints/step_000100, or the file of a model"
        )
    model, masters, template = _saved_model(folder)
    lm = load_causal_lm(model.path, dtype=DTYPES[model.dtype if model.lora.enabled else masters])
    if model.lora.enabled:
        add_adapters(lm, model.lora, DTYPES[masters], model.path)
    load_model(folder, "policy", lm)
    if not model.lora.enabled:
        cast_parameters(lm, DTYPES[model.dtype])  # one by one, so that memory never has a second model
    with output_errors(out, _REMEDY), replacing(out) as aside:
        save_pretrained(lm, DTYPES[model.dtype], aside, model.path)
        write_template(aside, template)
    return text


def _saved_model(folder: Path) -> tuple[ModelConfig, str, str | None]:
    """The run's model.*, the dtype of its master weights, and the chat template of its config, if there is one."""
    saved = read_controller(folder)
    try:
        settings, masters = saved["config"]["model"], str(saved["config"]["train"]["master_dtype"])
        model = ModelConfig(path=settings["path"], dtype=settings["dtype"], lora=LoraConfig(**settings.get("lora", {})))
        if masters not in DTYPES:
            raise ValueError(f"dtype {masters!r}")
        template = saved.get("chat_template")
        if not isinstance(template, str | None):
            raise ValueError(f"chat_template {template!r:.80}")
    except (KeyError, TypeError, ValueError) as cause:
        raise CheckpointError(
            f"{folder / CONTROLLER} does not contain the config of the run's model: {type(cause).__name__}: {cause}. "
            "The file was changed, or another version of meshrl wrote it"
        ) from cause
    return model, masters, template
