"""Keys that do not fit each other: the command line wins over the file, the file over its base, with a note."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from golden import cases, check_case

from meshrl.config import check
from meshrl.config import load as config_load
from meshrl.config.algo import LOSS_ARGS, LossConfig
from meshrl.config.explain import to_yaml
from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig
from meshrl.core.errors import ConfigError
from meshrl.core.processor import products_of_16_bits_are_slow
from meshrl.data.check import check_data
from meshrl.plan.explain import explain
from meshrl.reward.self_test import check_graders

load_run_config = partial(config_load.load_run_config, further=[check_data, partial(check_graders, {})])
load_sft_config = partial(config_load.load_sft_config, further=[check_data])

VOID = Path(__file__).parent / "golden" / "void.txt"
# Inputs of this file: content of a config over run.yaml, override that makes a key of it void, this key.


def prepare(good: Path) -> None:
    (good.parent / "other.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (good.parent / "t").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def left_out(loaded: Loaded[RunConfig]) -> list[str]:
    return [note for note in loaded.notices if " left out because of " in note]


@pytest.mark.parametrize("given", [given for given, _ in cases(VOID)])
def test_what_the_command_line_makes_void_in_the_file_goes_with_a_note(
    write, good: Path, monkeypatch: pytest.MonkeyPatch, given: str
):
    for package in ("wandb", "ray"):
        monkeypatch.setitem(sys.modules, package, sys)  # as if it were installed
    prepare(good)
    file, override, key = json.loads(given.replace("PYTHON", sys.executable))
    loaded = load_run_config(write(f"base: run.yaml\n{file}\n", "void.yaml"), [override])
    (note,) = [note for note in left_out(loaded) if key in note.partition(" left out ")[0]]
    check_case(VOID, given, note.replace(sys.executable, "PYTHON"), home=good.parent)
    full = next(part for part in note.partition(" left out ")[0].split(" ") if part.endswith(key))
    assert loaded.origins.get(full, "default").startswith("default")


def refusal(config: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_run_config(config, overrides)
    return " ".join(str(error.value).split())


def test_keys_of_one_origin_that_do_not_fit_and_keys_that_a_weaker_one_makes_void_are_errors(
    write, good: Path, good_sft: Path
):
    both = write("base: run.yaml\ndata: {eval_path: null, eval_limit: 4}\n", "both.yaml")
    message = refusal(both)
    unset = "data.eval_fraction = null [default] data.eval_sets = {} [default] would have no effect"
    assert f"data.eval_limit = 4 [both.yaml:2] data.eval_path = null [both.yaml:2] {unset}" in message
    assert "would have no effect" in refusal(good, "data.eval_path=null", "data.eval_limit=4")
    named = ["data.sources={a: {path: train.jsonl, prompt: question}}", "data.prompt=answer"]
    message = refusal(good, "data.eval_path=null", *named)
    assert "data.prompt = answer" in message and "each of data.sources names its own" in message
    weaker = write("base: run.yaml\ndata: {eval_path: null}\n", "weaker.yaml")
    message = refusal(weaker, "data.eval_limit=4")
    assert f"data.eval_limit = 4 [command line] data.eval_path = null [weaker.yaml:2] {unset}" in message
    assert "never reach its peak" in refusal(good, "train.scheduler.warmup_steps=20")
    with pytest.raises(ConfigError, match="no effect: an SFT step is one optimizer step"):
        load_sft_config(good_sft, ["train.updates_per_step=2"])


def test_a_file_makes_keys_of_its_base_void(write, good: Path):
    write("base: run.yaml\ndata: {eval_limit: 4}\nloop: {eval_every_steps: 5, eval_samples: 2}\n", "base.yaml")
    loaded = load_run_config(write("base: base.yaml\ndata: {eval_path: null}\n", "child.yaml"))
    assert left_out(loaded) == [
        "data.eval_limit = 4 [base.yaml:2], loop.eval_samples = 2 [base.yaml:3] are left out because of "
        "data.eval_path = null [child.yaml:2]: no effect, since data.eval_path is null.",
        "loop.eval_every_steps = 5 [base.yaml:3] is left out because of data.eval_path = null [child.yaml:2]: there "
        "are no held-out rows for an evaluation.",
    ]
    assert f"# note: {left_out(loaded)[0]}" in explain(loaded)
    assert load_run_config(write(to_yaml(loaded), "again.yaml")).config == loaded.config


def test_a_quick_trial_of_a_longer_run_has_no_warm_up(write, good: Path, good_sft: Path):
    warm = write("base: run.yaml\ntrain: {scheduler: {warmup_steps: 10}}\n", "warm.yaml")
    (note,) = left_out(load_run_config(warm, ["loop.num_steps=2"]))
    assert note == (
        "train.scheduler.warmup_steps = 10 [warm.yaml:2] is left out because of loop.num_steps = 2 [command line]: "
        "the run has 2 optimizer steps, so the learning rate would never reach its peak; without a warm-up it starts "
        "there."
    )
    (one,) = left_out(load_run_config(warm, ["loop.num_steps=1"]))
    assert "the run has 1 optimizer step, so" in one
    warm_sft = write("base: sft.yaml\ntrain: {scheduler: {warmup_steps: 10}}\n", "warm_sft.yaml")
    assert load_sft_config(warm_sft, ["sft.num_steps=2"]).config.train.scheduler.warmup_steps == 0
    assert load_run_config(warm, ["loop.num_steps=11"]).config.train.scheduler.warmup_steps == 10


def test_what_depends_on_a_key_that_was_left_out_goes_too(write, good: Path):
    """Without num_train_ranks the run has one rank, which the mesh of two does not fit."""
    path = write("base: run.yaml\ntrain: {mesh: {dp_shard: 2}}\n", "mesh.yaml")
    loaded = load_run_config(path, ["cluster.executor=inline"])
    assert (loaded.config.cluster.num_train_ranks, loaded.config.train.mesh.dp_shard) == (1, 1)
    assert len(left_out(loaded)) == 2


def test_a_resolved_config_as_base_takes_another_loss_without_the_keys_of_its_own(write, good: Path):
    resolved = write(to_yaml(load_run_config(good)), "config.yaml")
    assert "dual_clip: null" in resolved.read_text()
    child = write("base: config.yaml\nalgo: {loss: {kind: 'own_algorithms:gspo', clip_low: 0.001}}\n", "gspo.yaml")
    loaded = load_run_config(child)
    assert loaded.config.algo.loss.args == {"clip_low": 0.001}, "not ppo_clip's clip_high, which gspo takes, too"
    (note,) = left_out(loaded)
    assert "algo.loss.dual_clip = null [config.yaml:" in note
    assert "because of algo.loss.kind = own_algorithms:gspo [gspo.yaml:2]: arguments of ppo_clip, another kind" in note
    back = load_run_config(child, ["algo.loss.kind=ppo_clip"])
    assert back.config.algo.loss.clip_low == 0.2 and len(left_out(back)) == 2
    same = load_run_config(child, ["algo.loss.kind=own_algorithms:gspo", "algo.loss.clip_high=0.002"])
    assert same.config.algo.loss.args == {"clip_low": 0.001, "clip_high": 0.002}


def test_each_kind_of_loss_has_its_own_defaults(write, good: Path):
    assert LossConfig(kind="gspo").model_fields_set == {"kind"}
    listed = LOSS_ARGS["ppo_clip"] | LOSS_ARGS["sapo"]
    assert {name: LossConfig.model_fields[name].default for name in listed} == listed
    for kind, args in LOSS_ARGS.items():
        loaded = load_run_config(good, [f"algo.loss={kind}"])
        assert loaded.config.algo.loss.args == args
        again = load_run_config(write(to_yaml(loaded), f"{kind}.yaml"))
        assert again.config.algo.loss == loaded.config.algo.loss and left_out(again) == []
    assert load_run_config(good, ["algo.loss={kind: gspo, clip_low: 1e-3}"]).config.algo.loss.args == {
        "clip_low": 1e-3,
        "clip_high": 4e-4,
    }


@pytest.mark.parametrize("kind", ["gspo", "sapo"])
def test_weights_of_answers_that_the_paper_of_a_loss_does_not_have_are_noted(good: Path, kind: str):
    for aggregation, is_noted in (("token_mean", True), ("seq_mean_token_mean", False)):
        notices = load_run_config(good, [f"algo.loss={kind}", f"algo.aggregation={aggregation}"]).notices
        assert any("weights all answers equally" in notice for notice in notices) == is_noted


@pytest.mark.parametrize("nothing", ["null", "{}"])
def test_an_entry_of_a_file_or_base_is_removed_by_null_or_an_empty_section(write, good: Path, nothing: str):
    """Each of the two changed nothing."""
    given = "right: {kind: math_answer}, form: {kind: format, args: {regex: x}}"
    path = write(f"base: run.yaml\nreward: {{terms: {{{given}}}}}\n", "terms.yaml")
    prepare(good)

    def terms(config: Path, *overrides: str) -> list[str]:
        return list(load_run_config(config, overrides).config.reward.terms)

    assert terms(path, f"reward.terms.form={nothing}") == ["right"]
    assert terms(path, f"reward.terms={{form: {nothing}, new: {{kind: math_answer}}}}") == ["right", "new"]
    assert terms(path, f"reward.terms={nothing}", "reward.terms.new.kind=math_answer") == ["new"]
    child = write(f"base: terms.yaml\nreward:\n  terms:\n    right: {nothing}\n", "child.yaml")
    assert terms(child) == ["form"]
    message = refusal(path, f"reward.terms={nothing}")
    assert "reward.terms = {} [command line] without a reward there is nothing to learn" in message
    message = refusal(path, f"reward.terms.rigth={nothing}")
    assert "1 problem" in message
    assert "reward.terms.rigth [command line] null and {} remove an entry of a weaker layer" in message
    assert "none has this entry. There are: right, form." in message
    assert "data.sources.a [command line] null and {} remove an entry" in refusal(path, f"data.sources.a={nothing}")
    assert "1 problem" in refusal(good, f"reward.terms.answer={nothing}"), "the entry of the default is not in a file"
    sources = write(
        "base: run.yaml\ndata: {path: null, sources: {a: {path: other.jsonl}, b: {path: test.jsonl}}}\n", "sources.yaml"
    )
    assert list(load_run_config(sources, [f"data.sources.b={nothing}"]).config.data.sources) == ["a"]
    config = load_run_config(sources, [f"data.sources={nothing}", "data.path=other.jsonl"]).config
    assert config.data.sources == {}


def test_arguments_are_emptied_by_an_empty_dict_and_null_is_a_value_of_them(write, good: Path):
    path = write("base: run.yaml\nagent: {kind: multi_turn, args: {max_turns: 3, more: {a: 1}}}\n", "args.yaml")

    def args(*overrides: str) -> dict[str, object]:
        return load_run_config(path, overrides).config.agent.args

    assert args("agent.args={}") == args("agent.args=null") == {}
    in_python = load_run_config({"base": str(path), "agent": {"args": {}}})
    assert in_python.config.agent.args == {} and in_python.origins["agent.args"] == "config-dict"
    assert args("agent.args={}", "agent.args.max_turns=5") == {"max_turns": 5}
    assert args("agent.args.max_turns=null") == {"max_turns": None, "more": {"a": 1}}
    assert args("agent.args.more={}") == {"max_turns": 3, "more": {}}


def test_bounds_of_a_ratio_that_is_always_1_are_noted(good: Path):
    def notes(*overrides: str, purpose="train") -> list[str]:
        loaded = load_run_config(good, overrides, purpose=purpose)
        return [note for note in loaded.notices if "exactly 1" in note]

    (note,) = notes("algo.loss.clip_high=0.28", "algo.loss.dual_clip=3")
    assert note.startswith("algo.loss.clip_high = 0.28 [command line], algo.loss.dual_clip = 3 [command line] have no")
    assert "effect: train.updates_per_step is 1" in note
    stale = ["loop.kind=fully_async", "cluster.num_rollout_ranks=1"]  # old is still the policy of the step's start
    assert len(notes(*stale, "algo.loss.clip_high=0.28")) == 1
    assert notes("algo.loss.clip_high=0.28", "train.updates_per_step=2") == []
    assert notes("algo.loss.clip_high=0.2") == notes() == []
    assert notes("algo.loss.clip_high=0.28", purpose="eval") == []
    assert notes("algo.loss={kind: 'own_algorithms:gspo', clip_high: 0.28}") == []


def test_intervals_above_the_number_of_steps_are_noted(good: Path, good_sft: Path):
    def notes(loaded) -> list[str]:
        return [note for note in loaded.notices if "never reached" in note]

    (note,) = notes(load_run_config(good, ["loop.eval_every_steps=21", "loop.save_every_steps=20"]))
    assert note.startswith("loop.eval_every_steps = 21 [command line] is never reached: the run has 20 steps, and is ")
    (note,) = notes(load_sft_config(good_sft, ["sft.save_every_steps=41"]))
    assert note.startswith("sft.save_every_steps = 41 [command line] is never reached: the run has 40 steps.")


def test_overrides_that_an_evaluation_does_not_read_are_noted(good: Path):
    def notes(*overrides: str, purpose="eval") -> list[str]:
        loaded = load_run_config(good, overrides, purpose=purpose)
        return [note for note in loaded.notices if "an evaluation" in note]

    (note,) = notes("train.optimizer.lr=1", "algo.advantage=rloo", "loop.num_steps=3", "cluster.num_train_ranks=1")
    assert note == (
        "loop.num_steps = 3, train.optimizer.lr = 1, algo.advantage = rloo on the command line have no effect: an "
        "evaluation only samples and grades."
    )
    assert notes("loop.eval_samples=2", "loop.eval_term=weighted_sum", "loop.eval_pass_score=2") == notes() == []
    assert notes("train.optimizer.lr=1", purpose="train") == []


FLAGS = "fpu sse2 avx avx2 fma"


@pytest.mark.parametrize(
    ("flags", "accelerator", "slow"),
    [
        (FLAGS, False, True),
        (FLAGS, True, False),
        (f"{FLAGS} avx512f avx512vl avx512bw avx512dq", False, False),
        (f"{FLAGS} avx512f", False, True),
        (f"{FLAGS} amx_bf16", False, False),
        (f"{FLAGS} avx_ne_convert", False, False),
        ("asimd bf16", False, False),
        ("", False, False),
    ],
)
def test_which_cpus_are_slow_in_16_bits(flags, accelerator, slow):
    assert products_of_16_bits_are_slow(flags.split(), accelerator) == slow


@pytest.mark.parametrize("slow", [True, False])
def test_the_default_dtype_is_float32_on_a_cpu_that_is_slow_in_16_bits(good, good_sft, monkeypatch, slow):
    monkeypatch.setattr(check, "products_of_16_bits_are_slow", lambda: slow)
    for loaded in (load_run_config(good), load_sft_config(good_sft)):
        assert loaded.config.model.dtype == ("float32" if slow else "bfloat16")
        assert sum("model.dtype is float32, since this CPU" in notice for notice in loaded.notices) == slow
        origin = loaded.origins["model.dtype"]
        assert origin.startswith("default, here float32: this CPU has no fast") if slow else origin == "default"
        elsewhere = (load_run_config if loaded.origins.get("loop.kind") else load_sft_config)(loaded.path, starts=None)
        assert elsewhere.config.model.dtype == "bfloat16" and not any("this CPU" in line for line in elsewhere.notices)
    given = load_run_config(good, ["model.dtype=bfloat16"])
    assert given.config.model.dtype == "bfloat16"
    assert sum("float32 is many times faster here" in notice for notice in given.notices) == slow
    assert load_run_config(good, ["cluster.executor=ray"]).config.model.dtype == "bfloat16", "other machines"


@pytest.mark.parametrize(
    ("engine", "share"),
    [(f"vllm: {{python: '{sys.executable}'", "vllm.gpu_memory_utilization"),
     (f"sglang: {{python: '{sys.executable}'", "sglang.mem_fraction_static")],
)  # fmt: skip
def test_samplers_with_devices_of_their_own_take_most_of_their_memory(write, good, engine, share):
    """A share that is given is kept."""
    name, key = share.split(".")
    own = f"rollout: {{engine: {name}, {engine}}}}}\ncluster: {{num_rollout_ranks: 1}}\n"
    path = write(f"base: run.yaml\n{own}", "own.yaml")
    for overrides, expected, how in (
        ([], 0.9, "default, here 0.9: cluster.num_rollout_ranks is above 0: samplers have devices of their own"),
        (["cluster.num_rollout_ranks=0"], 0.5, "default"),
        ([f"rollout.{share}=0.7"], 0.7, "command line"),
    ):
        loaded = load_run_config(path, overrides)
        assert getattr(getattr(loaded.config.rollout, name), key) == expected
        assert loaded.origins[f"rollout.{share}"] == how


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (["train.max_tokens_per_microbatch=100"], "above train.max_tokens_per_microbatch = 100: rows"),
        (["train.max_tokens_per_microbatch=100", "train.mesh.ulysses=2", "cluster.num_train_ranks=2"], None),
        (["data.max_prompt_tokens=250", "train.max_tokens_per_microbatch=100", "train.mesh.ulysses=2",
          "cluster.num_train_ranks=2"], "= 100 x 2 ranks of train.mesh.ulysses: rows"),
        (["data.max_prompt_tokens=20000"], "= null, which is at most 16384: rows"),
    ],
)  # fmt: skip
def test_a_row_above_the_budget_of_its_ranks_gets_a_note(good, overrides, notice):
    (good.parent / "tiny" / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 99999}')
    sizes = ["data.max_prompt_tokens=50", "rollout.sampling.max_new_tokens=100", "rollout.max_context_tokens=null"]
    given = load_run_config(good, [*sizes, *overrides]).notices
    found = [text for text in given if "never split" in text]
    assert not found if notice is None else notice in found[0]
