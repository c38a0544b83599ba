"""What a run is: frozen models, one docstring a field, the digest that all ranks must share.

Three kinds of field, which decide what the ranks compare at start-up:

- shared : changes the numbers of a run, so it is part of the digest that every rank must agree on;
- how    : how the run is carried out (transport, folders, timeouts); two ranks may differ;
- local  : belongs to one party (its paths, tower, optimizer, codec); part of that party's digest
only.

A run is a TOML file or a preset of the same form; `cli.py` lays command-line overrides on top.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hpcvfl.errors import ConfigError

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
    lr: Annotated[float, Field(gt=0, json_schema_extra=LOCAL)] = 0.1
    """Learning rate at round 0."""
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
    schedule: Annotated[
        Literal["constant", "milestones", "cosine"], Field(json_schema_extra=LOCAL)
    ] = "constant"
    """constant | milestones (times `gamma` at each milestone epoch) | cosine (to 0 at the last
    round).
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
        shrink = value + came.get("weight_decay", 0.0)
        rate = came["lr"] * max(came["step_rates"], default=1.0)
        if rate * shrink >= 1:
            raise ValueError(
                f"due is lr * max(step_rates) * (proximal + weight_decay) < 1, it is"
                f" {rate:g} * {shrink:g} = {rate * shrink:g}; lower it or optimizer.lr"
            )
        return value


class AlgorithmConfig(Section):
    """How many local steps, and when to stop."""

    local_steps: Annotated[int, Field(ge=1, json_schema_extra=SHARED)] = 1
    """Q, local steps of every block between two exchanges (C-VFL)."""
    epochs: Annotated[int, Field(ge=1, json_schema_extra=SHARED)] = 10
    """Passes over the training rows."""
    rounds: Annotated[int | None, Field(ge=1, json_schema_extra=SHARED)] = None
    """Stop after this many rounds, even inside an epoch; None: by epochs."""
    target_accuracy: Annotated[float | None, Field(gt=0, le=1, json_schema_extra=SHARED)] = None
    """Stop at the first evaluation that reaches this accuracy; None: never early."""
    evaluate_every: Annotated[int, Field(ge=1, json_schema_extra=SHARED)] = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""


class WireConfig(Section):
    """What is checked on the wire."""

    checksum: Annotated[Literal["header", "payload"], Field(json_schema_extra=SHARED)] = "header"
    """header: CRC32 of each header; payload: of each payload as well (costs 1.6-3x on a fast
    link).
    """


class TransportConfig(Section):
    """How frames travel. Never changes a number of the result."""

    name: Annotated[Literal["auto", "threads", "mpi"], Field(json_schema_extra=HOW)] = "auto"
    """auto: mpi when a launcher started several processes, threads (one process) otherwise."""
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
    progress: Annotated[bool, Field(json_schema_extra=HOW)] = True
    """Progress bar on rank 0."""
    plots: Annotated[bool, Field(json_schema_extra=HOW)] = True
    """Draw the plots at the end, where matplotlib is installed."""


class Config(Section):
    """One run of hpcvfl. Units stand in the names; defaults are right for a laptop."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", json_schema_extra=HOW)] = "run"
    """Name of the run folder."""
    num_parties: Annotated[int, Field(ge=1, le=10_000, json_schema_extra=SHARED)] = 4
    """M; the communicator needs num_parties + 1 ranks, rank 0 is the server."""
    seed: Annotated[int, Field(ge=0, lt=2**63, json_schema_extra=SHARED)] = 0
    """Seed of everything random: initial weights, batches, dither, dropout."""
    dtype: Annotated[Literal["float32", "float64"], Field(json_schema_extra=SHARED)] = "float32"
    """Type of parameters and embeddings."""
    threads: Annotated[int, Field(ge=1, le=1024, json_schema_extra=SHARED)] = 1
    """Intra-op threads of each rank; changes the last bits of a result, so all ranks must agree."""
    codec: Annotated[str, Field(json_schema_extra=LOCAL)] = "scalar:bits=4"
    """Codec of the embeddings, e.g. scalar:bits=4, best:bits=0.5, ef(topk:k=2,per=row); all of
    them: README, Codecs.
    """
    head_codec: Annotated[str, Field(json_schema_extra=SHARED)] = "scalar:bits=8"
    """Codec of the head's parameters, each tensor by itself."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    wire: WireConfig = WireConfig()
    transport: TransportConfig = TransportConfig()
    run: RunConfig = RunConfig()
    party: Annotated[dict[int, dict[str, Any]], Field(json_schema_extra=LOCAL)] = {}
    """Overrides of local fields for single blocks: [party.2] model.tower = "cnn"; 0 is the
    server.
    """

    @field_validator("party", mode="before")
    @classmethod
    def _one_spelling(cls, value: Any) -> Any:
        """Block numbers as integers, "model.tower" as nested tables."""
        if not isinstance(value, dict):
            return value
        for block, override in value.items():
            if not str(block).isdecimal() or not isinstance(override, dict):
                raise ValueError(f"{block!r}: due is a table of fields for a number, [party.2]")
        return {int(block): nest(override) for block, override in value.items()}

    @model_validator(mode="after")
    def _party_overrides_are_local(self) -> Config:
        for block, override in self.party.items():
            if not 0 <= block <= self.num_parties:
                raise ValueError(f"party.{block}: blocks are 0 (server) to {self.num_parties}")
            for path, _ in flatten(override):
                if block == 0 and path in PARTY_ONLY:
                    raise ValueError(
                        f"party.0.{path}: block 0 is the server, which has no tower and sends the"
                        " head; set head_codec or model.head"
                    )
                if scope_of(path) is None:
                    raise ValueError(
                        f"party.{block}.{path}: unknown field; local fields:"
                        f" {', '.join(sorted(p for p, s in all_fields() if s == 'local'))}"
                    )
                if scope_of(path) != "local":
                    raise ValueError(
                        f"party.{block}.{path}: only local fields may differ between parties"
                        f" ({', '.join(sorted(p for p, s in all_fields() if s == 'local'))})"
                    )
        return self

    def for_block(self, block: int) -> Config:
        """The config that block `block` (0 = server) runs with: its `party` table laid over the
        rest.
        """
        override = self.party.get(block)
        if not override:
            return self
        return build(merge(self.model_dump(), override))


PARTY_ONLY = ("codec", "model.tower", "model.hidden_dim")
"""Local fields that mean nothing at the server."""


def all_fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Scope]]:
    """Every leaf field as ("section.field", scope)."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from all_fields(info.annotation, f"{prefix}{name}.")
        elif name != "party":
            extra = info.json_schema_extra
            yield f"{prefix}{name}", extra["scope"] if isinstance(extra, dict) else "shared"  # type: ignore[misc]


def scope_of(path: str) -> Scope | None:
    """Scope of "section.field", or None if there is no such field."""
    return dict(all_fields()).get(path)


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested table as ("section.field", value)."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest(table: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten`, so that "model.tower" and {"model": {"tower": ..}} mean the same."""
    out: dict[str, Any] = {}
    for path, value in flatten(table):
        *sections, leaf = path.split(".")
        at = out
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise ValueError(f"{section} is given as a value and as a table ({path})")
        at[leaf] = value
    return out


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, tables merged, leaves replaced; neither is changed."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def build(table: dict[str, Any]) -> Config:
    """A checked Config from a nested table. Raises ConfigError with one line naming field and
    value.
    """
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def describe(error: ValidationError) -> str:
    """The first complaint of pydantic as one line, with the choices if the field is unknown."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = [name for name, _ in all_fields()]
        section = path.rsplit(".", 1)[0] + "." if "." in path else ""
        near = [n for n in names if n.startswith(section) and (section or "." not in n)]
        return f"config: unknown field {path!r}; fields there: {', '.join(near or names)}"
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return f"config: {message}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"config: {path} = {first['input']!r}: {message}{more}"


def digest(config: Config, scopes: tuple[Scope, ...] = ("shared",)) -> str:
    """SHA-256 (first 16 hex digits) of the fields of the given scopes, independent of their
    order.
    """
    values = dict(flatten(config.model_dump(mode="json", exclude={"party"})))
    chosen = {path: values[path] for path, scope in all_fields() if scope in scopes}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]
