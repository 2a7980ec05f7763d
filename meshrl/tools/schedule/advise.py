"""Predictions for the splits of a number of GPUs between training and sampling, and the recommendation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import wrap

from meshrl.config.run import RunConfig
from meshrl.core.errors import ConfigError
from meshrl.monitor.sinks import duration
from meshrl.plan.disk_use import size_text
from meshrl.tools.runs import table
from meshrl.tools.schedule.inputs import Inputs, measured, resized
from meshrl.tools.schedule.step_time import FIRST_STEPS, Prediction, Setup, predict

MAX_STALENESS = 4  # the largest that is tried; more has little to gain, and importance weights become worse
WORTH = 1.05  # a schedule with more staleness is recommended if it is this much faster
WORTH_VERSION = 1.02  # the same for one more version of max_staleness
MAX_SPLITS = 17
ANSWERS = 8192  # of a prediction, about
STALENESS = {"colocated": 0, "one_step_off": 1, "fully_async": 2}  # with which the splits of each kind are compared

Memory = Callable[[Sequence[str]], tuple[int, bool]]
"""Bytes of the largest phase of a rank under these overrides, and whether they fit."""
Check = Callable[[Sequence[str]], object]
"""Checks the config with these overrides, such as cluster.num_train_ranks=4. Raises: ConfigError."""


def advise(config: RunConfig, check: Check, folder: Path, gpus: int | None, memory: Memory | None = None) -> str:
    """The predictions and the recommendation as text. check: of the config; only what it accepts is predicted. folder:
    of a colocated run. memory: only what fits is recommended."""
    count = config.cluster.num_train_ranks + config.cluster.num_rollout_ranks if gpus is None else gpus
    if count < 1:
        raise ConfigError(f"--gpus is {count}; it must be 1 or more")
    inputs = measured(folder)
    refusals: dict[str, str] = {}  # overrides -> why the config's check refuses them

    def accepts(setup: Setup) -> bool:
        keys = overrides(setup)
        try:
            check(keys)
        except ConfigError as error:
            refusals[" ".join(keys)] = str(error)
            return False
        return True

    predictions = best_of_each_kind(setup_of(config, inputs), count, accepts)
    if not predictions:
        keys, why = next(iter(refusals.items()))
        raise ConfigError(f"no schedule on {count} GPUs is accepted; with {keys}: {why}")
    kinds = {prediction.setup.loop.kind for prediction in predictions}
    refused = [kind for kind in STALENESS if kind not in kinds] if count > 1 else []
    notes = tuple(f"{kind}: the config's check refuses it on {count} GPUs, with every split" for kind in refused)
    needs = [] if memory is None else [memory(overrides(each.setup)) for each in predictions]
    fitting = [each for each, (_, fits) in zip(predictions, needs, strict=True) if fits] if needs else predictions
    return describe(predictions, fitting, needs, replace(inputs, notes=inputs.notes + notes))


def setup_of(config: RunConfig, inputs: Inputs, num_steps: int | None = None) -> Setup:
    """The config's own schedule. num_steps: None = enough for means."""
    loop = config.loop
    enough = FIRST_STEPS + MAX_STALENESS + min(24, max(6, ANSWERS // (loop.prompts_per_step * loop.samples_per_prompt)))
    return Setup(
        loop=loop.model_copy(update={"num_steps": num_steps or enough}),
        train_ranks=config.cluster.num_train_ranks,
        rollout_ranks=config.cluster.num_rollout_ranks,
        max_running=config.rollout.max_running_requests,
        costs=inputs.costs,
        lengths=resized(inputs.lengths, config),
    )


def best_of_each_kind(base: Setup, gpus: int, accepts: Callable[[Setup], bool] = lambda _: True) -> list[Prediction]:
    """For each kind, the fastest accepted split of the GPUs, if there is one; for fully_async with the smallest
    max_staleness that is enough."""
    found = []
    for kind, staleness in STALENESS.items():
        counts = [gpus] if kind == "colocated" else range(1, gpus)
        made = base.with_loop(kind=kind, max_staleness=staleness)
        splits = [replace(made, train_ranks=count, rollout_ranks=gpus - count) for count in counts]
        if accepted := [setup for setup in splits if accepts(setup)]:
            found.append(_fastest(accepted))
    if found and found[-1].setup.loop.kind == "fully_async":
        split = found.pop()
        best = predict(split.setup.with_loop(max_staleness=1))
        for versions in range(2, MAX_STALENESS + 1):
            tried = split if versions == 2 else predict(split.setup.with_loop(max_staleness=versions))
            if best.step_s > tried.step_s * WORTH_VERSION ** (versions - best.setup.loop.staleness):
                best = tried
        # samplers that run further ahead may need fewer ranks
        again = _fastest([setup.with_loop(max_staleness=best.setup.loop.staleness) for setup in accepted])
        found.append(min(best, again, key=lambda prediction: prediction.step_s))
    return found


def _fastest(splits: Sequence[Setup]) -> Prediction:
    """The fastest of these, in the order of their train ranks: some of them, then those near the best."""
    every = -(-len(splits) // MAX_SPLITS)
    best = min(map(predict, splits[::every]), key=lambda prediction: prediction.step_s)
    near = splits.index(best.setup)
    finer = [setup for at, setup in enumerate(splits) if 0 < abs(at - near) < every]
    return min([best, *map(predict, finer)], key=lambda prediction: prediction.step_s)


def overrides(setup: Setup) -> list[str]:
    """The keys of the config that choose this schedule."""
    keys = [f"loop.kind={setup.loop.kind}", f"cluster.num_train_ranks={setup.train_ranks}"]
    keys.append(f"cluster.num_rollout_ranks={setup.rollout_ranks}")
    return [*keys, f"loop.max_staleness={setup.loop.staleness}"] if setup.loop.kind == "fully_async" else keys


def recommended(predictions: Sequence[Prediction]) -> Prediction:
    """The schedule with the least staleness, unless a later one is clearly faster."""
    chosen = predictions[0]
    for prediction in predictions[1:]:
        if prediction.step_s * WORTH < chosen.step_s:
            chosen = prediction
    return chosen


def reason(predictions: Sequence[Prediction], chosen: Prediction) -> str:
    """Why this one is recommended."""
    others = [p for p in predictions if p is not chosen]
    compared = ", ".join(f"{p.step_s / chosen.step_s:.2f} x as fast as {p.setup.loop.kind}" for p in others)
    if not others:
        only = "the config's check accepts no other schedule"
        return only if chosen.setup.train_ranks > 1 else "one GPU can only sample and train in turn"
    if chosen is predictions[0]:
        return f"no other schedule is 5 % faster, and it has the least staleness ({compared})"
    longer = "training" if chosen.train_idle < chosen.rollout_idle else "sampling"
    if min(chosen.train_idle, chosen.rollout_idle) > 0.25:
        longer = "the time of the longest answers"
    versions = f"samples are {chosen.staleness:.1f} versions old on average, {chosen.max_staleness} at most"
    return f"it is {compared}; {longer} limits it; {versions}"


def describe(
    predictions: Sequence[Prediction],
    fitting: Sequence[Prediction],
    needs: Sequence[tuple[int, bool]],
    inputs: Inputs,
) -> str:
    """The table, the recommendation among those that fit, and the assumptions, for the terminal. needs: of each
    prediction, as of `Memory`; empty = memory is not planned."""
    rows = [[*COLUMNS], *([show(prediction) for show in COLUMNS.values()] for prediction in predictions)]
    if needs:
        texts = [f"{size_text(size)}{'' if fits else ', too large'}" for size, fits in needs]
        rows = [[*row, text] for row, text in zip(rows, ["memory of a GPU", *texts], strict=True)]
    costs = [f"{name}={value:.3g}" for name, value in asdict(inputs.costs).items()]
    return "\n".join(
        [
            *table(rows),
            "",
            *_recommendation(fitting),
            "",
            f"times: {inputs.source}",
            *wrap("  ".join(costs), 110, initial_indent="  ", subsequent_indent="  "),
            *(f"note: {note}" for note in inputs.notes),
            *ASSUMPTIONS,
            f"tools take no time. Evaluations and checkpoints are left out. {LEFT_OUT[bool(needs)]} not checked.",
        ]
    )


def _recommendation(fitting: Sequence[Prediction]) -> list[str]:
    if not fitting:
        return ["no schedule fits into the memory; `meshrl plan` without --schedule lists changes that lower it"]
    chosen = recommended(fitting)
    return [f"recommended: {' '.join(overrides(chosen.setup))}", f"  {reason(fitting, chosen)}"]


COLUMNS: dict[str, Callable[[Prediction], str]] = {  # of the table
    "loop.kind": lambda p: p.setup.loop.kind,
    "train": lambda p: str(p.setup.train_ranks),
    "rollout": lambda p: str(p.setup.rollout_ranks or "same"),
    "max_staleness": lambda p: str(p.setup.loop.staleness),
    "step": lambda p: f"{p.step_s:.3g} s" if p.step_s < 100 else duration(p.step_s),
    "train idle": lambda p: f"{abs(p.train_idle):.0%}",  # 0 may be rounded to just below it
    "rollout idle": lambda p: f"{abs(p.rollout_idle):.0%}",
    "idle": lambda p: f"{abs(p.idle):.0%}",
    "staleness": lambda p: f"{p.staleness:.2f} (max {p.max_staleness})",
}

ASSUMPTIONS = (
    "assumed: training and decoding of different ranks do not slow each other down; training is linear in tokens and",
    "scales with the train ranks; a decode step is linear in its rows; a sync takes as long on any number of ranks;",
)
# Whether memory is planned -> what is not checked.
LEFT_OUT = {False: "Memory, and what staleness costs, are", True: "What staleness costs is"}
