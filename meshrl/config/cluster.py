from typing import Literal

from meshrl.config.base import Slice, field


class Deadlines(Slice):
    start: float | None = field(None, "the ranks' processes come up and import torch", gt=0)
    load: float | None = field(None, "the ranks meet and load models, or a checkpoint", gt=0)
    rollout: float | None = field(None, "one answer of a sampler, the time it waits for its turn included", gt=0)
    reward: float | None = field(None, "the gradings of one step; each has reward.timeout_s, too", gt=0)
    annotate: float | None = field(None, "one pass of the reference, or of the policy for old logprobs", gt=0)
    train: float | None = field(None, "forward and backward of one optimizer step", gt=0)
    optim: float | None = field(None, "the optimizer's own step", gt=0)
    sync: float | None = field(None, "each stage of sending weights: begin, a bucket, commit", gt=0)
    checkpoint: float | None = field(None, "copying a training state to host memory, or writing it out", gt=0)
    export: float | None = field(None, "writing the model", gt=0)
    eval: float | None = field(None, "one answer to a held-out prompt", gt=0)
    report: float | None = field(None, "asking the ranks for a step's memory use", gt=0)
    end: float | None = field(None, "the ranks free what they hold and end", gt=0)


class ClusterConfig(Slice):
    executor: Literal["inline", "processes", "ray"] = field(
        "processes",
        "processes: one for each rank, on this machine or wherever torchrun starts it; ray: on the machines of a Ray "
        "cluster; inline: all in this very process, for a debugger",
    )
    num_train_ranks: int = field(1, "FSDP2 ranks, one for each device (or share of the CPU)", ge=1)
    num_rollout_ranks: int = field(0, "ranks that only sample; 0 = the train ranks sample too", ge=0)
    nodes: int = field(
        1, "machines that executor ray takes, with equally many ranks each; torchrun says by itself how many", ge=1
    )
    address: str | None = field(
        None,
        "Ray cluster to run on, as host:port; null = RAY_ADDRESS, else the one that runs on this machine, else as "
        "local; local = one for this run alone",
    )
    timeout_s: float = field(
        600.0, "seconds that a phase may take, see deadlines; a miss ends the run and names rank and phase", gt=0
    )
    deadlines: Deadlines = field(Deadlines(), "seconds for single phases; null = cluster.timeout_s")
    max_restarts: int = field(
        3,
        "how often a run mends dead or silent ranks: one that only samples is replaced, and with lost train ranks it "
        "starts again from its last checkpoint, each so many times; the next failure ends it",
        ge=0,
    )

    def deadline_s(self, phase: str) -> float:
        """Seconds that a phase may take; it is the name of a field of deadlines."""
        given: float | None = self.deadlines.model_dump()[phase]
        return self.timeout_s if given is None else given
