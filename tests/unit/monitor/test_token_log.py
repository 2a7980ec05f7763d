"""The values of each token in columns: what the file has, how a text is divided, and damaged or missing files."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
from threading import Event

import numpy as np
import pyarrow.parquet as pq
import pytest
from scripted_agent import IdTokenizer, scripted_trajectories
from tiny_run import read_tokens
from tiny_tokenizers import tiny_tokenizer

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.config.algo import AlgoConfig
from meshrl.core.errors import DataError
from meshrl.monitor import token_log
from meshrl.monitor.failed_writes import FailedWrites
from meshrl.monitor.rollout_log import RolloutLog, step_files
from meshrl.monitor.token_log import TokenTexts, TrainerValues, read_token_file, tokens_file


def decode(ids):
    return IdTokenizer().decode(ids)


def trained(trajectories, version=5):
    """Samples of these trajectories as after an update, with values that name their token: logprob -t, entropy t."""
    samples, _ = flatten(trajectories)
    assign_advantages(samples, AlgoConfig())
    values = TrainerValues(version=version, samples=samples)
    for i, sample in enumerate(samples):
        sample.loss_weight = sample.mask.astype(np.float32)
        places = np.flatnonzero(sample.mask).astype(np.float32)
        values.add(samples, {i: np.stack([-places, places + 100 * i])})
    return samples, values


def test_every_token_of_a_tree_of_turns_has_its_values_once(tmp_path):
    """Rows [0, 1], [2] and [0, 3]: turn 0 is trained in the first row only, and has the values of that row."""
    trajectories = scripted_trajectories(2, 2)
    samples, values = trained(trajectories)
    path = RolloutLog(tmp_path, decode).write(4, trajectories, trainer=values)
    for trajectory in trajectories:
        rows = [sample for sample in samples if sample.trajectory_id == trajectory.id]
        found = read_tokens(path, trajectory.id)
        assert [turn.turn for turn in found] == [0, 1, 2, 3] and {turn.trainer_version for turn in found} == {5}
        for row, numbers in ((0, (0, 1)), (1, (2,)), (2, (3,))):
            sample = rows[row]
            for number in numbers:
                turn, logged = trajectory.turns[number], found[number].columns
                places = np.flatnonzero(sample.mask & (sample.turn == number))
                np.testing.assert_array_equal(logged["logprobs"], -places.astype(np.float32))
                np.testing.assert_array_equal(logged["entropies"], places + 100.0 * samples.index(sample))
                np.testing.assert_array_equal(logged["advantages"], sample.advantages[places])
                np.testing.assert_array_equal(logged["rollout_logprobs"], turn.logprobs)
                np.testing.assert_array_equal(logged["versions"], turn.versions)
                assert logged["trained"].all()


def test_logprobs_of_the_weights_before_the_step_come_before_those_of_a_later_update(tmp_path):
    trajectories = scripted_trajectories(1, 1)
    samples, values = trained(trajectories)
    samples[0].old_logprobs = np.full(len(samples[0]), -0.5, np.float32)
    samples[1].loss_weight[:] = 0  # a cut row under algo.truncated = mask
    path = RolloutLog(tmp_path, decode).write(1, trajectories, trainer=values)
    turns = read_tokens(path, trajectories[0].id)
    assert (turns[0].columns["logprobs"] == -0.5).all() and (turns[3].columns["logprobs"] != -0.5).all()
    assert [turn.columns["trained"].all() for turn in turns] == [True, True, False, True]


def test_failed_unscored_and_empty_trajectories_have_the_values_of_the_sampler_only(tmp_path):
    trajectories = scripted_trajectories(2, 2)
    _, values = trained(trajectories[:2])
    trajectories[3].turns = []
    path = RolloutLog(tmp_path, decode).write(1, trajectories, trainer=values)
    for turn in read_tokens(path, trajectories[2].id):
        assert turn.trainer_version is None and not turn.columns["trained"].any()
        assert all(np.isnan(turn.columns[name]).all() for name in ("logprobs", "entropies", "advantages"))
        np.testing.assert_array_equal(turn.columns["rollout_logprobs"], trajectories[2].turns[turn.turn].logprobs)
    assert read_tokens(path, trajectories[3].id) == [] and read_tokens(path, "another") == []


def test_a_failed_attempt_with_arrays_of_other_lengths_does_not_damage_the_file(tmp_path):
    """Turns of failed attempts are not checked: a user's agent or engine may have made them."""
    trajectories = scripted_trajectories(1, 3)
    bad = trajectories[1].turns[0]
    trajectories[1].turns[0] = dataclasses.replace(bad, logprobs=bad.logprobs[:-1], versions=None)
    path = RolloutLog(tmp_path, decode).write(1, trajectories)
    found = read_tokens(path, trajectories[1].id)[0].columns
    assert np.isnan(found["rollout_logprobs"]).all() and (found["versions"] == -1).all()
    assert found["characters"].sum() == len(decode(bad.output_ids))
    after = read_tokens(path, trajectories[2].id)[3].columns
    np.testing.assert_array_equal(after["rollout_logprobs"], trajectories[2].turns[3].logprobs)


def test_an_event_loop_does_not_wait_for_the_values_of_tokens(tmp_path):
    """A thread writes them in the order of the calls; a failure of the disk is counted, and the next write works."""
    trajectories, begun, go_on, here = scripted_trajectories(1, 2), Event(), Event(), threading.get_ident()

    def slow(ids):
        if threading.get_ident() != here:
            begun.set()
            assert go_on.wait(60)
        return decode(ids)

    async def run():
        writes = FailedWrites()
        log = RolloutLog(tmp_path, slow, writes)
        path = log.write(1, trajectories)
        await asyncio.to_thread(begun.wait, 60)  # the loop goes on, while the thread can't
        assert not tokens_file(path).exists()
        go_on.set()
        assert tokens_file(log.write(2, trajectories)) == tokens_file(path).with_name("step_000002.tokens.parquet")
        assert len(read_tokens(path, trajectories[1].id)) == 4, "a second write waits for the first one"
        writes.take()
        assert len(read_tokens(path.with_name("step_000002.jsonl"), trajectories[1].id)) == 4
        tokens_file(path.with_name("step_000003.jsonl")).mkdir()
        log.write(3, trajectories)
        assert [metric.sum for metric in writes.take()] == [1.0] and writes.is_failing("rollouts")

    asyncio.run(run())


def test_evaluations_and_steps_without_an_update_have_a_file_too(tmp_path):
    log, trajectories = RolloutLog(tmp_path, decode), scripted_trajectories(1, 2)
    log.write(0, trajectories[:1], name="eval", append=True)
    path = log.write(0, trajectories[1:], name="eval", append=True)
    assert not tokens_file(path).exists()
    log.write_tokens(0, trajectories, "eval")
    assert all(len(read_tokens(path, t.id)) == 4 for t in trajectories)
    assert read_token_file(log.write(3, [])).rows == {}


def test_a_file_whose_values_are_damaged_is_named(tmp_path, monkeypatch):
    trajectories = scripted_trajectories(40, 2)
    num_tokens = sum(len(turn.output_ids) for trajectory in trajectories for turn in trajectory.turns)
    monkeypatch.setattr(token_log, "_TOKENS_OF_A_GROUP", -(-num_tokens // 5))
    path = tokens_file(RolloutLog(tmp_path, decode).write(1, trajectories))
    with pq.ParquetFile(path) as file:
        assert file.num_row_groups == 5
        damaged = bytearray(path.read_bytes())
        first = file.metadata.row_group(0).column(6)
        damaged[first.data_page_offset : first.data_page_offset + 40] = bytes(40)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"step_000001\.tokens\.parquet: no file of token values"):
        read_token_file(path)


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"\x00" * 500, None])
def test_a_damaged_file_is_an_error_that_names_it_and_a_missing_one_is_empty(tmp_path, damage):
    trajectories = scripted_trajectories(1, 1)
    path = RolloutLog(tmp_path, decode).write(1, trajectories)
    if damage is None:  # written half
        damage = tokens_file(path).read_bytes()[:-200]
    tokens_file(path).write_bytes(damage)
    with pytest.raises(DataError, match=r"step_000001\.tokens\.parquet: no file of token values"):
        read_token_file(path)
    tokens_file(path).unlink()
    assert read_token_file(path) is None


def test_a_failed_write_leaves_no_values_of_an_earlier_run(tmp_path):
    writes = FailedWrites()
    log = RolloutLog(tmp_path, decode, writes)
    path = log.write(1, scripted_trajectories(1, 2))
    path.unlink()
    path.mkdir()  # the file of rollouts can't be written
    log.write(1, scripted_trajectories(1, 1))
    assert writes.counts == {"rollouts": 1} and not tokens_file(path).exists()


def test_the_files_of_later_steps_include_their_token_values(tmp_path):
    log = RolloutLog(tmp_path, decode)
    for step in (1, 2):
        log.write(step, scripted_trajectories(1, 1))
    log.write(2, [], name="eval")
    names = [path.name for path in step_files(tmp_path / "rollouts", 2)]
    assert names == [f"{name}_000002{end}" for name in ("eval", "step") for end in (".jsonl", ".tokens.parquet")]


def byte_level(text: str) -> np.ndarray:
    return np.array(tiny_tokenizer().encode(text, add_special_tokens=False), np.int32)


def pieces(decode, ids: np.ndarray) -> list[str]:
    text = decode(ids)
    counts = TokenTexts(decode).characters(ids, text)
    assert len(counts) == len(ids) and counts.sum() == len(text)
    ends = np.cumsum(counts)
    return [text[end - count : end] for end, count in zip(ends, counts)]


def decode_bytes(ids: np.ndarray) -> str:
    """A tokenizer with a token for each byte, as the fallback of byte-level vocabularies."""
    return bytes(ids.tolist()).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["", "plain text", "é→漢字", "a🙂b👩‍👩‍👧c", "\x00\r\n\u202e\ufeff"])
def test_a_character_of_several_tokens_belongs_to_the_first_of_them(text):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    expected = [piece for letter in text for piece in (letter, *[""] * (len(letter.encode()) - 1))]
    assert pieces(decode_bytes, ids) == expected


@pytest.mark.parametrize(
    "data", [b"\xff", b"ab\xffcd", b"\xe2\x82", b"a\xe2\x82b\xe2\x82\xacc", b"\xff" * 100 + b"end"]
)
def test_bytes_that_are_no_text_belong_to_tokens_nearby(data):
    found = pieces(decode_bytes, np.frombuffer(data, np.uint8).astype(np.int32))
    assert "".join(found) == data.decode("utf-8", "replace")
    if data[-3:] == b"\xacc":
        assert found[0] == "a" and found[-4:] == ["€", "", "", "c"]


def test_a_tokenizer_that_changes_the_begin_of_a_text_gives_each_token_its_own():
    """As Llama's: the space before a word is part of its token, except at the begin of a text."""
    table = ["▁Hello", "▁world", "!", "▁Hello"]
    assert pieces(
        lambda ids: "".join(table[i] for i in ids).replace("▁", " ").removeprefix(" "), np.array([0, 1, 2, 3])
    ) == [
        "Hello",
        " world",
        "!",
        " Hello",
    ]
    assert pieces(decode, np.array([5, 6, 77])) == ["5", " 6", " 77"]


def test_texts_of_a_real_vocabulary_are_divided_at_its_tokens():
    tokenizer = tiny_tokenizer()
    ids = byte_level("12+3 = 15, naïve — 🙂<|im_end|>")

    def decoded(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)

    alone = [tokenizer.decode([i]) for i in ids.tolist()]
    for piece, token in zip(pieces(decoded, ids), alone):
        assert piece == token or "\ufffd" in token


def test_token_values_are_read_without_torch():
    code = "import sys; sys.modules['torch'] = None; import meshrl.monitor.token_log, meshrl.tools.viewer.page"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
