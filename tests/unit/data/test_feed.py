"""Mixtures and streaming: the order of training prompts; a resume continues at the exact prompt."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_tokenizers import tiny_tokenizer

from meshrl.config.data import DataConfig, DataSource, EvalSet
from meshrl.core.errors import DataError
from meshrl.data.datasets import PromptMaker, SftRow
from meshrl.data.order import SftSource, load_eval_prompts, open_feed
from meshrl.run.task import note_on_overlap


def write(path, n, text="{}+1="):
    rows = [{"question": text.format(i), "answer": str(i)} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path):
    """config(kind, **changes): a DataConfig over 50 rows; five of them are too long. Mixtures have 7 more."""
    path = write(tmp_path / "train.jsonl", 50)
    lines = Path(path).read_text().splitlines()
    for i in range(0, 50, 10):
        lines[i] = json.dumps({"question": "x" * 100, "answer": ""})
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    more = write(tmp_path / "more.jsonl", 7, "what is {}?")

    def make(kind, **changes):
        changes = {"max_prompt_tokens": 70, **changes}
        if "stream" in kind:
            changes = {"streaming": True, **changes}
        if "mixture" in kind:
            sources = {"sums": DataSource(path=path, weight=3.0), "talk": DataSource(path=more)}
            return DataConfig(sources=sources, **changes)
        return DataConfig(path=path, **changes)

    return make


def feed(cfg, seed=0):
    return open_feed(PromptMaker(cfg, tiny_tokenizer()), seed)


def drawn(prompts):
    return [(p.ordinal, p.id, p.answer) for p in prompts]


FEEDS = ["memory", "stream", "mixture", "mixture of streams"]


@pytest.mark.parametrize(("kind", "count"), zip(FEEDS, (45, 7, 52, 14)))
def test_held_out_prompts_that_are_training_prompts_are_found_by_their_text(config, tmp_path, kind, count):
    """Also in a file of another name. A stream compares only its first rows, of which one here is too long."""
    rows = [row for name in ("train.jsonl", "more.jsonl") for row in (tmp_path / name).read_text().split("\n")]
    (tmp_path / "copy.jsonl").write_text("\n".join([json.dumps({"question": "new", "answer": "1"}), *rows[::-1]]))
    make = PromptMaker(config(kind, eval_path=str(tmp_path / "copy.jsonl")), tiny_tokenizer())
    task = SimpleNamespace(train_prompts=open_feed(make, 0), eval_prompts=load_eval_prompts(make)[0])
    assert note_on_overlap(task).startswith(f"{count} of 53 held-out prompts are training prompts, too, so the ")
    task.eval_prompts = task.eval_prompts[:1]
    assert note_on_overlap(task) is None


@pytest.mark.parametrize("kind", [*FEEDS, "eval"])
def test_every_feed_refuses_rows_without_the_answer_that_a_reward_needs(config, kind):
    with pytest.raises(DataError, match=r"train\.jsonl:\d+: .*'answer' is an empty string, .*reward\.terms\.maths"):
        if kind == "eval":
            cfg = config("memory", eval_path=config("memory").path)
            load_eval_prompts(PromptMaker(cfg, tiny_tokenizer(), answer_for=["maths"]))
        else:
            open_feed(PromptMaker(config(kind), tiny_tokenizer(), answer_for=["maths"]), 0).next(200)


@pytest.mark.parametrize("kind", FEEDS)
@pytest.mark.parametrize("before", [0, 3, 19, 45, 58, 140])
def test_a_resumed_feed_continues_at_the_exact_prompt(config, kind, before):
    """At the start, within an epoch, at its end, and in a later one; also the number of rows left out."""
    one = feed(config(kind))
    one.next(before)
    state = json.loads(json.dumps(one.state()))
    other = feed(config(kind))
    other.load_state(state)
    assert drawn(other.next(60)) == drawn(one.next(60))
    assert other.num_left_out == one.num_left_out > 0
    assert other.state() == one.state()


@pytest.mark.parametrize("kind", FEEDS)
def test_the_order_depends_on_the_seed_and_not_on_the_size_of_the_draws(config, kind):
    singles = feed(config(kind), seed=1)
    by_one = [drawn(singles.next(1))[0] for _ in range(90)]
    assert by_one == drawn(feed(config(kind), seed=1).next(90))
    assert by_one != drawn(feed(config(kind), seed=2).next(90))
    assert [ordinal for ordinal, _, _ in by_one] == list(range(90))
    # An ordinal set on a shared record would change prompts that were drawn before.
    assert len({id(prompt) for prompt in feed(config(kind), seed=1).next(90)}) == 90


@pytest.mark.parametrize("kind", FEEDS)
@pytest.mark.parametrize(
    ("seed", "changes", "expected"),
    [
        (1, {}, "seed was 0, is 1"),
        (0, {"max_prompt_tokens": 2000}, "was"),
        (0, {"system": "Hi."}, "digest was"),
        (0, {"shuffle": False}, "shuffle was True, is False"),
    ],
)
def test_a_resume_on_another_order_or_other_data_is_refused(config, kind, seed, changes, expected):
    """The run would repeat some prompts and never draw others, and no metric would show it."""
    state = feed(config(kind)).state()
    with pytest.raises(DataError, match=expected):
        feed(config(kind, **changes), seed).load_state(state)


@pytest.mark.parametrize("kind", FEEDS[:2])
def test_a_resume_detects_changed_answers_unless_the_state_has_no_digest_of_them(config, kind):
    state, path = feed(config(kind)).state(), Path(config(kind).path)
    path.write_text(path.read_text().replace('"answer": "2"', '"answer": "3"'))
    with pytest.raises(DataError, match="answers was"):
        feed(config(kind)).load_state(state)
    if kind == "memory":  # a stream knows the offsets and sizes of its file
        feed(config(kind)).load_state({name: value for name, value in state.items() if name != "answers"})


def test_a_resume_with_another_number_of_rows_is_refused(config):
    state, path = feed(config("memory")).state(), Path(config("memory").path)
    path.write_text(path.read_text() + '\n{"question": "one more", "answer": "1"}\n')
    with pytest.raises(DataError, match="num_rows was 45, is 46"):
        feed(config("memory")).load_state(state)


def test_a_resumed_stream_detects_a_changed_row_far_from_its_start(config):
    """A stream renders only its first rows at the start, and knows the others by their offsets."""
    state = feed(config("stream")).state()
    path = Path(config("stream").path)
    path.write_text(path.read_text().replace('"44+1="', '"forty-four"'))
    with pytest.raises(DataError, match="digest was"):
        feed(config("stream")).load_state(state)


def test_a_resume_with_other_weights_is_refused(config):
    state = feed(config("mixture")).state()
    cfg = config("mixture")
    sources = cfg.sources | {"talk": cfg.sources["talk"].model_copy(update={"weight": 2.0})}
    with pytest.raises(DataError, match="shares was"):
        feed(cfg.model_copy(update={"sources": sources})).load_state(state)


def test_a_stream_returns_the_same_prompts_as_reading_all_rows(config):
    memory, stream = feed(config("memory")), feed(config("stream"))
    assert memory.num_left_out == 5 and stream.num_left_out == 0
    for _ in range(3):  # every epoch has each prompt once, in another order
        assert sorted(p.id for p in memory.next(45)) == sorted(p.id for p in stream.next(45))
    by_id = {p.id: p for p in memory.next(45)}
    for prompt in stream.next(45):
        same = by_id[prompt.id]
        assert (prompt.messages, prompt.answer, prompt.meta) == (same.messages, same.answer, same.meta)
        assert prompt.ids.tolist() == same.ids.tolist()
    assert 15 <= stream.num_left_out <= 20


@pytest.mark.parametrize("kind", FEEDS[:2])
def test_without_shuffling_the_order_is_that_of_the_file(config, kind):
    rows = feed(config(kind, shuffle=False, max_prompt_tokens=2000))
    assert [p.id for p in rows.next(120)] == [f"train-{i % 50 + 1}" for i in range(120)]


def test_a_stream_has_the_same_order_as_reading_all_rows(config):
    """Any row of the file may follow any other: neighbours in a sorted file must not stay together."""
    memory, stream = (feed(config(kind, max_prompt_tokens=2000), seed=3) for kind in ("memory", "stream"))
    assert drawn(stream.next(120)) == drawn(memory.next(120))


def test_the_order_of_a_stream_is_the_same_on_every_machine(config):
    """The expected order is fixed here, so that a change by another numpy version is found."""
    stream = feed(config("stream", max_prompt_tokens=2000))
    assert [int(p.id.removeprefix("train-")) for p in stream.next(8)] == [1, 32, 9, 20, 27, 10, 4, 46]


def test_a_stream_never_has_all_rows_in_memory(tmp_path):
    """8 MB of rows; the memory that Python allocates stays far below."""
    path = write(tmp_path / "big.jsonl", 4000, "{}" + "+1" * 1000)
    assert (tmp_path / "big.jsonl").stat().st_size > 8e6
    make = PromptMaker(DataConfig(path=path, streaming=True, max_prompt_tokens=5000), tiny_tokenizer())
    tracemalloc.start()
    stream = open_feed(make, 0)
    for _ in range(20):
        stream.next(8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5e6


def test_a_stream_of_rows_that_are_all_too_long_ends_with_an_error(config):
    with pytest.raises(DataError, match=r"all 50 rows are longer than data\.max_prompt_tokens = 5 tokens"):
        feed(config("stream", max_prompt_tokens=5)).next(1)


@pytest.mark.parametrize("kind", FEEDS)
def test_ids_outside_the_embedding_are_refused_at_the_start(config, kind):
    """Also in a stream, which renders its first rows at the start; in later rows when they are drawn."""
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match=r"jsonl:1: token \d+ of \d+ is .* the model's embedding ends with id 99"):
        open_feed(PromptMaker(config(kind), tokenizer, vocab_size=100), 0)
    prompts = open_feed(PromptMaker(config(kind), tokenizer, vocab_size=len(tokenizer)), 0)
    assert len(prompts.next(20)) == 20


def test_a_stream_names_a_bad_row_when_it_is_drawn(config):
    cfg = config("stream", shuffle=False)
    lines = Path(cfg.path).read_text().splitlines()
    lines[29] = '{"question": 7, "answer": "1"}'
    Path(cfg.path).write_text("\n".join(lines))
    stream = feed(cfg)
    stream.next(20)
    with pytest.raises(DataError, match=r"train\.jsonl:30: column 'question' is int 7"):
        stream.next(20)


def test_a_file_that_shrinks_during_streaming_is_an_error(config):
    cfg = config("stream", shuffle=False)
    stream = feed(cfg)
    stream.next(2)
    lines = Path(cfg.path).read_text().splitlines()
    Path(cfg.path).write_text("\n".join(lines[:15]))
    with pytest.raises(DataError, match="has fewer rows than at the start of the run"):
        stream.next(30)


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (1, 99), (0.2, 0.3)])
def test_every_part_of_a_mixture_has_the_sources_in_proportion(config, weights):
    cfg = config("mixture")
    sources = {
        name: source.model_copy(update={"weight": float(weight)})
        for (name, source), weight in zip(cfg.sources.items(), weights)
    }
    mixture = feed(cfg.model_copy(update={"sources": sources}))
    share = weights[0] / sum(weights)
    for _ in range(20):
        count = Counter(p.env for p in mixture.next(32))
        assert abs(count["sums"] - 32 * share) <= 1


def test_the_order_of_sources_depends_on_the_seed(config):
    orders = {tuple(p.env for p in feed(config("mixture", shuffle=False), seed).next(8)) for seed in range(6)}
    assert len(orders) > 1


def test_sources_of_a_mixture_have_their_own_columns_and_names(config, tmp_path):
    rows = [{"problem": f"{i}-1=", "solution": i} for i in range(4)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = config("mixture")
    other = DataSource(path=str(tmp_path / "other.jsonl"), prompt="problem", answer="solution")
    mixture = feed(cfg.model_copy(update={"sources": cfg.sources | {"other": other}}))
    seen = {p.env: p for p in mixture.next(30)}
    assert set(seen) == {"sums", "talk", "other"}
    assert all(p.id.startswith(f"{env}/") for env, p in seen.items())
    assert seen["other"].answer in range(4) and seen["other"].messages[0]["content"].endswith("-1=")
    assert mixture.num_left_out == 5


def test_each_source_of_a_mixture_has_separate_epochs(config):
    mixture = feed(config("mixture"))
    talk = [p.id for p in mixture.next(100) if p.env == "talk"]
    assert len(set(talk[:7])) == len(set(talk[7:14])) == 7


def test_held_out_prompts_have_ordinals_that_training_never_has(config, tmp_path):
    """The seed of a sample follows from the ordinal; evaluation must not use the ordinals of training."""
    cfg = config("memory", eval_path=config("memory").path, eval_limit=12)
    prompts, left_out = load_eval_prompts(PromptMaker(cfg, tiny_tokenizer()))
    assert (len(prompts), left_out) == (10, 2)
    assert [p.ordinal for p in prompts] == [-1 - i for i in range(10)]
    assert load_eval_prompts(PromptMaker(config("memory"), tiny_tokenizer())) == ([], 0)
    (path := tmp_path / "other.jsonl").write_text('{"problem": "1+1", "solution": "2"}\n')
    other = EvalSet(path=str(path), prompt="problem", answer="solution")
    sets = {"sums": EvalSet(path=str(config("memory").path)), "other": other}
    prompts, left_out = load_eval_prompts(PromptMaker(config("memory", eval_sets=sets, eval_limit=3), tiny_tokenizer()))
    assert [p.ordinal for p in prompts] == [-1, -2, -3] and left_out == 1
    assert [p.id.partition("/")[0] for p in prompts] == ["sums", "sums", "other"] and prompts[-1].answer == "2"


def test_sft_rows_become_samples_without_sampled_tokens():
    rows = [
        SftRow(id=f"w-{i}", ids=np.array([1, 2, 3], np.int32), mask=np.array([False, True, True])) for i in range(3)
    ]
    drawn = SftSource(rows, seed=0).next(4)
    assert len({s.trajectory_id for s in drawn}) == 4
    sample = drawn[0]
    assert sample.tokens.tolist() == [1, 2, 3]
    assert sample.mask.tolist() == [False, True, True]
    assert sample.turn.tolist() == [-1, 0, 0]
    assert np.isnan(sample.rollout_logprobs).all() and (sample.versions == -1).all()
