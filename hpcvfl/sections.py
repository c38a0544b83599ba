"""The sections of a config: frozen models, one docstring a field; config.py puts them together."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

Scope = Literal["shared", "how", "local"]
SHARED: Any = {"scope": "shared"}
HOW: Any = {"scope": "how"}
LOCAL: Any = {"scope": "local"}


class Section(BaseModel):
    """A table of the config: immutable, and an unknown field is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class DataConfig(Section):
    """Which samples, and which columns of them each party holds."""

    dataset: Annotated[str, Field(json_schema_extra=SHARED)] = "digits"
    """digits | fashion-mnist | synthetic | files (one .npz a party, see README)."""
    root: Annotated[str | None, Field(json_schema_extra=LOCAL)] = None
    """Folder of the raw dataset; for dataset = files, this party's .npz file."""
    batch_size: Annotated[int, Field(ge=1, json_schema_extra=SHARED)] = 100
    """Rows per round; the last round of an epoch takes what is left."""
    shuffle: Annotated[bool, Field(json_schema_extra=SHARED)] = True
    """Draw a new order of rows each epoch; False repeats the order of the file, as the papers'
    code does.
    """
    validation_rows: Annotated[int, Field(ge=0, json_schema_extra=SHARED)] = 0
    """Hold out this many training rows and evaluate on them in place of the test set (tuning)."""
    num_samples: Annotated[int, Field(ge=2, le=10**9, json_schema_extra=SHARED)] = 2000
    """synthetic only: number of samples before the 80/20 split."""
    num_features: Annotated[int, Field(ge=1, le=10**6, json_schema_extra=SHARED)] = 64
    """synthetic only: number of columns over all parties."""
    num_classes: Annotated[int, Field(ge=2, le=10**6, json_schema_extra=SHARED)] = 10
    """synthetic only: number of classes."""


class ModelConfig(Section):
    """The blocks: one tower a party, one head at the server."""

    tower: Annotated[str, Field(json_schema_extra=LOCAL)] = "mlp"
    """mlp | cnn | resnet18 | lstm | package.module:Class."""
    head: Annotated[str, Field(json_schema_extra=SHARED)] = "linear"
    """linear | mlp | package.module:Class."""
    embedding_dim: Annotated[int, Field(ge=1, le=2**20, json_schema_extra=SHARED)] = 16
    """P, the width of each party's embedding, in values per sample."""
    hidden_dim: Annotated[int, Field(ge=1, le=2**20, json_schema_extra=LOCAL)] = 64
    """Width of the hidden layer of mlp towers and of the lstm state."""
    head_hidden_dim: Annotated[int, Field(ge=1, le=2**20, json_schema_extra=SHARED)] = 64
    """Width of the hidden layer of the mlp head."""


class OptimizerConfig(Section):
    """The local optimizer of a block: theta -= lr c_t D_t at local step t (engine/optimizers.py).

    Its state is forgotten at the start of every round, as Flex-VFL has it, unless `keep_state`.
    """

    name: Annotated[str, Field(json_schema_extra=LOCAL)] = "sgd"
    """sgd, with the rules below in any combination, or a class of torch.optim by its name (Adam,
    RMSprop ...), which takes `lr` and `weight_decay` only and is outside Flex-VFL's theory.
    """
    lr: Annotated[float, Field(gt=0, le=1e30, json_schema_extra=LOCAL)] = 0.1
    """Learning rate at round 0."""
    schedule: Annotated[
        Literal["constant", "milestones", "cosine", "inverse", "adaptive", "adaptive-sum"],
        Field(json_schema_extra=LOCAL),
    ] = "constant"
    """constant | milestones (times `gamma` at each milestone epoch) | cosine (to 0 at the last
    round) | inverse (divided by 1 + epochs so far) | adaptive (`lr` is A of Adaptive Flex-VFL: the
    rate is A / (tau w_bar) of the round before) | adaptive-sum (A / W, the sum of the weights).
    """
    momentum: Annotated[float, Field(ge=0, lt=1, json_schema_extra=LOCAL)] = 0.0
    """Momentum inside a round (the buffer starts at zero each round)."""
    dampening: Annotated[float, Field(ge=0, lt=1, json_schema_extra=LOCAL)] = 0.0
    """d: a gradient enters the momentum buffer times 1 - d, the first one of a round whole; needs
    momentum > 0.
    """
    nesterov: Annotated[bool, Field(json_schema_extra=LOCAL)] = False
    """Nesterov's momentum, g + momentum * buffer; needs momentum > 0 and dampening = 0."""
    step_rates: Annotated[
        tuple[Annotated[float, Field(gt=0)], ...], Field(json_schema_extra=LOCAL)
    ] = ()
    """c_t > 0: the rate of local step t of a round is lr * c_t; the last one repeats; empty: 1."""
    weight_decay: Annotated[float, Field(ge=0, json_schema_extra=LOCAL)] = 0.0
    """Adds weight_decay * theta to the gradient; handed to a class of torch.optim as it stands, 0
    too (AdamW's own default is not used).
    """
    proximal: Annotated[float, Field(ge=0, json_schema_extra=LOCAL)] = 0.0
    """mu: adds mu * (theta - theta at the round's start) to the gradient. lr * max(c_t) * (mu +
    weight_decay) must be below 1.
    """
    keep_state: Annotated[bool, Field(json_schema_extra=LOCAL)] = False
    """Keep the momentum, or the state of a class of torch.optim, from round to round; Flex-VFL's
    theory then does not hold.
    """
    milestones: Annotated[tuple[int, ...], Field(json_schema_extra=LOCAL)] = ()
    """Epochs at which the rate is multiplied by `gamma`."""
    gamma: Annotated[float, Field(gt=0, le=1, json_schema_extra=LOCAL)] = 0.1
    """Factor of the milestone schedule."""

    # Each of these runs for fields that were given, and sees the fields above its own only.

    @field_validator("momentum", "dampening", "nesterov", "step_rates", "proximal")
    @classmethod
    def _is_a_rule_of_sgd(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.data.get("name", "sgd")
        if value and name != "sgd":
            raise ValueError(
                f"a rule of optimizer.name = 'sgd'; {name!r} of torch.optim takes lr and"
                " weight_decay only"
            )
        return value

    @field_validator("dampening", "nesterov")
    @classmethod
    def _fits_the_momentum(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("momentum") == 0:
            raise ValueError("needs optimizer.momentum > 0")
        if value and info.data.get("dampening"):
            raise ValueError(f"needs dampening = 0, it is {info.data['dampening']:g}")
        return value

    @field_validator("weight_decay", "proximal")
    @classmethod
    def _is_no_step_too_far(cls, value: float, info: ValidationInfo) -> float:
        came = info.data
        if not value or came.get("name") != "sgd" or not {"lr", "step_rates"} <= came.keys():
            return value
        if came.get("schedule", "").startswith("adaptive"):  # lr is no rate; checked in each round
            return value
        shrink = value + came.get("weight_decay", 0.0)
        rate = came["lr"] * max(came["step_rates"], default=1.0)
        if rate * shrink >= 1:
            raise ValueError(
                f"due is lr * max(step_rates) * (proximal + weight_decay) < 1, it is"
                f" {rate:g} * {shrink:g} = {rate * shrink:g}; lower it or optimizer.lr"
            )
        return value


class AlgorithmConfig(Section):
    """In what order blocks step, how many local steps, and when to stop."""

    driver: Annotated[Literal["rounds", "vafl"], Field(json_schema_extra=SHARED)] = "rounds"
    """rounds: all blocks exchange and step together; vafl: the server serves one party at a time
    and nobody waits for the others (asynchronous, engine/vafl.py). vafl needs labels.holder =
    "server".
    """
    comm_units: Annotated[float, Field(ge=0, le=1e9, json_schema_extra=SHARED)] = 1.0
    """vafl only: cost of a message and its answer in virtual time, in steps of a block of full
    speed.
    """
    local_steps: Annotated[int, Field(ge=1, lt=2**31, json_schema_extra=SHARED)] = 1
    """Q, local steps of every block between two exchanges (C-VFL)."""
    pipeline: Annotated[Literal[0, 1], Field(json_schema_extra=SHARED)] = 0
    """1: exchange the next round's frames while this round's local steps run, so that a network's
    delay is hidden; the snapshot of each round is then one round staler (engine/ahead.py).
    """
    epochs: Annotated[int, Field(ge=1, json_schema_extra=SHARED)] = 10
    """Passes over the training rows; with vafl a number of updates of the server: epochs * (rounds
    an epoch) * num_parties.
    """
    rounds: Annotated[int | None, Field(ge=1, json_schema_extra=SHARED)] = None
    """Stop after this many rounds (vafl: this many times num_parties updates of the server), even
    inside an epoch; None: by epochs.
    """
    target_accuracy: Annotated[float | None, Field(gt=0, le=1, json_schema_extra=SHARED)] = None
    """Stop at the first evaluation that reaches this accuracy; None: never early."""
    evaluate_every: Annotated[int, Field(ge=1, json_schema_extra=SHARED)] = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    evaluate_rounds: Annotated[int | None, Field(ge=1, json_schema_extra=SHARED)] = None
    """Rounds between two evaluations (vafl: this many times num_parties updates of the server);
    None: by evaluate_every.
    """


class StepsConfig(Section):
    """How many local steps each block takes in a round, and at what speed."""

    policy: Annotated[
        Literal["fixed", "wall-clock", "virtual", "script"], Field(json_schema_extra=SHARED)
    ] = "fixed"
    """fixed: algorithm.local_steps of every block (C-VFL); wall-clock: as many as end within
    `timeout_s` (Flex-VFL); virtual: what `speeds` or `trace` say; script: those of `replay`. With
    algorithm.driver = "vafl" who is served next: fixed: all parties in turn; virtual: by `speeds`;
    wall-clock: who comes first.
    """
    timeout_s: Annotated[float | None, Field(gt=0, le=86_400, json_schema_extra=SHARED)] = None
    """wall-clock only, not for vafl: seconds of local steps in a round; at least one is taken."""
    speeds: Annotated[
        tuple[Annotated[float, Field(ge=1e-9, le=1e9)], ...], Field(json_schema_extra=SHARED)
    ] = ()
    """virtual only: steps that each block, the server first, takes within the timeout. vafl serves
    party k whenever timeout / speed of k + algorithm.comm_units have passed; the server's own speed
    does not matter there.
    """
    trace: Annotated[str | None, Field(json_schema_extra=SHARED)] = None
    """virtual only: CPU utilisation, 0 to 1, shape (blocks, samples), the server's row first, one
    sample a round, over and over: a .npy or .csv file, or ar1 (a synthetic one).
    """
    trace_rule: Annotated[Literal["floor20", "int10", "int19"], Field(json_schema_extra=SHARED)] = (
        "floor20"
    )
    """Steps at utilisation u: floor(20 (1 - u)), int(10 (1 - u) + 1) or int(19 (1 - u) + 1), one at
    least; the published code's rules.
    """
    timeout_units: Annotated[float | None, Field(ge=1e-9, le=1e9, json_schema_extra=SHARED)] = None
    """virtual only: length of the timeout in steps of a block of full speed; None: that of the
    fastest of `speeds`, or 20, 11, 20 for the rules of a trace.
    """
    sync: Annotated[Literal["none", "min", "max", "one"], Field(json_schema_extra=SHARED)] = "none"
    """virtual only: none (Flex-VFL), min (Sync-Min: all take the slowest block's steps), max
    (Sync-Max: all take as many as a block of full speed), one (P-BCD: all take one).
    """
    replay: Annotated[str | None, Field(json_schema_extra=SHARED)] = None
    """script only: a run folder, or its steps.jsonl, whose numbers of steps are taken again."""
    slow_factor: Annotated[float, Field(ge=1, le=1e6, json_schema_extra=LOCAL)] = 1.0
    """Really slow this block down: after each local step (vafl: each forward, too) it sleeps
    (factor - 1) times that step.
    """

    @model_validator(mode="after")
    def _fields_of_the_policy(self) -> StepsConfig:
        needs = {
            "wall-clock": ("timeout_s",),
            "script": ("replay",),
            "virtual": ("speeds", "trace"),
        }
        own = needs.get(self.policy, ())
        given = {name for names in needs.values() for name in names if getattr(self, name)}
        # Whether wall-clock needs its timeout is the driver's to say (config.py).
        if own and not given & set(own) and self.policy != "wall-clock":
            raise ValueError(f"policy {self.policy!r} needs one of: {', '.join(own)}")
        if len(given & set(own)) > 1:
            raise ValueError(f"policy {self.policy!r} takes one of {', '.join(own)}, not both")
        if given - set(own):
            name = sorted(given - set(own))[0]
            raise ValueError(
                f"{name} is not for policy {self.policy!r}; unset it"
                f" (--steps.{name.replace('_', '-')} None on the command line)"
            )
        if self.policy != "virtual" and (self.sync != "none" or self.timeout_units):
            raise ValueError("sync and timeout_units are for policy 'virtual'")
        return self


def _a_holder(text: str) -> str:
    if not re.fullmatch(r"all|server|party:[1-9][0-9]{0,4}", text):
        raise ValueError("due is all, server or party:K with K from 1")
    return text


class LabelsConfig(Section):
    """Who holds the labels, and what the others get in their place."""

    holder: Annotated[str, AfterValidator(_a_holder), Field(json_schema_extra=SHARED)] = "all"
    """all: every rank holds them (C-VFL); server: private, each party gets only the gradient of the
    loss at its embedding, as it was when the round began; party:K: the same with the server in the
    process of party K, which holds the labels: M parties are M ranks, rank 0 is that party's.
    """
    gradient_codec: Annotated[str, Field(json_schema_extra=SHARED)] = "scalar:bits=8"
    """Private labels only: codec of the gradients, e.g. none, or ef(scalar:bits=2,range=gauss)."""


class WireConfig(Section):
    """What is checked on the wire."""

    checksum: Annotated[Literal["header", "payload"], Field(json_schema_extra=SHARED)] = "header"
    """header: CRC32 of each header; payload: of each payload as well (costs 1.6-3x on a fast
    link).
    """


class TransportConfig(Section):
    """How frames travel. Never changes a number of the result."""

    name: Annotated[
        Literal["auto", "threads", "mpi", "torchdist"], Field(json_schema_extra=HOW)
    ] = "auto"
    """auto: torchdist (gloo) under torchrun, mpi under any other launcher, threads (one process)
    without one.
    """
    pattern: Annotated[Literal["hub", "allgather"], Field(json_schema_extra=HOW)] = "hub"
    """hub: gather to the server, then broadcast (as in the papers); allgather: everyone to
    everyone.
    """
    timeout_s: Annotated[float, Field(gt=0, json_schema_extra=HOW)] = 300.0
    """Longest wait for a peer, in seconds; then the run ends and names who is missing."""
    first_timeout_s: Annotated[float, Field(gt=0, json_schema_extra=HOW)] = 900.0
    """The same for start-up and the first round (imports, compilation, loading)."""
    latency_ms: Annotated[float, Field(ge=0, le=3.6e6, json_schema_extra=HOW)] = 0.0
    """Really sleep this long on every message, in milliseconds (emulated network)."""
    bandwidth_gbps: Annotated[float | None, Field(ge=1e-6, json_schema_extra=HOW)] = None
    """Really sleep bytes * 8 / (bandwidth * 1e9) seconds on every message; None: no limit."""


class RunConfig(Section):
    """Where the results go and what is shown."""

    folder: Annotated[str, Field(json_schema_extra=HOW)] = "runs"
    """Parent of the run folder NAME-DATE."""
    memory_folder: Annotated[str | None, Field(json_schema_extra=HOW)] = None
    """Keep the memories of error feedback in files of this folder (gone at the end) instead of in
    memory; each is an open file, one a party on every rank.
    """
    checkpoint_s: Annotated[float, Field(ge=0, json_schema_extra=HOW)] = 300.0
    """Seconds between two checkpoints, from which a run that was killed goes on; 0: none by the
    clock. A run that is asked to stop writes one in any case.
    """
    checkpoint_rounds: Annotated[int | None, Field(ge=1, json_schema_extra=HOW)] = None
    """A checkpoint after every so many rounds, too; None: by the clock only."""
    keep_checkpoints: Annotated[int, Field(ge=1, json_schema_extra=HOW)] = 2
    """How many checkpoints are kept; older ones are removed when a new one is complete."""
    resume: Annotated[str, Field(min_length=1, json_schema_extra=HOW)] = "never"
    """never: a fresh run; auto: go on with the newest run of this name in `folder` that has a
    checkpoint, or start afresh; or the run folder to go on with. Short: --resume.
    """
    max_seconds: Annotated[float | None, Field(gt=0, json_schema_extra=HOW)] = None
    """After so many seconds since the start of this process, stop at the end of a round with a
    checkpoint and exit status 75; leave room for two rounds and a checkpoint. Short: --max-seconds.
    """
    requeue: Annotated[bool, Field(json_schema_extra=HOW)] = False
    """When stopped before the end, have Slurm start the job again (scontrol requeue, at rank 0)."""
    progress: Annotated[bool, Field(json_schema_extra=HOW)] = True
    """Progress bar on rank 0."""
    plots: Annotated[bool, Field(json_schema_extra=HOW)] = True
    """Draw the plots at the end, where matplotlib is installed."""
