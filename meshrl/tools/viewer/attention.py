"""attention_STEP_GROUP_ANSWER.html: what each token of one answer attends to, in every layer and head, written by
`meshrl view RUN --attention STEP/GROUP/ANSWER`. The maps are computed on demand from weights that the run has saved."""

from __future__ import annotations

import json
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from meshrl.agent.flatten import check_turns, leaf_paths, path_ids
from meshrl.config.source import HUB_ID
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.terminal import printable
from meshrl.core.types import Trajectory
from meshrl.data.chat import load_tokenizer
from meshrl.data.decode import text_of
from meshrl.monitor.jsonl import data_errors, read_object
from meshrl.monitor.sinks import read_metrics
from meshrl.run.folder import state_in
from meshrl.tools.convert import convert
from meshrl.tools.page.document import data_block, document, package_text, write_page
from meshrl.tools.report.folder import read_settings
from meshrl.tools.viewer.answers import read_answers, step_name
from meshrl.tools.viewer.page import packed
from meshrl.train.checkpoint_files import MANIFEST, step_folders

MAX_TOKENS = 4096  # of a row; eager attention of 32 heads needs 2 GB for the scores of so many
_HERE = "meshrl.tools.viewer"


@dataclass(frozen=True, slots=True)
class ChosenAnswer:
    """One answer of the rollout log. name: STEP/GROUP/ANSWER. step: finished steps before it was sampled."""

    name: str
    step: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights that exist. step: finished steps. place: a model folder, a hub id, or a checkpoint's state."""

    step: int
    place: str


def write_attention(run: Path, which: str, out: Path | None = None) -> list[str]:
    """Write the page of an answer to `run`/attention_STEP_GROUP_ANSWER.html, or `out`. Returns lines for the user.

    which: STEP/GROUP/ANSWER, as in `Answers.groups`; the group may also be its id or its prompt's.
    """
    answer = find_answer(run, which)
    weights, wanted = choose_weights(run, answer)
    ids, sampled, notes = _row(answer.trajectory)
    if any(turn.media_spans for turn in answer.trajectory.turns):
        raise MeshrlError(
            f"answer {answer.name} is about images, which the log has as thumbnails only; attention is computed for "
            "prompts of text alone. `meshrl view` shows them with the answer"
        )
    from meshrl.model.attention_maps import attention_maps  # imports torch
    from meshrl.model.recipe import load_causal_lm

    with tempfile.TemporaryDirectory(prefix="meshrl-attention-") as made:
        place = weights.place
        if (state_in(Path(place)) / MANIFEST).is_file():
            place = f"{made}/model"
            convert(Path(weights.place), Path(place))
        tokenizer = load_tokenizer(place)
        texts = [printable(text_of(tokenizer, ids[i : i + 1], special=True)) for i in range(len(ids))]
        maps = attention_maps(load_causal_lm(place), ids)
    used = f"the weights after step {weights.step}" if weights.step else "the weights before the first step"
    origin = f"Computed in fp32 with {used} ({weights.place})"
    if weights.step == wanted:
        versions = {int(v) for turn in answer.trajectory.turns for v in turn.versions}
        origin += f", which sampled {'the last token' if len(versions) > 1 else 'this answer'}."
    else:
        origin += f", the nearest that the run has saved: this answer was sampled by the weights after step {wanted}."
        origin += " The maps of those may differ."
    notes.insert(0, origin)
    if maps.block > 1:
        notes.append(
            f"A row or column of a map stands for {maps.block} tokens and shows the largest weight between two such "
            "blocks, so the rows do not sum to 1."
        )
    if without := [str(i) for i, layer in enumerate(maps.layers) if layer is None]:
        notes.append(f"The layers {', '.join(without)} have no softmax attention, so they have no map.")
    if any(layer is not None and layer.unshown is not None for layer in maps.layers):
        notes.append("Some heads have an attention sink, which takes weight that no token gets; it is shown per head.")
    path = out or run / f"attention_{answer.name.replace('/', '_')}.html"
    return [f"wrote {write_page(path, _page(run, answer, texts, sampled, maps, notes))}", *notes]


# ---- which answer


def find_answer(run: Path, which: str) -> ChosenAnswer:
    """Raises: ConfigError when `which` is no STEP/GROUP/ANSWER; MeshrlError when the run has no such answer; it lists
    what there is."""
    match = re.fullmatch(r"(?:(eval)_)?(\d{1,9})/(.+)/(\d{1,9})", which)
    if match is None:
        raise ConfigError(f"--attention {which!r}: write STEP/GROUP/ANSWER, such as 12/3/0, or eval_12/3/0")
    kind, step, group, index = match[1] or "step", int(match[2]), match[3], int(match[4])
    answers = read_answers(run, kind, step)
    trajectories = [(name, logged.trajectory) for name, members in answers.groups.items() for logged in members]
    named = {f"{name}/{trajectory.index}": trajectory for name, trajectory in trajectories}
    number = f"{step_name(kind, step)}/{group}/{index}"
    by_id = (name for name, t in named.items() if group in (t.group_id, t.prompt.id) and t.index == index)
    name = number if number in named else next(by_id, None)
    if name is None:
        error = f" ({answers.error})" if answers.error else ""
        names = shorten(", ".join(named), 200, placeholder=" ...")
        raise MeshrlError(f"{answers.title} has no answer {which}; there are: {names}{error}")
    with data_errors(f"{answers.title}, {name}", "a trajectory"):
        check_turns(named[name])
    return ChosenAnswer(name, step if kind == "eval" else step - 1, named[name])


def _row(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The tokens of the row that ends with the last turn, int32[T], which of them were sampled, bool[T], and notes
    about tokens that are not shown."""
    paths = leaf_paths(trajectory.turns)
    if not paths:
        raise MeshrlError(f"{trajectory.id} has no turn, so there are no tokens: its status is {trajectory.status}")
    turns = [trajectory.turns[i] for i in paths[-1]]
    ids = path_ids(trajectory.turns, paths[-1][-1])
    sampled = [flag for turn in turns for flag in ([False] * len(turn.context_ids) + [True] * len(turn.output_ids))]
    notes = []
    if len(paths) > 1:
        notes.append(f"The answer has {len(paths)} branches; this is the one that ends with its last turn.")
    if len(ids) > MAX_TOKENS:
        notes.append(f"The row has {len(ids)} tokens; the first {MAX_TOKENS} are shown. Later ones do not change them.")
    return ids[:MAX_TOKENS], np.array(sampled[:MAX_TOKENS]), notes


# ---- which weights


def choose_weights(run: Path, answer: ChosenAnswer) -> tuple[SavedWeights, int]:
    """The saved weights that are nearest to those that sampled the answer's last token, and the number of finished
    steps of the latter."""
    model = next((s.value for s in read_settings(run / "config.yaml") if s.key == "model.path"), "")
    with data_errors(str(run / "config.yaml"), "the config of a run"):
        model = str(json.loads(model)) if model.startswith('"') else model
    first = 0
    if (run / "result.json").is_file() and "answers" in (result := read_object(run / "result.json")):
        model, first = str(result.get("model", model)), answer.step  # of `meshrl eval`
    saved = []
    has_base = Path(model).is_dir() or bool(HUB_ID.fullmatch(model))  # a folder, or a hub id
    if model and has_base:
        saved.append(SavedWeights(first, model))
    for step, folder in step_folders(run / "checkpoints"):
        if (folder / "model" / "config.json").is_file():
            saved.append(SavedWeights(step, str(folder / "model")))
        elif has_base and (folder / "state" / MANIFEST).is_file():  # to convert it, the first model is needed
            saved.append(SavedWeights(step, str(folder / "state")))
    if not saved:
        raise MeshrlError(
            f"{run} has no weights to compute attention with: model.path {model!r} does not exist, and checkpoints/ "
            "has no model. Restore the folder of model.path"
        )
    wanted = _finished_steps(run, answer)
    return min(saved, key=lambda weights: (abs(weights.step - wanted), weights.step)), wanted


def _finished_steps(run: Path, answer: ChosenAnswer) -> int:
    """After how many finished steps the trainer had the weights that sampled the answer's last token."""
    version = max((int(turn.versions.max()) for turn in answer.trajectory.turns if len(turn.versions)), default=None)
    with suppress(MeshrlError):  # without metrics, the weights of the schedule colocated are assumed
        for line in read_metrics(run / "metrics.jsonl")[0]:
            if line.metrics.get("first_sync/version") == version:
                return 0
            if line.metrics.get("sync/version") == version:
                return line.step
    return answer.step


# ---- the page


def _page(run: Path, answer: ChosenAnswer, texts: list[str], sampled: np.ndarray, maps: Any, notes: list[str]) -> str:
    record = {
        "tokens": texts,
        "sampled": [int(flag) for flag in sampled],
        "block": maps.block,
        "side": maps.side,
        "heads": maps.num_heads,
        "layers": [
            layer and ([] if layer.unshown is None else layer.unshown.round(4).tolist()) for layer in maps.layers
        ],
    }
    blocks = "".join(
        f'<script type="text/plain" id="map{i}">{packed(layer.weights.tobytes())}</script>\n'
        for i, layer in enumerate(maps.layers)
        if layer is not None
    )
    name, reward = run.resolve().name, answer.trajectory.reward
    about = f"answer {answer.name} · group {answer.trajectory.group_id} · {len(texts)} tokens"
    badge = "none" if reward is None else f"{reward:.4g}"
    return document(
        f"{name}: attention of {answer.name}",
        [
            f"<header><h1>{escape(name)}: attention</h1>"
            f'<span class="badge">reward <b>{badge}</b></span><p>{escape(about)}</p></header>',
            *(f'<p class="note">{escape(note)}</p>' for note in notes),
            package_text(_HERE, "attention.html"),
        ],
        style=[package_text(_HERE, "attention.css")],
        scripts=[package_text(_HERE, "attention.js")],
        data=data_block("attention", record) + blocks,
    )
