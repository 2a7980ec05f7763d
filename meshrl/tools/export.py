"""`meshrl export`: the model of a run as a Hugging Face folder, a LoRA adapter or a GGUF file, compared with what the
run recorded, with a model card and the commands that serve it."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from meshrl.config.load import is_sft
from meshrl.config.model import more_than_text
from meshrl.config.source import HUB_ID
from meshrl.core.errors import CheckpointError, ConfigError
from meshrl.core.files import Unreadable, is_there, output_errors, read_json, read_text, replacing, write_text
from meshrl.core.types import Sample, Trajectory, unsampled_row
from meshrl.data.chat import ChatFiles, load_tokenizer, read_tokenizer, render, write_chat
from meshrl.model.exported import difference, push_folder, read_policy, recorded_difference, require_token
from meshrl.model.gguf import convert_gguf, require_package, stop_ids_in, write_gguf
from meshrl.model.lora import ADAPTER_FOLDER
from meshrl.model.recipe import DTYPES
from meshrl.monitor.rollout_log import answer_files, read_rollouts
from meshrl.run.folder import config_of
from meshrl.run.inputs import NO_OBJECTS, load_sft
from meshrl.run.subject import find_subject
from meshrl.run.task import load_sft_source
from meshrl.run.verdict import read_verdict
from meshrl.tools.convert import convert
from meshrl.tools.report.folder import read_settings
from meshrl.train.checkpoint_files import MANIFEST, file_fact, state_folder, states
from meshrl.train.state import unequal_tensor

NUM_ROWS = 16  # answers that are scored, at most
# Largest mean KL of a token, and largest difference of a tensor from the run's as a share of its norm.
BOUNDS = {"f32": (1e-5, 1e-5), "f16": (1e-3, 1e-3), "bf16": (1e-2, 4e-3), "q8_0": (2e-2, 3e-2), "merged": (2e-2, 1.0)}
MIN_AGREEMENT = 0.9  # share of the tokens for which both models have the same most likely one
MAX_DISTANCE = {"float32": 1e-2, "bfloat16": 1e-1, "float16": 1e-1}  # nats from the recorded logprobs, by model.dtype
_SHOWN = ("algo.", "data.", "loop.", "model.", "reward.", "rollout.sampling.", "sft.", "train.")  # in a model card


class Export:
    """One export. given: a run's folder, which means its best model or else its newest, or a step's folder. to: hf,
    adapter or gguf. kind: of gguf, one of GGUF_TYPES. out: the new folder; None = in exports/ of the run's folder."""

    def __init__(self, given: Path, to: str, kind: str = "q8_0", out: Path | None = None):
        self.given, self.to, self.kind, self.subject = given, to, kind, find_subject(given)
        if self.subject.run is None:
            raise ConfigError(f"{given} belongs to no run; give runs/NAME, or a folder of one of its steps")
        self.run, self.config = self.subject.run, config_of(self.subject.run)
        if "model" not in self.config:
            raise CheckpointError(f"{self.run}/config.yaml, of which the model was trained, can't be read; restore it")
        self.out = out or self.run / "exports" / (f"gguf_{kind}" if to == "gguf" else to)
        if is_there(self.out):
            raise ConfigError(f"{self.out} already exists; give another folder, or remove it")
        if to == "gguf":
            require_package(self.out)
        self.file, self.is_sft = f"{self.run.name}-{kind}.gguf", is_sft(self.run / "config.yaml")
        self.proof: list[str] = []
        self.sampling = dict[str, float]()  # of the run's training, in Ollama's words
        if not self.is_sft:
            temperature = self.config["rollout"]["sampling"]["temperature"]
            self.sampling |= {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
        self._rows, self._answers = list[Sample](), list[Trajectory]()

    def write(self, push: str | None = None) -> str:
        """Write the folder, and return what to print. push: the name of a repository of the hub that gets the folder.

        Raises: CheckpointError when what was written differs from the run's model; no folder is left then.
        """
        if push is not None:
            require_token(push)
        with output_errors(self.out, "Make room, or give another folder"):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self.out.parent) as place, replacing(self.out) as aside:
                model = Path(str(self.subject.model))
                before_training = self.subject.step == 0 and states(self.run / "checkpoints")
                if self.subject.state is not None or before_training:
                    convert(self.given, model := Path(place, "model"))
                if not more_than_text(read_json(model / "config.json")):
                    self._write_text_model(model, aside, Path(place, "read_back"))
                elif self.to == "hf":
                    shutil.copytree(model, aside)
                else:
                    raise ConfigError(f"{model} has a vision tower, which is written by --to hf only")
                source = model / ADAPTER_FOLDER if self.to == "adapter" else model
                for copy in sorted(aside.rglob("*.safetensors")):
                    if (fact := file_fact(copy)) != file_fact(source / copy.relative_to(aside)):
                        raise CheckpointError(f"{source / copy.name} was not copied as it is; export it again")
                    self.proof.append(f"{copy.name}: copied to the byte, blake2b {fact.blake2b}")
                write_text(aside / "README.md", self._card())
        pushed = [] if push is None else [f"pushed to {push_folder(self.out, push)}"]
        lines = [f"wrote {self.out}, of {self.subject.text}", *self.proof, *pushed, "serve it by one of these:"]
        return "\n  ".join([*lines, *self._commands(self.out)])

    def _write_text_model(self, model: Path, aside: Path, read_back: Path) -> None:
        """read_back: a new folder for what a GGUF file contains."""
        adapter = model / ADAPTER_FOLDER if is_there(model / ADAPTER_FOLDER) else None
        if self.to == "adapter" and adapter is None:
            raise ConfigError(f"{model} has no adapter, because the run trained all weights; use --to hf or --to gguf")
        stops, own, tokenizer = self._read_answers(), self._own_model(model, adapter), read_tokenizer(model)
        if variables := self.config.get("sft" if self.is_sft else "data", {}).get("chat_template_kwargs"):
            template = tokenizer.chat_template
            values = {name: "none" if value is None else json.dumps(value) for name, value in variables.items()}
            sets = "".join(f"{{% set {name} = {value} %}}" for name, value in values.items())
            tokenizer.chat_template = sets + (template["default"] if isinstance(template, dict) else template)
        if self.to == "gguf":
            aside.mkdir()
            write_gguf(own, tokenizer, sorted(stops), aside / self.file, self.kind)
            convert_gguf(aside / self.file, read_back, DTYPES["float32"])
            self._require_same(own, read_back, self.kind)
            ends = stop_ids_in(aside / self.file)
            lines = [f"FROM ./{self.file}", *(f"PARAMETER {name} {value}" for name, value in self.sampling.items())]
            lines += [f"PARAMETER stop {json.dumps(tokenizer.decode([i]), ensure_ascii=False)}" for i in sorted(stops)]
            write_text(aside / "Modelfile", "\n".join([*lines, ""]))
        else:
            shutil.copytree(model if adapter is None or self.to == "hf" else adapter, aside)
            if self.to == "adapter":
                tokenizer.save_pretrained(aside)
                shutil.copyfile(model / "generation_config.json", aside / "generation_config.json")
            elif adapter is not None:
                shutil.rmtree(aside / ADAPTER_FOLDER)
                self._require_same(own, aside, "merged")
            if variables:
                write_chat(aside, ChatFiles(tokenizer.chat_template))
            generation = read_json(aside / "generation_config.json")
            listed = generation.get("eos_token_id")
            ends, read_back = {*(listed if isinstance(listed, list) else [listed])}, aside
            if own := {name.replace("repeat", "repetition"): value for name, value in self.sampling.items()}:
                ids = {name: value for name, value in generation.items() if name.endswith("_token_id")}
                text = json.dumps({**ids, "do_sample": True, **own}, indent=2, sort_keys=True)
                write_text(aside / "generation_config.json", text + "\n")
        if ends != stops:
            raise CheckpointError(
                f"the exported model ends answers by the ids {sorted(ends, key=str)}, but the run ended them by "
                f"{sorted(stops)}: {model} was changed. Export another step"
            )
        self._require_chat(read_back, tokenizer)

    def _read_answers(self) -> set[int]:
        """Read what the run recorded: answers of its last evaluation, or conversations of an SFT run. Returns every id
        that ended an answer."""
        if self.is_sft:
            self._rows, stops = self._conversations()
            return stops
        evals, steps = answer_files(self.run, "eval"), answer_files(self.run, "step")
        path = evals.get(self.subject.step, next(reversed([*steps.values(), *evals.values()]), None))
        logged = (each.trajectory for each in (() if path is None else read_rollouts(path)))
        self._answers = [*islice((t for t in logged if t.turns and len(t.turns[0].output_ids)), NUM_ROWS)]
        for answer in self._answers:
            turn = answer.turns[0]
            mask = np.arange(len(turn.context_ids) + len(turn.output_ids)) >= len(turn.context_ids)
            row = unsampled_row(answer.id, np.concatenate([turn.context_ids, turn.output_ids]), mask)
            row.temperature = turn.sampling.temperature or 1.0
            plain = replace(turn.sampling, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
            if self.subject.step in evals and plain == turn.sampling:  # the recorded ones are of this very model
                row.rollout_logprobs[mask] = turn.logprobs
            self._rows.append(row)
        if not self._rows:
            remedy = "meshrl convert STEP FOLDER writes a step's model without a comparison"
            raise CheckpointError(
                f"{self.run}/rollouts has no answers, with which its model could be compared; {remedy}"
            )
        return {*self._answers[0].turns[0].sampling.stop_token_ids}

    def _conversations(self, *overrides: str) -> tuple[list[Sample], set[int]]:
        loaded = load_sft(self.run / "config.yaml", overrides, starts=False)
        source, held_out, _, chat = load_sft_source(loaded.config, NO_OBJECTS)
        return (held_out or source.next(NUM_ROWS))[:NUM_ROWS], {*(chat.stop_token_ids or ())}

    def _own_model(self, model: Path, adapter: Path | None) -> Any:
        """The policy of the run in float32, compared with the run's state and answers."""
        settings, state = self.config["model"], state_folder(self.run / "checkpoints", self.subject.step)
        if adapter is not None:
            own = read_policy(read_json(adapter / "adapter_config.json")["base_model_name_or_path"], adapter)
        else:
            own = read_policy(model)
            if is_there(state / MANIFEST) and not settings["lora"]["enabled"]:
                if (name := unequal_tensor(state, "policy", own, DTYPES[settings["dtype"]])) is not None:
                    raise CheckpointError(f"{model} was changed: {name} is not that of {state} of the same step")
                self.proof.append(f"equal to the bit to the training state of step {self.subject.step}")
        distance, bound = recorded_difference(own, self._rows), MAX_DISTANCE[settings["dtype"]]
        if distance > bound:
            raise CheckpointError(
                f"{model} is not the model that the run evaluated: the logprobs of its answers are {distance:.3g} nats "
                f"from the recorded ones, more than {bound:g}. Export another step"
            )
        if distance == distance:
            self.proof.append(
                f"logprobs of the run's answers: {distance:.2g} nats from the recorded ones (<= {bound:g})"
            )
        return own

    def _require_same(self, own: Any, folder: Path, kind: str) -> None:
        found, (kl, share) = difference(own, read_policy(folder), self._rows), BOUNDS[kind]
        text = (
            f"KL {found.kl_mean:.2g} nats a token (<= {kl:g}), largest {found.kl_max:.2g}; the same most likely token "
            f"for {found.agreement:.1%} (>= {MIN_AGREEMENT:.0%}) of {found.num_tokens}; {found.tensor} differs most, "
            f"by {found.share:.2g} of its norm (<= {share:g})"
        )
        if not (found.kl_mean <= kl and found.agreement >= MIN_AGREEMENT and found.share <= share):
            other = "--to adapter, or meshrl convert --dtype float32" if kind == "merged" else "another --type"
            raise CheckpointError(f"the exported model is not the run's: {text}. Try {other}")
        self.proof.append(f"read back, on the run's answers: {text}")

    def _require_chat(self, folder: Path, tokenizer: Any) -> None:
        """Compare the vocabulary and the template of a written folder with the run's."""
        date = self.config.get("run", {}).get("date")
        read = load_tokenizer(folder, date=datetime.fromisoformat(str(date)) if date else None)
        if {*tokenizer.get_vocab().items()} - {*read.get_vocab().items()}:
            raise CheckpointError("the exported tokenizer lacks tokens of the run's; export the model by --to hf")
        rendered = list[tuple[np.ndarray, np.ndarray]]()
        if self.is_sft:
            plain = f"model.path={folder}", "sft.chat_template=null", "sft.chat_template_kwargs={}"
            rows, _ = self._conversations(*plain)
            rendered = [(new.tokens, row.tokens) for new, row in zip(rows, self._rows, strict=True)]
        elif self.config.get("agent", {}).get("kind", "single_turn") == "single_turn":  # others add to the row
            rendered = [(render(read, a.prompt.messages or []), a.turns[0].context_ids) for a in self._answers]
        for new, own in rendered:
            if not np.array_equal(new, own):
                raise CheckpointError(
                    f"the exported chat template is not the run's: it renders {read.decode(new.tolist())[-120:]!r}, "
                    f"but the run had {read.decode(own.tolist())[-120:]!r}"
                )
        if rendered:
            self.proof.append(f"renders {len(rendered)} prompts of the run to the same tokens; the same stop ids")

    def _commands(self, out: Path) -> list[str]:
        base, name = self.config["model"]["path"], self.run.name
        base = base if out == self.out else Path(base).name if base.startswith("/") else base  # for a card
        if self.to == "gguf":
            create = f"ollama create {name.lower()} --file {out / 'Modelfile'} && ollama run {name.lower()}"
            flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in self.sampling.items())
            return [f"llama-server --model {out / self.file} --jinja{flags.replace('temperature', 'temp')}", create]
        if self.to == "hf":
            return [f"vllm serve {out}", f"python -m sglang.launch_server --model-path {out}"]
        rank = self.config["model"]["lora"]["rank"]
        return [
            f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={out}",
            f"python -m sglang.launch_server --model-path {base} --lora-paths {name}={out}",
        ]

    def _card(self) -> str:
        base, verdict = Path(self.config["model"]["path"]), read_verdict(self.run)
        license = "other" if any(base.glob("LICENSE*")) else None
        with suppress(Unreadable, LookupError):  # the head of the base model's own card
            license = re.findall(r"^license: *(\S+)", read_text(base / "README.md").split("---")[1], re.MULTILINE)[0]
        head = {"library_name": {"adapter": "peft", "gguf": "gguf"}.get(self.to, "transformers"), "license": license}
        head["base_model"] = str(base) if HUB_ID.fullmatch(str(base)) else None
        settings = [s for s in read_settings(self.run / "config.yaml") if s.key.startswith(_SHOWN)]
        packages = {name: version(name) for name in ("meshrl", "torch", "transformers")}
        values = {
            "head": "\n".join(f"{key}: {value}" for key, value in head.items() if value),
            "name": self.run.name,
            "method": "supervised fine-tuning" if self.is_sft else "reinforcement learning",
            "base": base.name if base.is_absolute() else base,
            "step": self.subject.step,
            "license": license or "not known",
            "scores": "The run had no held-out evaluation." if verdict is None else verdict.text,
            "settings": "\n".join(  # without the folders of this machine
                f"{s.key}: {Path(s.value).name if s.value.startswith('/') else s.value}"
                for s in settings
                if not s.origin.startswith(("default", "unused"))
            ),
            "proof": "\n".join(f"- {line}" for line in self.proof),
            "commands": "\n".join(f"    {line}" for line in self._commands(Path(self.out.name))),
            "versions": ", ".join(f"{name} {number}" for name, number in packages.items()),
        }
        return files("meshrl.tools").joinpath("model_card.md").read_text(encoding="utf-8").format(**values)
