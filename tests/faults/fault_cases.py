"""The injected faults by phase, and the expected behaviour and error of the run: the table of docs/faults.md.

`test_named_faults.py` runs every case; `scripts/make_docs.py` writes the page from this file and
`other_faults.txt`.
"""

from __future__ import annotations

from dataclasses import dataclass

from other_faults import OTHER_FAULTS


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a fault: a call of a RankWorker method; "" = before the RankWorker exists. split: in a rank that
    only samples; else in the second of two train ranks. deadline_s: of the phase, for a rank that does not answer; a
    tiny model needs a fraction of a second, but a new process imports torch."""

    phase: str
    method: str
    call: int = 1
    overrides: tuple[str, ...] = ()
    split: bool = False
    deadline_s: int = 8

    @property
    def rank(self) -> int:
        return 1

    @property
    def id(self) -> str:
        return f"{self.phase}{'-split' if self.split else ''}"


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """cause: the text of the first line after rank and phase; PHASE and LIMIT are replaced by those of the case."""

    how: str
    text: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class Case:
    place: Place
    fault: InjectedFault
    fast: bool = False  # part of the quick suite

    @property
    def id(self) -> str:
        return f"{self.place.id}-{self.fault.how}"

    @property
    def needs_cgroup(self) -> bool:
        """Whether the run must have its own memory cgroup."""
        return self.fault.how == "hog"

    @property
    def is_replaced(self) -> bool:
        """Whether the run replaces the rank and continues."""
        return self.place.split and self.fault.how != "raise"

    @property
    def cause(self) -> str:
        fault = FAULTS["exit"] if self.place.phase == "start" and self.fault.how == "raise" else self.fault
        code = 1 if self.fault.how == "raise" else 7
        text = fault.cause.replace("PHASE", self.place.phase).replace("LIMIT", str(self.place.deadline_s))
        return text.replace("CODE", str(code))

    @property
    def first_line(self) -> str:
        """The first line of the run's error, or of its note if the run continues."""
        return f"rank {self.place.rank} failed in phase '{self.place.phase}': {self.cause}"


EVAL = ("data.eval_path=rows.jsonl", "data.eval_limit=2")
PLACES = (
    Place(phase="start", method="", deadline_s=15),
    Place(phase="load", method="start", deadline_s=15),
    Place(phase="eval", method="generate", overrides=EVAL),
    Place(phase="rollout", method="generate"),
    Place(phase="annotate", method="forward", overrides=("algo.kl.coef=0.1",)),
    Place(phase="train", method="forward_backward"),
    Place(phase="optim", method="optim_step"),
    Place(phase="sync", method="sync", call=2),
    Place(phase="report", method="memory"),
    Place(phase="export", method="export"),
    Place(phase="checkpoint", method="finish_save"),
    Place(phase="end", method="stop"),
    Place(phase="rollout", method="generate", call=3, split=True),
    Place(phase="sync", method="receive", call=2, split=True),
)

FAULTS = {
    fault.how: fault
    for fault in (
        InjectedFault(how="raise", text="an exception", cause="raised RuntimeError: planted by a test"),
        InjectedFault(how="exit", text="`os._exit(7)`", cause="its process ended with exit code CODE"),
        InjectedFault(
            how="kill", text="SIGKILL, as from the kernel's OOM killer", cause="its process was killed by SIGKILL"
        ),
        InjectedFault(
            how="stop",
            text="SIGSTOP",
            cause="no answer within cluster.deadlines.PHASE = LIMIT s; its process is stopped (SIGSTOP, or a debugger)",
        ),
        InjectedFault(
            how="sleep", text="sleeps past the deadline", cause="no answer within cluster.deadlines.PHASE = LIMIT s"
        ),
        InjectedFault(how="memory", text="more memory than its limit", cause="raised MemoryError"),
        InjectedFault(
            how="hog",
            text="more memory than its cgroup has, so that the kernel kills it",
            cause="its process was killed by SIGKILL, by the kernel for lack of memory (its cgroup counts 1 such kill)",
        ),
    )
}

# Everywhere: an exception, a death and a missed deadline. The parent can't distinguish the other faults from these, so
# they are tested in a few places only.
EVERYWHERE = ("raise", "kill", "stop")
ALSO = {"exit": ("start", "rollout", "sync", "end"), "sleep": ("rollout", "train", "sync", "checkpoint")}
ALSO |= {"memory": ("load", "train", "export"), "hog": ("load", "train", "rollout-split")}
FAST = {"rollout-raise", "train-kill", "rollout-split-kill"}


def cases() -> list[Case]:
    """All cases, in the order of the phases of a run."""
    made = []
    for place in PLACES:
        for fault in FAULTS.values():
            if fault.how in EVERYWHERE or place.id in ALSO[fault.how]:
                case = Case(place=place, fault=fault)
                made.append(Case(place=place, fault=fault, fast=case.id in FAST))
    return made


def page() -> str:
    """The text of docs/faults.md."""
    lines = [_HEAD]
    for case in cases():
        kind = "samples only" if case.place.split else "trains"
        outcome = "the rank is replaced, the run continues" if case.is_replaced else "the run ends, exit code 1"
        where = f"`{case.place.method}`" if case.place.method else "before it can be called"
        lines.append(
            f"| {case.place.phase} | {kind} | {where} | {case.fault.text} | {case.cause.replace('|', '')} | {outcome} |"
        )
    lines.append(_OTHER)
    for title, faults in OTHER_FAULTS.items():
        lines.append(f"\n**{title}**\n\n| fault | what happens |\n| --- | --- |")
        lines += [f"| {what} | {outcome} |" for what, outcome, _ in faults]
    return "\n".join(lines) + "\n" + _TAIL


_HEAD = """# What happens when something breaks

This page is written by `scripts/make_docs.py` from `tests/faults/fault_cases.py`. `tests/faults` injects every
fault below into a real run and checks the first line of output, the exit code, and that no process, listening port,
shared memory or temporary folder is left.

A failed run first prints which rank failed, in which phase, and why:

    meshrl: RankFailure: rank 1 failed in phase 'train': its process was killed by SIGKILL (...)

Below this line are the traceback of the exception and the stacks of the other ranks; `stacks.txt` in the run's folder
has all threads of all ranks. The deadline of a phase is `cluster.deadlines.<phase>`, else `cluster.timeout_s`. Each
token that a sampler computes extends the deadline of its requests, so that a long answer has no limit, and each
micro-batch that ends extends the deadline of the rank's command to train or to score. If a rank does not answer,
another rank that only waits for it may miss its deadline first. The error still names the rank
that is the cause: a rank with a stopped process, else a rank that is not in a collective of torch.distributed, because
the others wait for it there. On accelerators the stack of a rank does not show whether it waits for others, unless it
waits on the CPU: then the error states that the cause can't be determined, and has the last collective of each rank,
from torch's flight recorder. (Tested with ranks on CPUs and with records in NCCL's format; not run on GPUs.)

An agent or a grader in the controller's process that blocks the event loop for longer than any phase may take ends that
process: it prints `Timeout (0:10:10)!` and its threads' stacks. Code that waits must be `async`, or run in a thread.

After a death by SIGKILL, the error states whether the memory controller of the run's cgroup has counted a kill since
the start. For the faults in which the kernel kills a rank, the test puts the run into its own memory cgroup, so that
the kernel really kills it; the test is skipped on systems that do not allow this.

"Occurs in" names a method of `RankWorker` (`meshrl/cluster/actors.py`); `receive` is a method of the rank's engine.

| phase | the rank | occurs in | fault | text after "rank 1 failed in phase ...:" | outcome |
| --- | --- | --- | --- | --- | --- |"""

_OTHER = """
## Faults outside the ranks

The test of each is named in `tests/faults/other_faults.txt`."""

_TAIL = """
## Ranks that only sample

With `cluster.num_rollout_ranks` above 0, a sampler that dies or does not answer is replaced as soon as the loss is
detected: a new process loads the model, gets the trainer's weights with the same proofs as in any sync, and processes
the requests of the lost sampler again. Seeds depend on prompts and positions, so the answers are the same. The limit is
`cluster.max_restarts`; the metrics `rollout/ranks_replaced` and `rollout/requests_retried` count replacements and
repeated requests. A rank that raises an exception is not replaced: the exception would be raised again.

## Ranks that train

When a train rank dies or does not answer, all train ranks are ended, because their process group is broken. New ones
replace them and load the newest checkpoint of the run. Samplers in their own ranks, reward workers and the loaded data
are kept: the samplers drop their requests, and sample again when they have the checkpoint's weights, from a full sync
with all proofs. A sync that the loss has interrupted has no effect. On the same number of ranks, the results of the
run equal those of an undisturbed run [to the
bit](protocols.md#what-equal-to-the-bit-means). (The runs of the table have `cluster.max_restarts: 0`.)

    rank 1 failed in phase 'train': its process was killed by SIGKILL (...); starting the train ranks again after step
    40, restart 1 of 3
    the train ranks were restarted in 21.3 s

The limit is `cluster.max_restarts`; the metric `train/restarts` counts the restarts. If ranks are lost again while
they start, this counts as one more. When all restarts are used up, the run ends with the first of these failures and
lists the others below it. `loop.save_every_steps` limits how many steps are lost: by default states are saved at each
evaluation and at least every ten minutes. Before the first state, the run begins again at step 0; with
`loop.save_every_steps: 0` it ends. Under Ray the actor of a lost rank is replaced as well; if its machine is lost and
Ray has another, the rank moves there. Under torchrun the run ends, and torchrun's `--max-restarts` starts it again.

A death is detected at once, also while the controller waits for something else; a rank that does not answer is
detected when its command misses its deadline.

## Overlapping schedules

With `loop.kind` one_step_off or fully_async, every prompt is still trained once, and no sample is older than
`loop.max_staleness` (`tests/faults/test_schedules.py`):

- A sampler that dies while others generate, or during a sync, is replaced, and its requests are repeated. Groups that
  are already scored stay.
- When a train rank dies, also during a sync, the train ranks return to the newest checkpoint. Samplers stay, and scored
  groups are not sampled again.
- A sync that fails on one rank without a lost rank, for example because a transfer is damaged, is repeated with all
  weights. The second failure in a row ends the run. This applies to `loop.kind: colocated`, too.
- An agent that never returns ends the run when no task has ended, and no sampler has computed a token, within
  `cluster.deadlines.rollout`; the error has the agent's stack.
- If graders are slower than samplers, the samplers wait: groups that wait for a grade count towards the limit of
  started groups.
- A run that is killed, any number of times, continues from the newest checkpoint; with `loop.max_staleness: 0` its
  results equal those of an undisturbed run [to the bit](protocols.md#what-equal-to-the-bit-means).

## Graders

Reward functions run in their own processes, each grading with `reward.timeout_s` and `reward.max_memory_bytes`. A
worker that dies is replaced, and its grading is repeated once (`reward/gradings_retried`). A worker that hangs is
killed with all processes that it started, including those in their own sessions. A grading that fails is counted, and
its answer is left out of training, unless the term has weight 0; in an evaluation it has the lowest score, at most 0.
If the share of such answers of a step, or of attempts of an evaluation without a score, is above
`reward.max_failure_fraction`, the run ends with an error that has the first failure of each term. This does not apply
to an answer that `math_answer` can't evaluate in 1 s of CPU time: it is graded as wrong, and counted in
`reward/math_timeouts`.

## The entire run

When the controller is killed, the fork server ends the ranks and removes their temporary resources; without a fork
server, the kernel kills the ranks (`PR_SET_PDEATHSIG`). The reward workers end because their standard input closes.
Ctrl-C, SIGTERM, SIGUSR2 and SIGHUP end the run with a checkpoint; see
[checkpoints](checkpoints.md#ctrl-c-sigterm-and-sighup).

A task that an agent has started, and that goes on after its cancellation, is named 5 s after the end of the run, and
not awaited.

When all processes are killed at the same time, no process is left that could remove the segments of shared memory
(`/dev/shm/meshrl_*`) and the temporary folders of the ranks. The next run of the same user on that machine removes
them at its start (Linux). The process that creates such a resource holds a lock on it, which the kernel releases when
the process dies; so resources in use are never removed, including those of other runs and containers.
"""
