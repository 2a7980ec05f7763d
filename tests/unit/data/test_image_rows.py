"""Rows with images as prompts: the layouts of public data sets, the errors of bad rows, and the order of a run."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from golden import cases, check_case
from tiny_tokenizers import tiny_tokenizer
from tiny_vision import drawing, encoded, make_vision_folder

from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import DataError
from meshrl.data import datasets
from meshrl.data.chat import load_tokenizer
from meshrl.data.datasets import PromptMaker, load_prompts, load_sft_rows
from meshrl.data.order import content_of, load_eval_prompts, open_feed
from meshrl.data.processor import load_vision
from meshrl.data.tables import RowTable

A, B = drawing(28, 28, 1), drawing(56, 28, 2)  # 1 and 2 placeholders
IMAGE = "<|vision_start|>{}<|vision_end|>"
PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_vision_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of data with two images."""
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.png").write_bytes(encoded(A))
    (tmp_path / "img" / "b.png").write_bytes(encoded(B))
    return tmp_path


def maker(folder: Path, cache_bytes: int = 1 << 30, bad: list[str] | None = None, **config) -> PromptMaker:
    tokenizer = load_tokenizer(folder)
    cfg = DataConfig(**{"answer": None, **config})
    return PromptMaker(cfg, tokenizer, bad=bad, vision=load_vision(str(folder), tokenizer, cache_bytes))


def write(folder: Path, *rows: dict, name: str = "train.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def text_of(make: PromptMaker, prompt) -> str:
    return make.tokenizer.decode(prompt.ids.tolist())


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def test_layouts_of_public_data_sets_become_the_same_prompt(files: Path, folder: Path):
    first, second = IMAGE.format(PAD), IMAGE.format(PAD * 2)
    url = "data:image/png;base64," + base64.b64encode(encoded(B)).decode()
    of_a, of_b = {"type": "image", "image": "img/a.png"}, {"type": "image_url", "image_url": {"url": url}}
    ab = {"type": "text", "text": "ab"}
    rows = [
        {"question": "<image><image>ab", "images": ["img/a.png", "img/b.png"]},
        {"question": [{"role": "user", "content": "<image><image>ab"}], "images": ["img/a.png", {"path": "img/b.png"}]},
        {"question": user(of_a, of_b, ab)},
        {"question": user({"type": "image"}, {"type": "image"}, ab), "images": ["img/a.png", url]},
        {"question": "ab", "images": ["img/a.png", "img/b.png"]},  # TRL's: images come first
        {"question": user(of_a, {"type": "image"}, ab), "images": "img/b.png"},
    ]
    make = maker(folder)
    prompts, _ = load_prompts(write(files, *rows), make)
    for prompt in prompts:
        assert f"user\n{first}{second}ab<|im_end|>" in text_of(make, prompt)
        assert prompt.messages == user(*({"type": "image", "image": f"image-{i}"} for i in (0, 1)), ab)
        assert [name for name, _, _ in prompt.media_spans] == ["image-0", "image-1"]
        assert [length for _, _, length in prompt.media_spans] == [1, 2]
        assert [media.num_tokens for media in prompt.media.values()] == [1, 2]
        assert prompt.meta == {}, "the column of images is not also meta"
        json.dumps(prompt.messages)
    assert len({content_of(prompt) for prompt in prompts}) == 1


def test_images_may_be_in_few_shot_turns_and_answers_of_tools(files: Path, folder: Path):
    shot = [*user({"type": "image", "image": "img/a.png"}), {"role": "assistant", "content": "1"}]
    tool = {"role": "tool", "content": [{"type": "image", "image": "img/a.png"}]}
    make = maker(folder)
    question = user({"type": "text", "text": "2"}, {"type": "image", "image": "img/b.png"})
    (prompt,), _ = load_prompts(write(files, {"question": [*shot, *question, tool]}), make)
    assert [length for _, _, length in prompt.media_spans] == [1, 2, 1]
    assert prompt.media["image-0"].digest == prompt.media["image-2"].digest != prompt.media["image-1"].digest


def test_images_of_hugging_face_data_sets_are_read_without_decoding(files: Path, folder: Path, monkeypatch):
    import datasets as hf

    features = hf.Features({"question": hf.Value("string"), "images": hf.List(hf.Image())})
    saved = hf.Dataset.from_dict({"question": ["<image>ab"] * 2, "images": [[A], [B]]}, features=features)
    saved.save_to_disk(str(files / "saved"))
    saved.to_parquet(str(files / "rows.parquet"))
    single = saved.cast_column("images", hf.List(hf.Image())).map(
        lambda row: {"picture": row["images"][0]}, features=hf.Features({**features, "picture": hf.Image()})
    )
    single.remove_columns("images").save_to_disk(str(files / "single"))
    monkeypatch.setattr(hf.Image, "decode_example", lambda *_, **__: pytest.fail("an image was decoded"))
    for path, more in (("saved", {}), ("rows.parquet", {}), ("single", {"images": "picture"})):
        make = maker(folder, **more)
        prompts, _ = load_prompts(files / path, make)
        assert [prompt.media["image-0"].num_tokens for prompt in prompts] == [1, 2]
        assert prompts[0].meta == {}


def test_rows_in_memory_have_images_as_objects(folder: Path, files: Path):
    rows = [{"question": "ab", "images": [A]}, {"question": "ab", "images": [str(files / "img" / "a.png")]}]
    prompts, _ = load_prompts(RowTable("data", rows), maker(folder))
    assert len({content_of(prompt) for prompt in prompts}) == 1


def test_a_map_may_return_images(folder: Path, files: Path, monkeypatch):
    (files / "own_rows.py").write_text(
        "def make(row):\n    return {'prompt': 'see <image>', 'images': [row['file']]}\n"
    )
    monkeypatch.syspath_prepend(str(files))
    (prompt,), _ = load_prompts(write(files, {"file": "img/a.png"}), maker(folder, map="own_rows:make"))
    assert prompt.messages == user({"type": "text", "text": "see "}, {"type": "image", "image": "image-0"})


def test_text_rows_of_a_model_with_images_are_as_before(files: Path, folder: Path):
    path = write(files, {"question": "ab <image>"}, {"question": user({"type": "text", "text": "ab <image>"})})
    with_images, _ = load_prompts(path, maker(folder))
    text_only, _ = load_prompts(path, PromptMaker(DataConfig(answer=None), load_tokenizer(folder)))
    assert [p.ids.tolist() for p in with_images] == [p.ids.tolist() for p in text_only]
    assert with_images[1].messages == [{"role": "user", "content": "ab <image>"}]


IMAGE_ROWS = Path(__file__).parent / "golden" / "image_rows.txt"


@pytest.mark.parametrize("given", [given for given, _ in cases(IMAGE_ROWS)])
def test_bad_rows_are_an_error_with_file_and_line(files: Path, folder: Path, given: str):
    path = write(files, {"question": "ab", "images": ["img/a.png"]}, json.loads(given))
    with pytest.raises(DataError) as error:
        load_prompts(path, maker(folder))
    check_case(IMAGE_ROWS, given, str(error.value), files=files)
    with pytest.raises(DataError, match=re.escape(str(error.value))):
        open_feed(maker(folder, path=str(path)), 0)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "ab", "images": ["img/a.png"]},
        {"question": user({"type": "image", "image": "img/a.png"})},
    ],
)
def test_an_image_for_a_model_of_text_is_an_error_with_advice(files: Path, row: dict):
    make = PromptMaker(DataConfig(answer=None), tiny_tokenizer())
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: it has images, but the model reads text only.*Set model\.path"
    ):
        load_prompts(write(files, row), make)
    sft = SftConfig(path="x", num_steps=1, messages="question")
    chat = [*user({"type": "image", "image": "img/a.png"}), {"role": "assistant", "content": "1"}]
    with pytest.raises(DataError, match="the model reads text only"):
        load_sft_rows(write(files, {"question": chat}), sft, tiny_tokenizer(), [1])


def test_placeholders_count_against_the_limit_of_a_prompt(files: Path, folder: Path):
    rows = [{"question": "ab", "images": ["img/a.png"]}, {"question": "ab", "images": ["img/b.png"]}]
    make = maker(folder)
    prompts, _ = load_prompts(write(files, *rows), make)
    short = len(prompts[0].ids)
    assert len(prompts[1].ids) == short + 1
    fitting, left_out = load_prompts(write(files, *rows), maker(folder, max_prompt_tokens=short))
    assert ([p.id for p in fitting], left_out) == (["train-1"], 1)
    with pytest.raises(DataError, match=r"all 2 rows are longer .*Images count with all their placeholders"):
        open_feed(maker(folder, path=str(files / "train.jsonl"), max_prompt_tokens=short - 1), 0)


def test_an_image_that_alone_exceeds_the_limit_is_an_error_with_file_and_line(files: Path, tmp_path_factory):
    folder = make_vision_folder(tmp_path_factory.mktemp("large"))
    settings = folder / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_pixels": 28 * 28 * 64}))
    (files / "img" / "large.png").write_bytes(encoded(drawing(28 * 41, 28)))
    rows = [{"question": "a", "answer": "1", "images": ["img/a.png"]}] * 2
    rows += [{"question": "<image><image>", "answer": "1", "images": ["img/a.png", "img/large.png"]}]
    path = write(files, *rows)
    expected = r"train\.jsonl:3: image 'img/large\.png' has 41 tokens, so no row .* {} = 40; raise the limit"
    for_prompts = expected.format(r"data\.max_prompt_tokens")
    make = maker(folder, path=str(path), max_prompt_tokens=40)
    for load in (load_prompts, lambda path, make: open_feed(make, 0)):
        with pytest.raises(DataError, match=for_prompts):
            load(path, make)
    with pytest.raises(DataError, match=for_prompts):
        load_eval_prompts(maker(folder, eval_sets={"large": {"path": str(path)}}, max_prompt_tokens=40))
    sft = SftConfig(path=str(path), num_steps=1, prompt="question", max_row_tokens=40)
    with pytest.raises(DataError, match=expected.format(r"sft\.max_row_tokens")):
        load_sft_rows(path, sft, make.tokenizer, [1], vision=make.vision)
    bad = list[str]()
    fitting, left_out = load_prompts(path, maker(folder, bad=bad, bad_rows="leave_out", max_prompt_tokens=40))
    assert (len(fitting), left_out, len(bad)) == (2, 0, 1) and "train.jsonl:3" in bad[0]
    fitting, left_out = load_prompts(path, maker(folder, max_prompt_tokens=41))
    assert (len(fitting), left_out) == (2, 1), "an image that fits, in a row that does not"


def rows_of_drawings(files: Path, num_rows: int) -> Path:
    for i in range(num_rows):
        (files / "img" / f"{i}.png").write_bytes(encoded(drawing(28, 28 if i % 3 else 56, i)))
    return write(files, *({"question": f"<image> {i}", "images": [f"img/{i}.png"]} for i in range(num_rows)))


def test_images_of_training_rows_are_decoded_when_they_are_drawn(files: Path, folder: Path, monkeypatch):
    path = rows_of_drawings(files, 30)
    monkeypatch.setattr(datasets, "DECODED_S", 0.0)
    make = maker(folder, path=str(path), cache_bytes=0)
    decoded = list[str]()
    process = make.vision._process
    monkeypatch.setattr(make.vision, "_process", lambda image: decoded.append(image.name) or process(image))
    feed = open_feed(make, 7)
    assert len(decoded) == 8, "only the first rows, whose digest decides whether a run may be resumed"
    drawn = feed.next(12)
    assert len(decoded) == 20
    assert [prompt.ordinal for prompt in drawn] == list(range(12))
    assert all(prompt.ids is not None and prompt.media_spans for prompt in drawn)
    complete, _ = load_prompts(path, maker(folder))
    by_id = {prompt.id: prompt for prompt in complete}
    assert all(content_of(prompt) == content_of(by_id[prompt.id]) for prompt in drawn)
    state, after = feed.state(), feed.next(25)
    again = open_feed(maker(folder, path=str(path)), 7)
    again.load_state(json.loads(json.dumps(state)))
    assert [p.id for p in again.next(25)] == [p.id for p in after], "a resumed run gets the same rows"


def test_headers_of_all_rows_are_checked_at_the_start(files: Path, folder: Path, monkeypatch):
    path = rows_of_drawings(files, 12)
    (files / "img" / "9.png").write_bytes(b"no image")
    (files / "img" / "10.png").write_bytes(encoded(drawing(1, 1)))
    complete = (files / "img" / "11.png").read_bytes()
    (files / "img" / "11.png").write_bytes(complete[:-100])
    with pytest.raises(
        DataError, match=r"3 of the first 12 rows can't be used:(.|\n)*:12: image 'img/11\.png' can't be"
    ):
        open_feed(maker(folder, path=str(path)), 0)
    monkeypatch.setattr(datasets, "DECODED_S", 0.0)
    with pytest.raises(DataError, match=r"2 of the first 12 rows can't be used:(.|\n)*:10: (.|\n)*:11: .*1 x 1"):
        open_feed(maker(folder, path=str(path)), 0)
    for name in ("9.png", "10.png"):
        (files / "img" / name).write_bytes(complete)
    feed = open_feed(maker(folder, path=str(path), shuffle=False), 0)
    feed.next(11)
    with pytest.raises(DataError, match=r"train\.jsonl:12: image 'img/11\.png' can't be decoded"):
        feed.next(1)
    bad = list[str]()
    feed = open_feed(maker(folder, path=str(path), shuffle=False, bad_rows="leave_out", bad=bad), 0)
    assert [p.id for p in feed.next(13)][10:] == ["train-11", "train-1", "train-2"]
    assert feed.num_left_out == 1 and "train.jsonl:12" in bad[0]


def test_the_order_of_a_run_has_another_digest_with_other_pixels(files: Path, folder: Path):
    path = rows_of_drawings(files, 9)
    state = open_feed(maker(folder, path=str(path)), 0).state()
    (files / "img" / "3.png").write_bytes(encoded(drawing(28, 56, 99)))
    feed = open_feed(maker(folder, path=str(path)), 0)
    with pytest.raises(DataError, match="another data order"):
        feed.load_state(state)


def test_a_stream_and_a_mixture_have_images(files: Path, folder: Path):
    path = rows_of_drawings(files, 9)
    feed = open_feed(maker(folder, path=str(path), streaming=True), 0)
    assert all(prompt.media_spans for prompt in feed.next(20))
    text = write(files, {"question": "ab"}, name="text.jsonl")
    sources = {"drawn": {"path": str(path)}, "text": {"path": str(text)}}
    feed = open_feed(maker(folder, sources=sources), 0)
    drawn = feed.next(10)
    assert sum(bool(prompt.media) for prompt in drawn) == 5


def test_held_out_prompts_are_complete_and_an_image_decides_where_a_row_is(files: Path, folder: Path):
    path = rows_of_drawings(files, 40)
    same = write(files, *({"question": "how many", "images": [f"img/{i}.png"]} for i in range(40)), name="same.jsonl")
    for rows in (path, same):
        make = maker(folder, path=str(rows), eval_fraction=0.3, shuffle=False)
        held_out, _ = load_eval_prompts(make)
        assert all(prompt.media_spans for prompt in held_out)
        trained = {prompt.id for prompt in open_feed(make, 0).next(40)}
        assert 4 < len(held_out) < 20 and trained.isdisjoint(prompt.id for prompt in held_out)
        assert len(trained) + len(held_out) == 40


def test_prompts_with_other_images_are_not_the_same_prompt(files: Path, folder: Path):
    rows = [{"question": "ab", "images": [f"img/{name}.png"]} for name in ("a", "c")]
    (files / "img" / "c.png").write_bytes(encoded(drawing(28, 28, 5)))
    prompts, _ = load_prompts(write(files, *rows), maker(folder))
    assert np.array_equal(prompts[0].ids, prompts[1].ids) and content_of(prompts[0]) != content_of(prompts[1])
    feed = open_feed(maker(folder, path=str(write(files, rows[0]))), 0)
    assert feed.shared({content_of(prompt) for prompt in prompts}) == {content_of(prompts[0])}


def test_a_run_that_leaves_out_other_rows_is_not_resumed(files: Path, folder: Path):
    path = rows_of_drawings(files, 12)
    states = []
    for name in ("9.png", "10.png"):
        good = (files / "img" / name).read_bytes()
        (files / "img" / name).write_bytes(b"no image")
        feed = open_feed(maker(folder, path=str(path), bad_rows="leave_out", bad=[]), 0)
        states.append(feed.state())
        (files / "img" / name).write_bytes(good)
    with pytest.raises(DataError, match="another data order"):
        feed.load_state(states[0])
