"""attention_*.html: which answer, which weights, and the maps of the page equal those of the model."""

import base64
import json
import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from tiny_models import tiny_lm
from tiny_run import train, write_run
from tiny_tokenizers import tiny_tokenizer

from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.model.attention_maps import read_weights
from meshrl.model.recipe import load_causal_lm
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import JsonlSink
from meshrl.tools.viewer.attention import choose_weights, find_answer, write_attention
from tests.made_runs import about_image, image_media


def model_folder(folder, seed=0, **changes):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_lm("llama", vocab_size=len(tokenizer), seed=seed, **changes).save_pretrained(folder)
    return folder


def turn(context, output, version=0, parent=-1):
    return Turn(
        parent=parent,
        context_ids=np.array(context, np.int32),
        output_ids=np.array(output, np.int32),
        logprobs=np.zeros(len(output), np.float32),
        versions=np.full(len(output), version, np.int32),
        stop_reason="stop",
    )


def attempt(prompt, index, *turns):
    return Trajectory(prompt=prompt, group_id=f"{prompt.id}@0", index=index, turns=list(turns), reward=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with the model of step 2. Step 3 was sampled with the weights after step 2, and has an
    answer of two turns; that of step 1 with those of model.path."""
    folder = tmp_path_factory.mktemp("runs") / "made"
    base = model_folder(folder.parent / "base")
    model_folder(folder / "checkpoints" / "step_000002" / "model", seed=1)
    config = f'model:\n  path: "{base}"    # my.yaml:1\n'
    (folder / "config.yaml").write_text(config)
    prompts = [Prompt(id=f"row-{i}", ordinal=0, messages=[{"role": "user", "content": "2+2"}]) for i in range(2)]
    two_turns = attempt(prompts[1], 1, turn([5, 6, 7], [8, 9], 7), turn([10, 11], [12, 13, 14], 7, parent=0))
    log = RolloutLog(folder, lambda ids: "text")
    log.write(1, [attempt(prompts[0], 0, turn([5, 6], [7, 8, 9], 5))])
    log.write(3, [attempt(prompts[0], 0, turn([5, 6], [7], 7)), two_turns, attempt(prompts[1], 2)])
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        values = {"sync/version": 5.0 + step, **({"first_sync/version": 5.0} if step == 1 else {})}
        sink.write(step, values, dict.fromkeys(values, "version"))
    sink.close()
    return folder


def block_of(page, name):
    return re.search(rf'<script type="[^"]+" id="{name}">(.*?)</script>', page, re.DOTALL)[1]


def test_the_page_has_the_maps_of_all_turns_under_the_weights_that_sampled_them(run, tmp_path):
    lines = write_attention(run, "3/row-1@0/1", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    facts = json.loads(block_of(page, "attention"))
    ids = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    tokenizer = tiny_tokenizer()
    assert facts["tokens"] == [tokenizer.decode([i]) for i in ids]
    assert facts["sampled"] == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    model, wanted = load_causal_lm(run / "checkpoints" / "step_000002" / "model"), {}
    read_weights(model, torch.tensor(ids), lambda layer, weights: wanted.update({layer: weights}))
    for layer, weights in wanted.items():
        data = zlib.decompress(base64.b64decode(block_of(page, f"map{layer}")))
        shown = (np.frombuffer(data, np.uint8).reshape(5, 10, 10) / 255) ** 2
        np.testing.assert_allclose(shown[:4], weights.numpy(), atol=4.1e-3)
        np.testing.assert_allclose(shown[4], weights.mean(0).numpy(), atol=4.1e-3)
    assert lines[0] == f"wrote {tmp_path / 'page.html'}"
    assert re.fullmatch(r"Computed in fp32 with the weights after step 2 \(.*\), which sampled this answer\.", lines[1])
    assert lines[1] in page


def test_the_page_states_which_weights_are_missing(run):
    answer = find_answer(run, "1/1/0")
    assert answer.trajectory.id == find_answer(run, "1/row-0/0").trajectory.id, "also by the prompt's id"
    weights, wanted = choose_weights(run, answer)
    assert (weights.step, wanted) == (0, 0)
    lines = write_attention(run, "1/1/0")
    assert "the weights before the first step" in lines[1] and (run / "attention_1_1_0.html").is_file()


def test_the_nearest_weights_replace_those_that_were_not_saved(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step_000002").rename(copy / "checkpoints" / "step_000008")
    weights, wanted = choose_weights(copy, find_answer(copy, "3/2/1"))
    assert (weights.step, wanted) == (0, 2)
    shutil.rmtree(copy / "attention_1_1_0.html", ignore_errors=True)
    lines = write_attention(copy, "3/2/1")
    assert "the nearest that the run has saved: this answer was sampled by the weights after step 2" in lines[1]


def test_without_metrics_an_answer_belongs_to_the_weights_of_the_step_before(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "metrics.jsonl").write_text("not JSON\n")
    assert choose_weights(copy, find_answer(copy, "3/1/0"))[1] == 2


@pytest.mark.parametrize(
    ("which", "error"),
    [
        ("3", "write STEP/GROUP/ANSWER"),
        ("2/1/0", r"has no rollouts of step 2 \(monitor.rollout_log_every_steps\); there are: 1, 3"),
        ("eval_2/1/0", r"has no evaluation after step 2 \(loop.eval_every_steps\); there are: none"),
        ("3/3/0", r"has no answer 3/3/0; there are: 3/1/0, 3/2/1, 3/2/2"),
        ("3/row-9/0", r"has no answer 3/row-9/0"),
        ("3/2/0", r"rollouts of step 3 has no answer 3/2/0"),
        ("3/2/2", r"has no turn, so there are no tokens"),
    ],
)
def test_an_answer_that_does_not_exist_is_refused_with_those_that_do(run, which, error):
    with pytest.raises(MeshrlError, match=error):
        write_attention(run, which)


def test_a_run_whose_model_is_gone_and_that_has_saved_none_is_refused(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints")
    (copy / "config.yaml").write_text('model:\n  path: "/gone/model"    # my.yaml:1\n')
    with pytest.raises(MeshrlError, match=r"model.path '/gone/model' does not exist"):
        write_attention(copy, "3/1/0")


def test_a_folder_that_is_no_model_is_refused(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step_000002" / "model" / "config.json").write_text("{}")
    with pytest.raises((ConfigError, MeshrlError), match="step_000002"):
        write_attention(copy, "3/1/0")


def test_damaged_lines_after_the_answer_do_not_matter(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with (copy / "rollouts" / "step_000003.jsonl").open("a") as file:
        file.write('{"schema": 99}\n')
    assert find_answer(copy, "3/1/0").trajectory.prompt.id == "row-0"
    with pytest.raises(MeshrlError, match=r"has no answer 3/1/5; .*schema 99"):
        find_answer(copy, "3/1/5")


def test_hostile_texts_do_not_reach_the_page_as_markup(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    prompt = Prompt(id='</script><script>alert("x")</script>\u202e', ordinal=0)
    RolloutLog(copy, lambda ids: "text").write(
        4, [attempt(prompt, 0, turn(tiny_tokenizer()("\x1b").input_ids, [7], 7))]
    )
    write_attention(copy, "4/1/0", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in page and "\u202e" not in page
    assert "\\x1b" in json.loads(block_of(page, "attention"))["tokens"]


def test_a_checkpoint_without_a_model_is_converted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = "loop.num_steps=1", "loop.save_every_steps=1"
    run = train(write_run(tmp_path), "made", "cluster.executor=inline", *saved)
    shutil.rmtree(run / "checkpoints" / "step_000001" / "model", ignore_errors=True)
    (run / "rollouts" / "step_000001.jsonl").rename(run / "rollouts" / "eval_000001.jsonl")
    (run / "metrics.jsonl").unlink()
    weights, wanted = choose_weights(run, find_answer(run, "eval_1/1/0"))
    assert (weights.step, weights.place, wanted) == (1, str(run / "checkpoints" / "step_000001" / "state"), 1)
    lines = write_attention(run, "eval_1/1/0")
    assert lines[0] == f"wrote {run / 'attention_eval_1_1_0.html'}" and "after step 1" in lines[1]


def test_an_answer_about_an_image_is_refused_with_the_reason(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    RolloutLog(folder, lambda ids: "text").write(4, [about_image(image_media("a", 1))])
    with pytest.raises(MeshrlError, match="answer 4/1/0 is about images, which the log has as thumbnails only"):
        write_attention(folder, "4/1/0")
