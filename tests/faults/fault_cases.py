"""Which faults are planted in which phase, and what the run then has to do and say: the table of docs/faults.md.

`test_named_faults.py` runs every case; `scripts/make_faults_docs.py` writes the page from what is said here.
"""

from __future__ import annotations

from dataclasses import dataclass

DEADLINE_S = (
    8  # of the phase that a rank is silent in; a tiny model needs a fraction of a second, on a busy machine too
)
START_DEADLINE_S = 40  # of processes that come up: each imports torch


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a fault is planted: the call of a RankWorker method; "" = before there is one. split: with a rank that only
    samples, in which the fault then is; else in the second of two train ranks. deadline_s: of the phase, where the rank
    is silent; a tiny model needs a fraction of a second, but a process that comes up imports torch."""

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
class Fault:
    """cause: what the first line says about it, after rank and phase; PHASE and LIMIT stand for the case's."""

    how: str
    text: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class Case:
    place: Place
    fault: Fault
    fast: bool = False  # part of the quick suite

    @property
    def id(self) -> str:
        return f"{self.place.id}-{self.fault.how}"

    @property
    def needs_cgroup(self) -> bool:
        """Whether the run has to be in a memory cgroup of its own."""
        return self.fault.how == "hog"

    @property
    def is_mended(self) -> bool:
        """Whether the run goes on with a new rank."""
        return self.place.split and self.fault.how != "raise"

    @property
    def cause(self) -> str:
        fault = FAULTS["exit"] if self.place.phase == "start" and self.fault.how == "raise" else self.fault
        code = 1 if self.fault.how == "raise" else 7
        text = fault.cause.replace("PHASE", self.place.phase).replace("LIMIT", str(self.place.deadline_s))
        return text.replace("CODE", str(code))

    @property
    def first_line(self) -> str:
        """What the run says first, or, where it goes on, what its note says."""
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
        Fault(how="raise", text="an exception", cause="raised RuntimeError: planted by a test"),
        Fault(how="exit", text="`os._exit(7)`", cause="its process ended with exit code CODE"),
        Fault(how="kill", text="SIGKILL, as from the kernel's OOM killer", cause="its process was killed by SIGKILL"),
        Fault(
            how="stop",
            text="SIGSTOP",
            cause="no answer within cluster.deadlines.PHASE = LIMIT s; its process is stopped (SIGSTOP, or a debugger)",
        ),
        Fault(how="sleep", text="asleep past the deadline", cause="no answer within cluster.deadlines.PHASE = LIMIT s"),
        Fault(how="memory", text="more memory than its limit", cause="raised MemoryError"),
        Fault(
            how="hog",
            text="more memory than its cgroup has, so that the kernel kills it",
            cause="its process was killed by SIGKILL, by the kernel for lack of memory (its cgroup counts 1 such kill)",
        ),
    )
}

# Everywhere: what raises, what dies and what is silent. The other ways to do so are the same to the parent, so a few
# places stand for all.
EVERYWHERE = ("raise", "kill", "stop")
ALSO = {"exit": ("start", "rollout", "sync", "end"), "sleep": ("rollout", "train", "sync", "checkpoint")}
ALSO |= {"memory": ("load", "train", "export"), "hog": ("load", "train", "rollout-split")}
FAST = {"rollout-raise", "train-kill", "sync-stop", "rollout-split-kill"}


def cases() -> list[Case]:
    """All of them, in the order of a run."""
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
        outcome = "the rank is replaced, the run goes on" if case.is_mended else "the run ends, exit code 1"
        where = f"`{case.place.method}`" if case.place.method else "before it can be called"
        lines.append(
            f"| {case.place.phase} | {kind} | {where} | {case.fault.text} | {case.cause.replace('|', '')} | {outcome} |"
        )
    return "\n".join(lines) + "\n" + _TAIL


_HEAD = """# What happens when something breaks

This page is written by `scripts/make_faults_docs.py` from `tests/faults/fault_cases.py`; `tests/faults` plants every
fault below in a real run and checks what is said here: the first line of output, the exit code, and that no process,
listening port, shared memory or temporary folder is left.

A failed run says first which rank failed, in which phase, and why:

    meshrl: RankFailure: rank 1 failed in phase 'train': its process was killed by SIGKILL (...)

Below it stand the traceback of what was raised, and where the other ranks stood; `stacks.txt` in the run's folder has
all threads of all ranks. A phase's deadline is `cluster.deadlines.<phase>`, else `cluster.timeout_s`. A rank that is
silent is named even when another rank, which only waits for it, misses its deadline first: stopped processes are seen
as such, and ranks that stand in a collective of torch.distributed are not to blame while one does not.

A death by SIGKILL says whether the memory controller of the run's cgroup has counted a kill since the start. Where the
table says that the kernel kills, it really does: the test puts the run into a memory cgroup of its own, or is skipped
where the system allows none.

| phase | the rank | in | fault | what is said after "rank 1 failed in phase ...:" | outcome |
| --- | --- | --- | --- | --- | --- |"""

_TAIL = """
## Ranks that only sample

With `cluster.num_rollout_ranks` above 0, a sampler that dies or gives no answer is replaced, from the moment that it is
lost: a new process loads the model, gets the trainer's weights with the same proofs as at any sync, and is asked again
what the lost one was asked. Seeds belong to prompts and positions, so the answers are the same. `cluster.max_restarts`
bounds it; `rollout/ranks_replaced` and `rollout/requests_redone` count it. An exception is not mended: it would come
again.

## Ranks that train

When a train rank dies or gives no answer, all of them are ended, for their process group is broken, and new ones take
their place and load the newest checkpoint of the run. Samplers in ranks of their own, reward workers and the loaded
data stay: the samplers drop what they were asked, and sample again once they have the checkpoint's weights, by a full
sync with all proofs; a sync that the death has cut in the middle is of no consequence. At the same number of ranks the
run ends to the bit as one in which nothing happened. (The table's runs have `cluster.max_restarts: 0`.)

    rank 1 failed in phase 'train': its process was killed by SIGKILL (...); starting the train ranks again after step
    40, restart 1 of 3
    the train ranks are back after 21.3 s

`cluster.max_restarts` bounds it, and `train/restarts` counts it. Ranks that are lost again while they start count as
one more; when all are used up, the run ends with the first of these failures, and names the others below it. Without a
checkpoint the run ends, too: `loop.save_every_steps` says how much a loss may cost. Under Ray the actor of a lost rank
is replaced as well, and the rank moves with it when its machine is gone and Ray has another. Under torchrun the run
ends, and torchrun's `--max-restarts` starts it anew.

A death is noticed at once, whatever the controller waits for; a silence by the deadline of what the rank was asked.

## Graders

Reward functions run in processes of their own, each grading with `reward.timeout_s` and `reward.max_memory_bytes`.
A worker that dies is replaced and its grading done once more (`reward/gradings_redone`); one that hangs is killed with
everything it started, also in sessions of their own. What can't be graded is a typed failure, masked and counted, never
a reward of 0; above `reward.max_failure_fraction` the run ends and says why. The exception is an answer that
`math_answer` can't evaluate in 1 s of CPU time: it is wrong, and counted in `reward/math_timeouts`.

## The run as a whole

When the parent is killed, ranks end with it (the kernel sees to it) and so do reward workers (their standard input
closes). Ctrl-C and SIGTERM end the run with a checkpoint; see [checkpoints](checkpoints.md#ctrl-c-and-sigterm).

When all processes are killed at once, nobody is left to remove the segments of shared memory (`/dev/shm/meshrl_*`) and
the folders in the temporary folder that ranks have made. The next run of the same user on that machine does it at its
start (Linux). Who makes them holds a lock on them, which the kernel lets go of at its death: what is in use stays,
whichever run or container it belongs to.
"""
