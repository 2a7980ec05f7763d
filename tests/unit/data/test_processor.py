"""The processor of each family: ids, arrays and spans are those of Transformers' own call; and its refusals."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_tokenizers import tiny_tokenizer
from tiny_vision import FOLDERS, PIXTRAL, drawing, encoded, make_vision_folder

from meshrl.core.errors import ConfigError, DataError
from meshrl.core.types import Media
from meshrl.data.chat import load_tokenizer, render
from meshrl.data.images import image_of
from meshrl.data.media import find_spans
from meshrl.data.processor import Vision, load_vision

IMAGES = [drawing(40, 30), drawing(60, 25, 1), drawing(28, 28, 2)]
NEXT_TO_EACH_OTHER = [
    {"role": "user", "content": [{"type": "image", "image": f"image-{i}"} for i in (0, 1)]},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": [{"type": "text", "text": "12"}, {"type": "image", "image": "image-2"}]},
]

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
WITH_TORCHVISION = pytest.mark.skipif(not HAS_TORCHVISION, reason="no torchvision: see tests/vllm_servers.py")
WITHOUT_TORCHVISION = pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is installed")


def load(folder: Path, cache_bytes: int = 1 << 30) -> Vision:
    tokenizer = load_tokenizer(folder)
    vision = load_vision(str(folder), tokenizer, cache_bytes)
    assert vision is not None
    return vision


@pytest.mark.parametrize("family", FOLDERS)
def test_ids_and_arrays_are_those_of_the_familys_processor(tmp_path: Path, family: str):
    vision = load(make_vision_folder(tmp_path, family))
    assert vision.backend == "pil"
    media = {f"image-{i}": vision.media(image_of(image, None)) for i, image in enumerate(IMAGES)}
    ids = render(vision._tokenizer, NEXT_TO_EACH_OTHER, media=media)
    text = vision._tokenizer.apply_chat_template(NEXT_TO_EACH_OTHER, tokenize=False, add_generation_prompt=True)
    call = {"text": [text], "return_tensors": "np", "add_special_tokens": False}
    theirs = vision._processor(images=[IMAGES] if family == "idefics3" else IMAGES, **call)
    assert ids.tolist() == theirs["input_ids"][0].tolist()
    spans = find_spans(ids, media, vision.placeholder)
    assert [name for name, _, _ in spans] == ["image-0", "image-1", "image-2"]
    for name, start, length in spans:
        inside = ids[start : start + length]
        assert inside[0] == inside[-1] == vision.placeholder
        assert (inside == vision.placeholder).sum() == media[name].num_tokens
    assert {*media["image-0"].outputs} == {*theirs} - {
        "input_ids",
        "attention_mask",
        "mm_token_type_ids",
        "token_type_ids",
    }
    for i, image in enumerate(IMAGES):  # each alone, as Transformers has it for a prompt with one image
        alone = vision._processor.image_processor(image, return_tensors="np")
        for name, array in media[f"image-{i}"].outputs.items():
            assert array.dtype == np.asarray(alone[name]).dtype and (array == np.asarray(alone[name])).all()
            assert not array.flags.writeable


def test_equal_images_have_equal_digests_and_another_setting_has_another(tmp_path: Path):
    vision = load(make_vision_folder(tmp_path / "a"))
    as_png, as_bmp = (vision.media(image_of(encoded(IMAGES[0], kind), None)) for kind in ("PNG", "BMP"))
    assert as_png.digest == as_bmp.digest != vision.media(image_of(IMAGES[1], None)).digest
    folder = make_vision_folder(tmp_path / "b")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"do_normalize": False}))
    assert load(folder).media(image_of(IMAGES[0], None)).digest != as_png.digest


def num_bytes(media: Media) -> int:
    return len(media.thumbnail) + sum(array.nbytes for array in media.outputs.values())


def test_the_cache_keeps_its_bytes_and_other_images_are_processed_again(tmp_path: Path, monkeypatch):
    vision = load(make_vision_folder(tmp_path))
    vision = load(tmp_path, cache_bytes=int(2.5 * num_bytes(vision.media(image_of(IMAGES[0], None)))))
    processed = list[str]()
    process = vision._process
    monkeypatch.setattr(vision, "_process", lambda image: processed.append(image.name) or process(image))
    media = [vision.media(image_of(drawing(40, 30, seed), None)) for seed in (0, 1, 0, 2, 0)]
    assert len(processed) == 3, "an image that was used lately is not processed again"
    assert vision._num_cached_bytes == num_bytes(media[3]) + num_bytes(media[4])
    sent = pickle.loads(pickle.dumps(media[1]))
    assert type(sent.outputs) is dict and len(processed) == 4
    assert (sent.outputs["pixel_values"] == media[1].outputs["pixel_values"]).all() and len(processed) == 4
    none = load(tmp_path, cache_bytes=0)
    assert none.media(image_of(IMAGES[0], None)).outputs["pixel_values"].shape == (4, 1176)


def test_a_file_that_changes_during_the_run_is_an_error(tmp_path: Path):
    vision = load(make_vision_folder(tmp_path), cache_bytes=0)
    (tmp_path / "a.png").write_bytes(encoded(IMAGES[0]))
    media = vision.media(image_of("a.png", str(tmp_path)))
    (tmp_path / "a.png").write_bytes(encoded(IMAGES[1]))
    with pytest.raises(DataError, match=r"image 'a\.png' has changed since the run read it first"):
        media.outputs["pixel_values"]


def test_a_count_of_placeholders_that_is_not_that_of_features_is_an_error(tmp_path: Path):
    vision = load(make_vision_folder(tmp_path))
    media = {"image-0": vision.media(image_of(IMAGES[1], None))}
    ids = render(vision._tokenizer, [{"role": "user", "content": [{"type": "image", "image": "image-0"}]}], media=media)
    assert find_spans(ids, media, vision.placeholder)
    with pytest.raises(DataError, match="3 placeholders of images, but its 1 images have 2 features"):
        find_spans(np.append(ids, vision.placeholder), media, vision.placeholder)


def test_a_template_that_does_not_write_images_is_an_error(tmp_path: Path):
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    vision = load(make_vision_folder(tmp_path, template=template))
    media = {"image-0": vision.media(image_of(IMAGES[0], None))}
    with pytest.raises(DataError, match=r"writes '<\|image_pad\|>' 0 times for 1 images; set data\.chat_template"):
        render(vision._tokenizer, [{"role": "user", "content": [{"type": "image", "image": "image-0"}]}], media=media)


def test_a_template_that_expects_parts_gets_texts_as_parts(tmp_path: Path):
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    tokenizer = load_tokenizer(make_vision_folder(tmp_path, template=template))
    messages = [{"role": "user", "content": "12"}, {"role": "assistant", "content": ""}]
    assert tokenizer.decode(render(tokenizer, messages)) == "12"


def test_text_models_have_no_image_part(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 400}')
    assert load_vision(str(tmp_path), tiny_tokenizer(), 0) is None


def test_the_tokens_of_images_are_no_text_of_a_message(tmp_path: Path):
    from meshrl.data.chat import image_literal

    tokenizer = load(make_vision_folder(tmp_path))._tokenizer
    for text in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>"):
        assert image_literal(tokenizer, f"see {text} here") == text
    assert image_literal(tokenizer, "<image> <|im_end|>") is None


def test_a_processor_that_differs_from_the_config_is_an_error(tmp_path: Path):
    folder = make_vision_folder(tmp_path, "llava")
    stated = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(stated | {"patch_size": 7}))
    with pytest.raises(ConfigError, match=r"patch_size is 7 in the processor's files and 14 in config\.json"):
        load(folder).media(image_of(IMAGES[0], None))


def test_a_setting_that_the_processor_lacks_is_that_of_the_config(tmp_path: Path):
    folder = make_vision_folder(tmp_path, "llava")
    (folder / "processor_config.json").write_text('{"num_additional_image_tokens": 1}')
    assert load(folder).media(image_of(IMAGES[0], None)).num_tokens == 4


def test_a_folder_without_an_image_processor_is_an_error_only_for_images(tmp_path: Path):
    folder = make_vision_folder(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    vision = load(folder)
    with pytest.raises(ConfigError, match=r"this qwen2_vl can't be loaded: .*Copy preprocessor_config\.json"):
        vision.media(image_of(IMAGES[0], None))


@WITH_TORCHVISION
def test_pixtral_is_a_llava_with_the_processor_that_its_folder_names(tmp_path: Path):
    from transformers import AutoProcessor

    vision = load(make_vision_folder(tmp_path, "llava", made=PIXTRAL))
    media = {"image-0": vision.media(image_of(drawing(42, 28), None))}
    row = "[IMG][IMG][IMG]"
    assert media["image-0"].text == f"{row}[IMG_BREAK]{row}[IMG_END]" and media["image-0"].num_tokens == 6
    messages = [{"role": "user", "content": [{"type": "image", "image": "image-0"}]}]
    theirs = AutoProcessor.from_pretrained(tmp_path)
    text = theirs.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = theirs(text=[text], images=[drawing(42, 28)], add_special_tokens=False)["input_ids"][0]
    assert render(vision._tokenizer, messages, media=media).tolist() == list(expected)


@WITHOUT_TORCHVISION
def test_the_class_that_a_folder_names_decides_what_it_needs(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"this llava can't be loaded: .*meshrl\[vision\]"):
        load(make_vision_folder(tmp_path, "llava", made=PIXTRAL)).media(image_of(IMAGES[0], None))


def test_a_class_that_meshrl_does_not_know_is_that_of_the_family(tmp_path: Path):
    folder = make_vision_folder(tmp_path, "llava")
    stated = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(stated | {"processor_class": "TheirProcessor"}))
    assert load(folder).media(image_of(IMAGES[0], None)).num_tokens == 4


@WITHOUT_TORCHVISION
@pytest.mark.parametrize("family", ["mistral3", "lfm2_vl"])
def test_families_that_import_torchvision_name_the_extra(tmp_path: Path, family: str):
    folder = make_vision_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": family, "image_token_id": config["image_token_id"], "vision_config": {}})
    )
    kind = {"mistral3": "PixtralImageProcessor", "lfm2_vl": "Lfm2VlImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind[family]}))
    (folder / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"meshrl\[vision\]"):
        load(folder).media(image_of(IMAGES[0], None))


def test_an_image_that_the_processor_refuses_is_an_error_of_the_row(tmp_path: Path, monkeypatch):
    vision = load(make_vision_folder(tmp_path))
    monkeypatch.setattr(vision._processor, "_process_images", lambda *_, **__: 1 / 0)
    with pytest.raises(DataError, match=r"of size \(28, 28\): the image processor refuses it: ZeroDivisionError"):
        vision.media(image_of(Image.new("RGB", (28, 28)), None))
