import sys
from pathlib import Path

from tiny_run import write_run

from meshrl.cli import main
from meshrl.config.case import Purpose
from meshrl.config.docs import every_key, list_keys
from meshrl.config.load import load_run_config, load_sft_config
from meshrl.plan.explain import explain


def _line(text: str, start: str) -> str:
    return next(" ".join(line.split()) for line in text.splitlines() if line.strip().startswith(start))


def test_explain_shows_values_origins_and_keys_without_effect(good: Path):
    text = explain(load_run_config(good, ["train.optimizer.lr=3e-6"]))
    assert _line(text, "lr:") == "lr: 3e-06 # command line"
    assert _line(text, "max_new_tokens:") == "max_new_tokens: 28 # run.yaml:11"
    assert _line(text, "dp_shard:") == "dp_shard: 2 # default, from -1"
    assert _line(text, "# estimator:") == "# estimator: k3 # unused: algo.kl.coef is 0"


def test_explain_computes_the_sizes_of_a_step(good: Path):
    loaded = load_run_config(good, ["train.updates_per_step=3", "train.max_tokens_per_microbatch=300"])
    text = explain(loaded, num_data_rows=30)
    assert text.startswith("# ") and text.index("# rows per step") < text.index("\nmodel:")  # before the details
    assert _line(text, "# rows per step") == "# rows per step 6 prompts x 8 samples = 48"
    assert "20 steps x 3 = 60" in _line(text, "# optimizer steps")
    assert _line(text, "# rows per optimizer step").endswith("48 / 3 = 16")
    assert "dp_replicate 1 x dp_shard 2" in _line(text, "# mesh")
    assert "100 prompt + 28 answer = 128 tokens" in _line(text, "# longest row")
    assert "16 x 128 = 2,048" in _line(text, "# tokens per optimizer step")
    # 16 rows on 2 ranks are 8 a rank; 300 // 128 = 2 rows of the longest length fit into one micro-batch.
    assert "at most 4 per optimizer step" in _line(text, "# micro-batches per rank")
    assert "120 prompts x 8 = 960" in _line(text, "# samples of the run")
    assert "4.00 of 30 rows" in _line(text, "# passes over the data")
    loaded = load_run_config(good, ["data.eval_path=null", "data.eval_fraction=0.2"])
    assert "5.00 of about 24 rows" in _line(explain(loaded, num_data_rows=30), "# passes over the data")


def test_explain_counts_peers_by_either_name_of_tp(good: Path):
    for key in ("train.mesh.tp", "train.tensor_model_parallel_size"):
        text = explain(load_run_config(good, [f"{key}=2", "train.max_tokens_per_microbatch=300"]))
        assert _line(text, "# mesh").endswith("dp_replicate 1 x dp_shard 1 x ulysses 1 x tp 2")
        # 48 rows on the one data rank; 300 // 128 = 2 of them fit into one micro-batch.
        assert "at most 24 per optimizer step" in _line(text, "# micro-batches per rank")
        assert _line(text, "# micro-batches per rank").endswith("for 2 ranks together")
        assert "a full copy in each" in _line(text, "# samplers")


def _notes(config: Path, *overrides: str, purpose: Purpose = "train") -> list[str]:
    """The notes of the start; --explain prints them all."""
    loaded = load_run_config(config, overrides, purpose=purpose)
    assert all(f"# note: {notice}" in explain(loaded) for notice in loaded.notices)
    return [notice for notice in loaded.notices if "in turn" in notice]


def test_explain_notes_that_train_and_sampler_ranks_wait_for_each_other(good: Path):
    (note,) = _notes(good, "cluster.num_rollout_ranks=2")
    assert note == (
        "2 train ranks and 2 sampler ranks run in turn: each waits while the other works; loop.kind=one_step_off or "
        "fully_async lets them work at the same time (docs/schedules.md), or set cluster.num_train_ranks=4 and "
        "cluster.num_rollout_ranks=0 to use all 4 for both."
    )
    (one,) = _notes(good, "cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1")
    assert one.startswith("1 train rank and 1 sampler rank run in turn")
    assert _notes(good) == []
    assert _notes(good, "cluster.num_rollout_ranks=2", purpose="eval") == []  # an evaluation trains nothing


def test_explain_notes_when_a_server_needs_separate_sampler_ranks(good: Path):
    server = ["rollout.engine=vllm", f"rollout.vllm.python={sys.executable}"]
    (note,) = _notes(good, *server, "cluster.num_rollout_ranks=2")
    assert "2 train ranks and 2 sampler ranks run in turn" in note
    assert "do not fit on one device together" in note and "rollout.release_memory=true" in note
    assert "cluster.num_train_ranks=4 and cluster.num_rollout_ranks=0" in note
    for engine, more in (("endpoint", ["rollout.endpoint.weights=files"]), ("sglang", [])):
        url = f"rollout.{engine}.url=http://127.0.0.1:30000"
        (note,) = _notes(good, f"rollout.engine={engine}", url, "cluster.num_rollout_ranks=1", *more)
        assert note.startswith(f"2 train ranks and the server at rollout.{engine}.url run in turn")
        assert "cluster.num_train_ranks=" not in note  # the server has no other ranks to use


def test_explain_of_sft_has_its_own_arithmetic(good_sft: Path):
    text = explain(load_sft_config(good_sft))
    assert _line(text, "# optimizer steps").endswith("40")
    assert "16 x 128 = 2,048" in _line(text, "# tokens per optimizer step")
    assert _line(text, "# rows of the run").endswith("640")
    assert "sampling" not in text and "algo" not in text


def test_explain_of_an_agent_with_turns_does_not_guess_its_longest_row(good: Path):
    text = explain(load_run_config(good, ["agent.kind=multi_turn"]))
    assert "the model's context" in _line(text, "# longest row")
    bounded = explain(load_run_config(good, ["agent.kind=multi_turn", "rollout.max_context_tokens=512"]))
    assert "512 tokens" in _line(bounded, "# longest row")


def test_lines_of_explain_have_at_most_100_characters(write, good: Path):
    short = explain(load_run_config(good, ["algo.aggregation=seq_mean_token_mean", "model.dtype=float32"]))
    lines = [line for line in short.splitlines() if str(good.parent) not in line]
    assert max(map(len, lines)) <= 100


def test_keys_are_found_by_name_by_description_and_by_similarity():
    assert list_keys("lr").startswith("train.optimizer.lr   number > 0 or null   (default null)")
    assert "rollout.sampling.temperature" in list_keys("logits")
    assert "cluster.timeout_s" in list_keys("RANK AND phase")
    assert list_keys("num_generations").startswith("loop.samples_per_prompt")
    nearest = list_keys("stepz").splitlines()
    assert nearest[0] == "no key contains 'stepz'. Nearest:" and any("num_steps " in line for line in nearest)
    assert "\nreward.terms.right.weight   number " in list_keys("reward.terms.right.wieght")
    none = list_keys("zzz")
    assert none.startswith("no key contains 'zzz'. No key has a similar name.") and "model, train, rollout" in none
    leaves = [path for path, key in every_key().items() if not key.is_section]
    sections = ["model.lora", "train.mesh", "data.sources", "cluster.deadlines"]
    assert {*leaves, *sections} < {line.split()[0] for line in list_keys().splitlines()[::2]}
    assert "\ncluster.deadlines   a section" in list_keys() and "NAME   " not in list_keys()


def test_letters_inside_a_word_of_the_description_do_not_match():
    """ "already" contains "lr"."""
    found = list_keys("lr").splitlines()[::2]
    assert [line.split()[0] for line in found] == [
        "train.optimizer.lr",
        "train.scheduler.min_lr_ratio",
        "train.master_dtype",
        "train.optimizer.weight_decay",
        "train.scheduler.warmup_steps",
    ]


def test_every_key_has_a_description():
    for path, key in every_key().items():
        assert key.text and not key.text.endswith("."), path


def test_what_is_wrong_with_files_that_are_here_is_an_error(tmp_path: Path, monkeypatch, capsys):
    """Damaged rows end the command with an error; a model that is elsewhere does not."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = write_run(tmp_path)
    command = ["train", str(config), "--explain"]
    assert main(command) == 0 and "# first prompt: " in capsys.readouterr().out
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"question": "1+1", "answer": \n')
    assert main([*command, "model.path=of/another-machine"]) == 0
    assert "# first prompt: can't be shown from what is on this machine" in capsys.readouterr().out
    assert main(command) == 1
    assert "rows.jsonl:21: not JSON" in capsys.readouterr().err
