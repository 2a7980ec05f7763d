"""view.html: all answers of a run, found, filtered and read token by token, in headless Chromium."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from chromium import Chromium, Page, chromium
from golden import check_golden, without_blanks
from scripted_agent import IdTokenizer, scripted_trajectories

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.cli import main
from meshrl.config.algo import AlgoConfig
from meshrl.core import columns
from meshrl.core.columns import TokenColumn
from meshrl.core.errors import ConfigError, Failure
from meshrl.core.types import Prompt, Trajectory, Turn
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.token_log import TrainerValues, tokens_file
from meshrl.tools.viewer import page as page_module
from meshrl.tools.viewer.page import MAX_NATS, log_ratio_bytes, read_chunks, rollout_files, root_bytes, write_view
from tests.made_runs import about_image, image_media

__all__ = ["chromium"]
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    "\x00\x1b[2J\u202egnp.exe\u2066<b>{{x}}</b>&lt;\ufeff<!--"
)
VISIBLE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    "\\x00\\x1b[2J\\u202egnp.exe\\u2066<b>{{x}}</b>&lt;\\ufeff<!--"
)


def letters(ids: np.ndarray) -> str:
    """A token for each character."""
    return "".join(map(chr, ids.tolist()))


def conversation(prompt: Prompt, group: str, index: int, *texts: str, reward: float = 0.0) -> Trajectory:
    """A conversation: each text is a turn after the one before, with the message of a tool between them."""
    turns = []
    for i, text in enumerate(texts):
        ids = np.array([ord(c) for c in text], np.int32)
        tool = {"role": "tool", "name": "calculator", "content": f"tool answer {i}"}
        turns.append(
            Turn(
                parent=i - 1,
                context_ids=np.array([5, 6], np.int32),
                output_ids=ids,
                logprobs=-np.arange(len(ids), dtype=np.float32) / 4,
                versions=np.arange(len(ids), dtype=np.int32) % 3,
                stop_reason="stop" if index % 2 == 0 else "length",
                messages=[*([tool] if i else ()), {"role": "assistant", "content": text}],
            )
        )
    made = Trajectory(prompt=prompt, group_id=group, index=index, turns=turns, rewards={"right": reward}, reward=reward)
    made.status = "done" if index % 2 == 0 else "truncated"
    return made


def prompt_of(name: str, ordinal: int, question: str) -> Prompt:
    return Prompt(id=name, ordinal=ordinal, messages=[{"role": "user", "content": question}], answer="four")


def write_step(folder: Path, step: int, trajectories: list[Trajectory]) -> Path:
    samples, _ = flatten(trajectories)
    assign_advantages(samples, AlgoConfig())
    values = TrainerValues(version=step + 1, samples=samples)
    for i, sample in enumerate(samples):
        sample.loss_weight = sample.mask.astype(np.float32)
        sampled = sample.rollout_logprobs[sample.mask]
        values.add(samples, {i: np.stack([sampled + 0.1, np.full(len(sampled), 1.5, np.float32)])})
    path = RolloutLog(folder, letters).write(step, trajectories, trainer=values)
    assert path is not None
    return path


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with two groups each, and an evaluation."""
    folder = tmp_path_factory.mktemp("page") / "<i>run"
    for step in (1, 2):
        groups = []
        for name, question in (("sum", "What is 2+2?"), ("name", "Where was Ada?")):
            prompt = prompt_of(name, step, question)
            for i in range(3):
                texts = (CALL, f"It is {i} 🙂 here") if name == "sum" else (f"Ada {'x' * 10 * i}",)
                groups.append(conversation(prompt, f"{name}@{step}", i, *texts, reward=i / 2 * step))
        write_step(folder, step, groups)
    held_out = [conversation(prompt_of("sum", 0, "What is 2+2?"), "eval:sum@0", i, "four") for i in range(2)]
    RolloutLog(folder, letters).write(2, held_out, name="eval")
    write_view(folder)
    return folder


def opened(chromium: Chromium, run: Path, fragment: str = "", **size: int) -> Page:
    page = chromium.open(run / "view.html", fragment, **size)
    page.wait_for("document.documentElement.dataset.texts")
    if fragment:
        page.wait_for("document.documentElement.dataset.open")
    return page


def text_of(page: Page, selector: str) -> list[str]:
    found: list[str] = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    return found


def filtered(page: Page, field: str, value: str) -> int:
    """The number of answers after this input, which waits for the delay of typing."""
    page.evaluate(
        f"new Promise((done) => {{ const field = document.getElementById('{field}');"
        "new MutationObserver((_, seen) => { seen.disconnect(); setTimeout(done); })"
        ".observe(document.getElementById('count'), { childList: true });"
        f"field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input', {{ bubbles: true }})); }})"
    )
    return int(page.evaluate("document.getElementById('count').textContent").split()[0])


def test_a_link_opens_its_token_with_its_values(chromium: Chromium, run: Path):
    page = opened(chromium, run, "2/1/1&turn=1&token=6")
    assert text_of(page, ".t.marked") == ["1"] and text_of(page, ".row[aria-selected=true] b") == ["1"]
    (bar,) = text_of(page, "#bar")
    for fact in (
        'token 6 "1"',
        "logprob −1.49 ",
        "trainer −1.39",
        "ratio 1.10",
        "entropy 1.49",
        "advantage 0",
        "version 0",
    ):
        assert fact in bar, bar
    assert page.evaluate("location.hash") == "#2/1/1&turn=1&token=6"
    assert page.errors == []


def test_a_character_outside_the_basic_plane_is_one_token(chromium: Chromium, run: Path):
    page = opened(chromium, run, "1/1/2&turn=1&token=8")
    assert text_of(page, ".t.marked") == ["🙂"]
    assert "".join(text_of(page, ".card.chosen .turn:last-of-type .t")) == "It is 2 🙂 here"


def test_large_and_small_numbers_keep_their_size(chromium: Chromium, tmp_path: Path):
    prompt = prompt_of("sum", 1, "?")
    made = [conversation(prompt, "sum@1", i, "abc", reward=reward) for i, reward in enumerate((100.0, -2e-10))]
    for trajectory in made:
        trajectory.turns[0].logprobs[:] = -25.0
    RolloutLog(tmp_path, letters).write(1, made)
    write_view(tmp_path)
    page = opened(chromium, tmp_path, "1/1/0&turn=0&token=0")
    assert [title.partition("reward ")[2].partition(" ")[0] for title in text_of(page, ".card > h3")] == [
        "100done",
        "−2e-10truncated",
    ]
    assert "logprob −25 (p 1.39e-11)" in text_of(page, "#bar")[0]


def test_a_further_column_is_shown_for_each_token(chromium: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    added = TokenColumn(name="surprise", dtype=np.float32, made_by="sampler", read_by=("log", "view"))
    monkeypatch.setattr(columns, "COLUMNS", (*columns.COLUMNS, added))
    made = conversation(prompt_of("sum", 1, "What?"), "sum@1", 0, "four 4")
    made.turns[0].extras["surprise"] = np.arange(6, dtype=np.float32) / 8
    write_step(tmp_path, 1, [made])
    write_view(tmp_path)
    (bar,) = text_of(opened(chromium, tmp_path, "1/1/0&turn=0&token=5"), "#bar")
    for fact in ("logprob −1.26", "entropy 1.49", "surprise 0.625", "version 2"):
        assert fact in bar, bar


def test_the_answers_of_a_group_are_side_by_side_with_their_rewards_tools_and_turns(chromium: Chromium, run: Path):
    page = opened(chromium, run, "1/1/2")
    check_golden("view.txt", without_blanks(page.evaluate("document.body.innerText")))
    tops = page.evaluate("[...document.querySelectorAll('article.card')].map((e) => e.getBoundingClientRect().top)")
    assert len(set(tops)) == 1


def test_a_prompt_links_to_its_other_steps_and_evaluations(chromium: Chromium, run: Path):
    page = opened(chromium, run, "1/1/0")
    assert text_of(page, ".chips a") == ["step 1: 0.5 (3)", "eval 2: 0 (2)", "step 2: 1 (3)"]
    page.evaluate("document.querySelectorAll('.chips a')[1].click()")
    page.wait_for("document.documentElement.dataset.open.startsWith('#eval_2/1/0')")
    assert text_of(page, "#group h2") == ["sum evaluation after step 2 · group 1 · 2 answers"]
    page.evaluate("document.querySelector('.tokens').focus()")
    (bar,) = text_of(page, "#bar")
    assert "trainer –" in bar and "entropy –" in bar and "not trained" in bar and "logprob 0" in bar


def test_filters_search_and_order_the_list(chromium: Chromium, run: Path):
    page = opened(chromium, run)
    assert text_of(page, "#count") == ["14 of 14 answers, mean reward 0.643"]
    assert filtered(page, "text", "WHERE was") == 6, "a hit in a prompt shows its group"
    assert filtered(page, "text", "tool answer") == 6
    assert filtered(page, "text", "it is 2") == 2
    assert filtered(page, "text", "") == 14
    assert filtered(page, "low", "1") == 6
    assert filtered(page, "low", "") == 14
    assert filtered(page, "kind", "eval") == 2
    assert filtered(page, "kind", "") == 14
    assert filtered(page, "long", "4") == 4
    assert filtered(page, "long", "") == 14
    page.evaluate("document.getElementById('wrong').checked = true")
    assert filtered(page, "text", "") == 8, "those with a reward below 1"
    page.evaluate("document.getElementById('wrong').checked = false")
    stop = page.evaluate("[...document.getElementById('stop').options].find((o) => o.text === 'length').value")
    assert filtered(page, "stop", stop) == 5
    assert filtered(page, "stop", "") == 14
    assert filtered(page, "age", "1") == 12
    assert filtered(page, "to", "1") == 6
    assert filtered(page, "sort", "-reward") == 6
    assert text_of(page, ".row b")[:3] == ["1", "1", "0.5"]


def test_the_first_answer_is_open_and_without_a_match_none_is(chromium: Chromium, run: Path):
    page = opened(chromium, run)
    page.wait_for("document.documentElement.dataset.open === '#1/1/0'")
    assert text_of(page, ".row[aria-selected=true] .asked") == ["sum: What is 2+2?"]
    assert filtered(page, "text", "not in any answer") == 0
    assert text_of(page, "#group") == ["No answers match."]
    assert filtered(page, "text", "Ada xxxxxxxxxxxxxxxxxxxx") == 2
    page.wait_for("document.documentElement.dataset.open === '#1/2/2'")
    assert text_of(page, "#group h2") == ["name step 1 · group 2 · 3 answers"]


def test_the_names_that_the_page_shows_are_those_of_the_terminal(
    chromium: Chromium, run: Path, capsys: pytest.CaptureFixture[str]
):
    page = opened(chromium, run)
    shown = [text.split(" · ")[0] for text in text_of(page, ".row .facts")]
    printed = []
    for which in (["--step", "1"], ["--eval", "2"], ["--step", "2"]):
        assert main(["view", str(run), *which]) == 0
        heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("── answer ")]
        printed += [head.removeprefix("── answer ").partition(":")[0] for head in heads]
    assert shown == printed[: len(shown)] and len(printed) == 14
    for name in ("2/2/1", "2/name@2/1", "2/name/1"):
        linked = opened(chromium, run, quote(name))
        assert text_of(linked, ".card.chosen h3 a") == ["2/2/1"]


def test_the_same_fault_of_several_files_is_one_note(run: Path, tmp_path: Path):
    folder = shutil.copytree(run, tmp_path / "older")
    for path in (folder / "rollouts").glob("*.parquet"):
        path.unlink()
    _, note = write_view(folder)
    assert "step_000001.jsonl has no file of token values next to it" in note and note.endswith("(and 2 other files)")


def test_tokens_are_coloured_by_the_chosen_value(chromium: Chromium, run: Path):
    page = opened(chromium, run, "1/2/2")
    shades = {}
    for name in ("logprob", "ratio", "entropy", "advantage", "mask", "version", "none"):
        page.evaluate(
            f"(() => {{ const s = document.getElementById('colour'); s.value = '{name}';"
            "s.dispatchEvent(new Event('change')); })()"
        )
        shades[name] = page.evaluate(
            "[...document.querySelectorAll('.card.chosen .t')].map((e) => getComputedStyle(e).backgroundColor)"
        )
    assert len(set(shades["logprob"])) > 4 and len(set(shades["version"])) == 3
    assert all(len(set(shades[name])) == 1 for name in ("ratio", "entropy", "advantage", "mask", "none"))
    assert len({shades[name][0] for name in ("ratio", "none", "entropy")}) == 3
    first = page.evaluate("getComputedStyle(document.querySelector('article.card .t')).backgroundColor")
    assert first == shades["none"][0]


def test_the_keyboard_chooses_answers_and_tokens(chromium: Chromium, run: Path):
    page = opened(chromium, run, "1/1/0")
    page.evaluate("document.getElementById('list').focus()")
    page.press("ArrowDown")
    page.wait_for("document.documentElement.dataset.open === '#1/1/1'")
    page.evaluate("document.querySelector('.card.chosen .turn:last-of-type .tokens').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    page.press("ArrowLeft")
    assert "token 2 " in text_of(page, "#bar")[0]
    page.press("Enter")
    assert page.evaluate("location.hash") == "#1/1/1&turn=1&token=2"
    assert text_of(page, ".t.marked") == [" "]


def test_a_tree_of_turns_shows_which_turn_each_one_continues(chromium: Chromium, tmp_path: Path):
    trajectories = scripted_trajectories(1, 1)
    trajectories[0].turns[0].source, trajectories[0].turns[0].times.tool_s = "POST /v1/messages 1a2b3c4d", 0.25
    trajectories[0].turns[0].times.total_s, trajectories[0].metrics = 1.0, {"steps": 3.5}
    RolloutLog(tmp_path, lambda ids: IdTokenizer().decode(ids)).write(1, trajectories)
    write_view(tmp_path)
    page = opened(chromium, tmp_path, f"1/{quote(trajectories[0].group_id)}/0&turn=3&token=0")
    heads = [text for text in text_of(page, ".turn > .role") if text.startswith("turn")]
    assert [head.split(" · ")[0] for head in heads] == ["turn 0", "turn 1", "turn 3", "turn 2"]
    assert ["continues turn 0" in head for head in heads] == [False, True, True, False]
    assert heads[0].endswith(", then 0.25 s of tools · POST /v1/messages 1a2b3c4d")
    assert "metric steps" in text_of(page, ".terms")[0]
    assert text_of(page, "#bar")[0].startswith("token 0 ") and page.errors == []


def test_hostile_texts_are_visible_and_do_nothing(chromium: Chromium, tmp_path: Path):
    """In prompts, answers, tools, names of terms and groups, failures and the run's name; also half of a surrogate pair
    and a very long line."""
    folder = tmp_path / "<script>window.hacked = 1<"
    prompt = Prompt(id=HOSTILE, ordinal=1, messages=[{"role": HOSTILE, "content": HOSTILE}], answer={HOSTILE: HOSTILE})
    bad = conversation(prompt, f"{HOSTILE}@1", 0, HOSTILE, HOSTILE, reward=-120.0)
    bad.turns[1].messages[0] |= {"name": HOSTILE, "content": [{"text": HOSTILE}], "tool_calls": [HOSTILE]}
    bad.rewards = {HOSTILE: 100.0, "broken": Failure(kind="crash", message=HOSTILE)}
    bad.failure = Failure(kind="agent", message=HOSTILE)
    half = conversation(
        prompt, f"{HOSTILE}@1", 1, "half \ud800 of a pair", "y" * 300_000, f"<tool_call>{HOSTILE}</tool_call>"
    )
    RolloutLog(folder, letters).write(1, [bad, half])
    assert len(write_view(folder)) == 1
    source = (folder / "view.html").read_bytes()
    assert not {*b"\x00\x1b"} & {*source} and "\u202e" not in source.decode()
    page = chromium.open(folder / "view.html")
    title = page.evaluate("document.title")
    page.evaluate("document.querySelector('.row').click()")
    page.wait_for("document.documentElement.dataset.open")
    assert page.evaluate("typeof window.hacked") == "undefined" and page.dialogs == [] and page.errors == []
    assert page.evaluate("document.title") == title == "<script>window.hacked = 1< · view"
    assert page.evaluate("document.querySelectorAll('img, #group script, #group b b').length") == 0
    shown = page.evaluate("document.getElementById('group').textContent")
    assert shown.count(VISIBLE) >= 8, shown[:2000]
    assert "reward −120" in shown and f"reward terms{VISIBLE}100broken" in shown
    assert "half ? of a pair" in shown and "more tokens" in shown
    assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
    page.evaluate("document.querySelector('.tokens').focus()")
    assert text_of(page, "#bar")[0].startswith('token 0 "<"')
    assert page.evaluate("typeof window.hacked") == "undefined"


def test_the_page_is_usable_on_a_phone_and_loads_nothing(chromium: Chromium, run: Path):
    page = opened(chromium, run, "1/1/0", width=400, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    loaded = page.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
    assert loaded == [] and page.errors == []
    assert page.evaluate("document.title") == "<i>run · view"


def test_a_link_to_an_answer_that_the_page_does_not_have_is_a_sentence(chromium: Chromium, run: Path):
    page = chromium.open(run / "view.html", "9/none/0")
    page.wait_for("document.querySelector('#group .bad')")
    assert text_of(page, "#group") == ["This page does not have 9/none/0."]


def test_only_some_steps_and_another_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "one.html"
    assert main(["view", str(run), "--steps", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    index = index_of(out)
    assert {(file["kind"], file["step"]) for file in index["files"]} == {("step", 2), ("eval", 2)}
    for wrong, text in (("x", "write a step or a range"), ("7-9", "has the steps 1 to 2")):
        with pytest.raises(ConfigError, match=text):
            write_view(run, out, wrong)
    with pytest.raises(ConfigError, match="the range ends before it begins; write 1-2"):
        write_view(run, out, "2-1")
    assert write_view(run, steps="1-1") == [f"wrote {run / 'view_1-1.html'}"], "view.html has all steps"


def index_of(path: Path) -> dict:
    text = path.read_text(encoding="utf-8").partition('id="index">')[2].partition("</script>")[0]
    return json.loads(text)


def test_what_can_be_read_of_a_damaged_folder_is_shown(chromium: Chromium, run: Path, tmp_path: Path):
    folder = shutil.copytree(run, tmp_path / "damaged")
    first, second = (folder / "rollouts" / f"step_00000{i}.jsonl" for i in (1, 2))
    with first.open("a", encoding="utf-8") as file:
        file.write('{"schema": 1, "turns": [{"te')  # killed in the middle of a line
    tokens_file(first).unlink()  # of an older version
    lines = second.read_text(encoding="utf-8").splitlines(keepends=True)
    second.write_text("".join([*lines[:4], '{"of": "another program"}\n', *lines[4:]]), encoding="utf-8")
    tokens_file(second).write_bytes(tokens_file(second).read_bytes()[:-50])
    (folder / "rollouts" / "eval_000002.jsonl").write_text("")
    _, *notes = write_view(folder)
    assert len(notes) == 4
    assert "step_000001.jsonl has no file of token values next to it" in notes[0]
    assert "step_000001.jsonl:7: the line is incomplete: its writer was killed, or is writing it; the file" in notes[1]
    assert "step_000002.tokens.parquet: no file of token values" in notes[2]
    assert "step_000002.jsonl:5: schema None; this version reads schema 1; the file is shown up to there" in notes[3]
    page = opened(chromium, folder, "1/1/0")
    assert text_of(page, "#count")[0].startswith("10 of 10 answers")
    assert text_of(page, ".t") == [] and "It is 0" in text_of(page, ".card.chosen")[0] and page.errors == []
    assert len(text_of(page, "p.note")) >= 3


def test_values_of_other_answers_are_not_used(run: Path, tmp_path: Path):
    """The file of a killed run may belong to other answers of the same step."""
    folder = shutil.copytree(run, tmp_path / "mixed")
    shutil.copy(folder / "rollouts" / "step_000001.jsonl", tmp_path / "rollouts")
    prompt = prompt_of("sum", 1, "?")
    write_step(folder, 1, [conversation(prompt, "sum@1", i, "other text", "with another length") for i in range(3)])
    shutil.copy(tmp_path / "rollouts", folder / "rollouts" / "step_000001.jsonl")
    write_view(folder, steps="1")
    ages = index_of(folder / "view_1.html")["answers"]["age"]
    assert ages == [None] * 6


def test_a_page_over_its_limit_has_the_last_steps_and_states_the_rest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page_module, "MAX_PAGE_BYTES", 2600)
    _, note = write_view(run, tmp_path / "view.html")
    assert (
        "answers of the steps 1-1 are left out. See them by: meshrl view" in note and "--steps 1-1 --out FILE" in note
    )
    columns = index_of(tmp_path / "view.html")
    assert [columns["files"][i]["step"] for i in columns["groups"]["file"]] == [2, 2, 2]


def test_bytes_stand_for_values_with_the_error_that_the_page_states():
    values = np.linspace(0, MAX_NATS, 5000)
    back = MAX_NATS * (root_bytes(values) / 254.0) ** 2
    assert np.abs(back - values).max() < 0.1 and np.abs(back - values)[values < 1].max() < 0.02
    assert root_bytes(np.array([np.nan, 99.0, -1.0])).tolist() == [255, 254, 0]
    size = np.geomspace(2e-6, 9.9, 500)
    for sign in (1, -1):
        found = log_ratio_bytes(sign * size).astype(int) - 128
        ratio = sign * np.sign(found) * 1e-6 * 10 ** ((np.abs(found) - 1) / 18) / size
        assert np.abs(ratio - 1).max() < 0.07
    assert log_ratio_bytes(np.array([np.nan, 0.0, 99.0, -99.0])).tolist() == [0, 128, 255, 1]


@pytest.fixture
def run_with_images(tmp_path: Path) -> Path:
    """The thumbnail of the second prompt's image is gone."""
    made = [
        about_image(image_media("a", 1)),
        about_image(image_media("a", 1), index=1),
        about_image(image_media("b", 2)),
    ]
    for step in (1, 2):
        RolloutLog(tmp_path, letters).write(step, made)
    (tmp_path / "rollouts" / "images" / "b.jpg").unlink()
    write_view(tmp_path)
    return tmp_path


def test_a_page_has_each_thumbnail_once(run_with_images: Path):
    source = (run_with_images / "view.html").read_text()
    data = base64.b64encode(image_media("a", 1).thumbnail).decode()
    assert source.count(data) == 1 and f'id="image-a">{data}</script>' in source and 'id="image-b"' not in source


def test_thumbnails_count_for_the_limit_of_the_page(run_with_images: Path, monkeypatch):
    size = len(base64.b64encode(image_media("a", 1).thumbnail))
    chunks = [chunk for file in rollout_files(run_with_images, ("", 1.0)) for chunk in read_chunks(file)]
    first, last = (len(chunk.texts) + len(chunk.values) + 160 * 3 for chunk in chunks)
    monkeypatch.setattr(page_module, "MAX_PAGE_BYTES", last + size)
    assert "answers of the steps 1-2 are left out" in write_view(run_with_images)[1]
    monkeypatch.setattr(page_module, "MAX_PAGE_BYTES", page_module.MAX_PAGE_BYTES + 1)
    assert "answers of the steps 1-1 are left out" in write_view(run_with_images)[1]
    monkeypatch.setattr(page_module, "MAX_PAGE_BYTES", first + last + size + 1)
    assert len(write_view(run_with_images)) == 1, "an image of both steps counts once"


def test_images_are_shown_in_their_message_as_one_box(chromium: Chromium, run_with_images: Path):
    page = opened(chromium, run_with_images, "2/1/1")
    assert page.evaluate("document.querySelector('#group .image img').naturalWidth") == 40
    assert text_of(page, "#group .image") == ["images/7.png · 16 tokens"]
    assert text_of(page, "#group .card:not(article) .text-box")[0] == "how many in a?"
    assert text_of(page, ".row .asked")[0].endswith(": [image images/7.png]how many in a?")
    gone = opened(chromium, run_with_images, "2/2/0")
    assert text_of(gone, "#group .image") == ["no thumbnail: images/7.png · 16 tokens"]
    assert page.errors == gone.errors == []
    assert filtered(page, "text", "many in b") == 2 and filtered(page, "text", "image-0") == 0
