"""Stop strings in ids: the end of a turn does not depend on how its text is split into tokens, parts and events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiny_engines import ask, run, tiny_engine
from tiny_models import tiny_lm
from tiny_tokenizers import numbered_tokenizer, sentencepiece_tokenizer, tiny_tokenizer

from meshrl.core.errors import CapabilityError, RequestError
from meshrl.rollout.stop_strings import StopStrings, bytes_of

STOPS = ["ab", "a", "b1", "12", "\n\n", "é", "你", "b你", "<|im_end|>", "x<|im_end|>a", "aab", " ", "🙂\n"]


def end_of(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> int | None:
    """By definition: the smallest number of ids with a stop string in their text."""
    texts = (tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(1, len(ids) + 1))
    return next((count for count, text in enumerate(texts, 1) if any(s in text for s in stop)), None)


def found_end(strings: StopStrings, ids: list[int], stop: tuple[str, ...], prefix: Sequence[int] = ()):
    request = ask("a", [1], stop=stop, prefix_output=np.array(prefix, np.int32))
    search = strings.search(request)
    return next((count for count, token in enumerate(ids, 1) if search.ends_with(token)), None)


def byte_ids(text: str) -> list[int]:
    """One id for each UTF-8 byte, without merges."""
    return [LETTERS[byte] for byte in text.encode()]


LETTERS = {bytes_of(tiny_tokenizer(), i)[0]: i for i in range(4, 260)}


def test_the_end_is_the_first_token_whose_text_completes_a_stop_string():
    """Compared with the decoded text of all ids so far, for ids that no tokenizer would produce: incomplete characters,
    special tokens, and ids that the tokenizer does not have."""
    rng, tokenizer = random.Random(0), tiny_tokenizer()
    strings = StopStrings(lambda: tokenizer)
    pool = [*range(4), *(i for text in STOPS for i in byte_ids(text)), 260, 261, 262, 9999]
    ended = 0
    for _ in range(600):
        ids = [rng.choice(pool) for _ in range(rng.randrange(1, 40))]
        stop = tuple(rng.sample(STOPS, rng.randrange(1, 4)))
        expected = end_of(tokenizer, ids, stop)
        assert found_end(strings, ids, stop) == expected, (ids, stop)
        ended += expected is not None
    assert 150 < ended < 590  # there are sequences with and without an end


@pytest.mark.parametrize("cut", range(8))
def test_a_continuation_ends_where_the_uninterrupted_turn_ends(cut):
    """The stop string begins before the abort and ends after it."""
    tokenizer = tiny_tokenizer()
    strings, ids = StopStrings(lambda: tokenizer), byte_ids("x你b\n12")
    assert found_end(strings, ids, ("你b\n",)) == 6
    rest = found_end(strings, ids[cut:], ("你b\n",), prefix=ids[:cut])
    assert rest == (6 - cut if cut < 6 else None)


def test_output_tokens_are_counted_up_to_the_stop_string_for_any_event_size():
    tokenizer = tiny_tokenizer()
    ids = byte_ids("a12b12")
    for size in range(1, 7):
        search = StopStrings(lambda: tokenizer).search(ask("a", [1], stop=("2b",)))
        assert sum(search.count_output(ids[i : i + size]) for i in range(0, 6, size)) == 4
        assert search.found


@pytest.mark.parametrize(
    ("pieces", "stop", "count"),
    [
        (
            ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0x0A>", "a"],
            "\n",
            5,
        ),  # the retained bytes begin inside 🙂
        (["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "a"], "🙂", 4),
        (["a", "▁a", "b"], " a", 2),
        (["▁a", "b"], " a", 1),  # the turn continues its context, so its first space counts
        (["a", "▁", "▁▁", "b"], "  b", 4),
        (["▁the", "a"], "e", 1),
        (["ab", "ab"], "ba", 2),  # ends in the middle of a token
    ],
)
def test_sentencepiece_tokens_have_their_spaces_and_bytes(pieces, stop, count):
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert found_end(StopStrings(lambda: tokenizer), ids, (stop,)) == count


def test_every_token_of_a_byte_level_tokenizer_has_its_bytes():
    tokenizer = tiny_tokenizer()
    assert sorted(LETTERS) == list(range(256))
    assert [bytes_of(tokenizer, i) for i in (2, 260, 261, 262, 9999)] == [b"<|im_end|>", b"ab", b"12", b"\n\n", b""]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm("qwen2")


def test_each_row_of_a_batch_ends_at_its_own_stop_strings(lm):
    """Several rows are sampled together, some of them without stop strings. Each output equals the output without stop
    strings, up to the token that completes the string."""
    tokenizer = numbered_tokenizer(64)
    free = run(tiny_engine(lm), [ask(str(g), [5, 9], seed=g, max_new_tokens=60) for g in range(6)])
    stops: dict[str, tuple[str, ...]] = {}
    for g, turn in free.items():
        ids = turn.output_ids.tolist()
        at = 5 + 7 * int(g)
        # From the middle of a token to the middle of another: "7><12><3" of "<17><12><34>".
        stops[g] = ("no such text", f"{ids[at] % 10}><{ids[at + 1]}><{str(ids[at + 2])[0]}") if int(g) % 3 else ()
    engine = tiny_engine(lm, stop_strings=StopStrings(lambda: tokenizer))
    requests = [ask(g, [5, 9], seed=int(g), max_new_tokens=60, stop=stop) for g, stop in stops.items()]
    for g, turn in run(engine, requests).items():
        ids = free[g].output_ids.tolist()
        count = end_of(tokenizer, ids, stops[g]) if stops[g] else None
        assert turn.output_ids.tolist() == ids[:count]
        np.testing.assert_allclose(turn.logprobs, free[g].logprobs[:count], atol=1e-5)
        assert turn.stop_reason == ("length" if count is None else "stop")
        assert len(turn.versions) == len(turn.output_ids)


def test_a_stop_string_that_is_complete_at_the_length_limit_is_a_stop(lm):
    tokenizer = numbered_tokenizer(64)
    engine = tiny_engine(lm, stop_strings=StopStrings(lambda: tokenizer))
    last = run(tiny_engine(lm), [ask("a", [5], seed=1, max_new_tokens=3)])["a"].output_ids[-1]
    turn = run(engine, [ask("a", [5], seed=1, max_new_tokens=3, stop=(f"<{last}>",))])["a"]
    assert turn.stop_reason == "stop"


def test_an_engine_without_a_tokenizer_refuses_stop_strings(lm):
    with pytest.raises(CapabilityError, match="request a has stop strings"):
        tiny_engine(lm).submit(ask("a", [5], stop=("x",)))


@pytest.mark.parametrize("stop", [("",), "text", ("a", 3)])
def test_invalid_stop_strings_are_refused(lm, stop):
    engine = tiny_engine(lm, stop_strings=StopStrings(tiny_tokenizer))
    with pytest.raises(RequestError, match=r"sampling\.stop is .*allowed: a list of strings, none of them empty"):
        engine.submit(ask("a", [5], stop=stop))


def test_the_tokenizer_is_loaded_from_the_model_folder_when_it_is_needed(lm, tmp_path):
    import torch

    from meshrl.config.model import ModelConfig
    from meshrl.config.rollout import RolloutConfig
    from meshrl.rollout.embedded.engine import build_embedded_engine

    lm.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32")
    engine = build_embedded_engine(model, RolloutConfig(), torch.device("cpu"), "e-0", ())
    engine.trust_loaded_weights()
    free = run(engine, [ask("a", [5], seed=1)])["a"].output_ids.tolist()
    numbered_tokenizer(64).save_pretrained(tmp_path)
    stopped = run(engine, [ask("a", [5], seed=1, stop=(f"<{free[4]}>",))])["a"].output_ids.tolist()
    assert stopped == free[: free.index(free[4]) + 1]


def test_the_models_template_is_not_asked_for_text_when_only_its_tokens_are_read(tmp_path):
    """data.chat_template may replace a template that leaves out plain text, as those of vision-language models do."""
    from meshrl.config.model import ModelConfig
    from meshrl.config.rollout import RolloutConfig, SamplingConfig
    from meshrl.rollout.stop_strings import stop_strings_of

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m.content if p.text %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    strings = stop_strings_of(ModelConfig(path=str(tmp_path)), RolloutConfig(sampling=SamplingConfig(stop=["ab"])))
    assert found_end(strings, byte_ids("xabx"), ("ab",)) == 3
