"""`meshrl convert`: from a checkpoint or a GGUF file to a model folder that `from_pretrained` loads, without ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from meshrl.config.model import LoraConfig, ModelConfig, more_than_text
from meshrl.core.errors import CheckpointError
from meshrl.core.files import is_there, output_errors, read_json, replacing
from meshrl.core.terminal import print_message
from meshrl.data.chat import ChatFiles, write_chat
from meshrl.model.facts import text_model
from meshrl.model.gguf import convert_gguf, is_gguf
from meshrl.model.lora import ADAPTER_FOLDER, add_adapters, joint_experts, save_adapter, trained_weights
from meshrl.model.recipe import DTYPES, cast_parameters, load_causal_lm
from meshrl.model.save import save_pretrained
from meshrl.run.folder import similar_runs, state_in
from meshrl.run.subject import find_subject
from meshrl.tools.replay import replay
from meshrl.train.checkpoint_files import CONTROLLER, MANIFEST, read_controller, state_folder, states
from meshrl.train.state import load_model

_REMEDY = "Make room, or give another folder"
_MODEL_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ggml", ".onnx")


def convert(checkpoint: Path, out: Path, dtype: str | None = None) -> tuple[str, float | None]:
    """Write the policy of `checkpoint` to `out`, in `dtype` (default: the run's compute dtype, model.dtype), with the
    run's tokenizer, chat template and stop ids. `checkpoint` may also be a run's folder, which names the model of
    find_subject; a GGUF file, which is written in bfloat16 by default; or the folder of a model with a vision tower,
    whose text model is written in its own dtype by default. Returns the model in words, and the share of the LoRA
    adapters' change that the weights have; None without adapters.

    Needs the model folder from which the run started, and host memory for the full model in its master dtype, or, with
    LoRA, for two models in the compute dtype.
    """
    _require_new_folder(out)
    if not is_there(checkpoint):
        raise CheckpointError(
            f"{checkpoint} does not exist; give the folder of a run or of a checkpoint, or a GGUF file"
            f"{similar_runs(checkpoint)}"
        )
    if is_gguf(checkpoint):
        convert_gguf(checkpoint, out, DTYPES[dtype or "bfloat16"])
        return str(checkpoint), None
    if (checkpoint / "config.json").is_file() and more_than_text(read_json(checkpoint / "config.json")):
        lm = text_model(checkpoint, None if dtype is None else DTYPES[dtype])
        with output_errors(out, _REMEDY), replacing(out) as aside:
            return str(checkpoint), save_pretrained(lm, lm.dtype, aside, checkpoint)
    folder, text = state_in(checkpoint), str(checkpoint)
    if is_there(checkpoint / "checkpoints"):
        subject = find_subject(checkpoint)
        if subject.run is not None and subject.step == 0 and (saved := states(subject.run / "checkpoints")):
            return subject.text, _write(saved[-1][1], out, dtype, trained=False)  # the best one is that of model.path
        text, source = subject.text, Path(str(subject.model))
        folder = state_in(source.parent if subject.state is None else subject.state)
        if source.is_dir() and not is_there(folder / MANIFEST):
            raise CheckpointError(
                f"{source} has no training state any more, of which weights in {dtype} could be written; leave "
                "--dtype away, or give a step's folder that has a state"
            )
    if not is_there(folder / MANIFEST):
        raise CheckpointError(
            f"{checkpoint} is neither a checkpoint, nor a run with one, nor a GGUF file; give a folder such as "
            "runs/NAME or runs/NAME/checkpoints/step_000100, or the file of a model"
        )
    return text, _write(folder, out, dtype)


def _require_new_folder(out: Path) -> None:
    if is_there(out):
        raise CheckpointError(f"{out} already exists; give the name of a new folder")
    if out.suffix.lower() in _MODEL_FILES:
        raise CheckpointError(
            f"{out} is the name of a file, but a folder is written; give a name such as {out.with_suffix('')}. "
            "llama.cpp's convert_hf_to_gguf.py makes a GGUF file of it"
        )


def convert_step(run: Path, step: int, out: Path, dtype: str | None = None) -> tuple[str, float | None]:
    """`convert` of the model after `step` steps of a run. That of a step without a checkpoint is made by a replay, and
    written only if all of its steps are equal to the run's, to the bit."""
    _require_new_folder(out)
    with TemporaryDirectory() as name:
        if step not in dict(states(run / "checkpoints")):
            if (difference := replay(run, step, print_message, into=Path(name))) is not None:
                raise CheckpointError(f"no model is written, because step {difference.step} of the replay differs")
            run = Path(name)
        _, share = convert(state_folder(run / "checkpoints", step).parent, out, dtype)
    return f"step {step}", share


def _write(folder: Path, out: Path, dtype: str | None, trained: bool = True) -> float | None:
    """Write the model of a checkpoint's state, or the one from which its run began, with the run's template and stop
    ids. Returns the share of the adapters' change."""
    model, masters, chat = _saved_model(folder)
    written, lora = DTYPES[dtype or model.dtype], trained and model.lora.enabled
    lm = load_causal_lm(model.path, dtype=DTYPES[model.dtype if lora else masters])
    if lora:
        add_adapters(lm, model.lora, DTYPES[masters], model.path)
    if trained:
        load_model(folder, "policy", lm)
    if not lora:
        cast_parameters(lm, written)  # one by one, so that memory never has a second model
    with output_errors(out, _REMEDY), replacing(out) as aside:
        share = save_pretrained(lm, written, aside, model.path)
        if lora:
            is_mixture = bool(joint_experts(lm))
            save_adapter(trained_weights(lm), model.lora, model.path, aside / ADAPTER_FOLDER, is_mixture)
        write_chat(aside, chat)
    return share


def _saved_model(folder: Path) -> tuple[ModelConfig, str, ChatFiles]:
    """The run's model.*, the dtype of its master weights, and its chat template and stop ids."""
    saved = read_controller(folder)
    try:
        settings, masters = saved["config"]["model"], str(saved["config"]["train"]["master_dtype"])
        model = ModelConfig(path=settings["path"], dtype=settings["dtype"], lora=LoraConfig(**settings.get("lora", {})))
        if masters not in DTYPES:
            raise ValueError(f"dtype {masters!r}")
        template, stops = saved.get("chat_template"), saved.get("stop_token_ids")
        if not isinstance(template, str | None):
            raise ValueError(f"chat_template {template!r:.80}")
        if not isinstance(stops, list | None) or not all(isinstance(i, int) for i in stops or ()):
            raise ValueError(f"stop_token_ids {stops!r:.80}")
    except (KeyError, TypeError, ValueError) as cause:
        raise CheckpointError(
            f"{folder / CONTROLLER} does not contain the config of the run's model: {type(cause).__name__}: {cause}. "
            "The file was changed, or another version of meshrl wrote it"
        ) from cause
    return model, masters, ChatFiles(template, None if stops is None else tuple(stops))
