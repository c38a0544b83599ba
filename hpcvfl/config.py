"""What a run is: the sections of sections.py, the digest that all ranks must share.

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

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from hpcvfl.errors import ConfigError
from hpcvfl.sections import (
    HOW,
    LOCAL,
    SHARED,
    AlgorithmConfig,
    DataConfig,
    LabelsConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    Scope,
    Section,
    StepsConfig,
    TransportConfig,
    WireConfig,
)


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
    steps: StepsConfig = StepsConfig()
    labels: LabelsConfig = LabelsConfig()
    wire: WireConfig = WireConfig()
    transport: TransportConfig = TransportConfig()
    run: RunConfig = RunConfig()
    party: Annotated[
        dict[int, dict[str, Any]], Field(default_factory=dict, json_schema_extra=LOCAL)
    ]
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

    @model_validator(mode="after")
    def _holder_is_a_party(self) -> Config:
        if (self.holder_party or 0) > self.num_parties:
            raise ValueError(
                f"labels.holder = {self.labels.holder!r}: parties are 1 to {self.num_parties}"
            )
        party = self.holder_party
        if party and "slow_factor" in self.party.get(party, {}).get("steps", {}):
            raise ValueError(
                f"party.{party}.steps.slow_factor: this party is in the server's process and takes"
                " its steps; slow block 0 (--party 0.steps.slow_factor)"
            )
        return self

    @property
    def private_labels(self) -> bool:
        """Whether one process alone holds the labels."""
        return self.labels.holder != "all"

    @property
    def holder_party(self) -> int | None:
        """The party in whose process the server is; None where the server has its own."""
        kind, _, number = self.labels.holder.partition(":")
        return int(number) if kind == "party" else None

    @property
    def block_of_rank(self) -> list[int]:
        """The block whose messages a rank sends; rank 0 is the server's. A holder party has no rank
        of its own.
        """
        return [b for b in range(self.num_parties + 1) if b == 0 or b != self.holder_party]

    @model_validator(mode="after")
    def _fits_the_driver(self) -> Config:
        algorithm, steps, by_clock = self.algorithm, self.steps, self.steps.policy == "wall-clock"
        if algorithm.driver == "rounds":
            if by_clock and steps.timeout_s is None:
                raise ValueError("steps.policy = 'wall-clock' needs steps.timeout_s")
            if algorithm.pipeline and self.private_labels:
                raise ValueError(
                    "algorithm.pipeline = 1 needs labels.holder = 'all': a private gradient is of"
                    " the embedding that was sent, and of no other"
                )
            return self
        run = self.run
        keeps = run.resume != "never" or run.checkpoint_rounds or run.max_seconds or run.requeue
        for wrong, words in (
            (keeps, "writes no checkpoints; leave run.resume, run.checkpoint_rounds,"
             " run.max_seconds and run.requeue out"),
            (self.labels.holder != "server", "needs labels.holder = 'server'"),
            (algorithm.local_steps != 1, "takes one step a message; set local_steps to 1"),
            (algorithm.pipeline, "waits for nobody; leave algorithm.pipeline at 0"),
            (steps.policy == "script" or steps.trace, "needs steps.policy fixed, wall-clock or"
             " virtual with steps.speeds"),
            (steps.sync != "none", "waits for nobody; leave steps.sync at none"),
            (by_clock and steps.timeout_s, "serves who comes first; leave steps.timeout_s out"),
            (self.optimizer.schedule.startswith("adaptive"), "takes one step a message, so that"
             f" optimizer.schedule = {self.optimizer.schedule!r} has nothing to adapt to"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(f"algorithm.driver = 'vafl' {words}")
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
