"""Which run a start goes on with, and from which of its checkpoints.

`run.resume` is never, auto or a run folder. auto takes the newest folder NAME-DATE under
`run.folder` that is of use: one that has finished with this very config (then nothing is left to
do), or one that has not and holds a complete checkpoint. There is none: a fresh run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcvfl.config import Config, all_fields, flatten
from hpcvfl.engine import folder, sets
from hpcvfl.engine.agree import exchange, shared_error, together
from hpcvfl.engine.lock import RunLock
from hpcvfl.engine.sets import Part
from hpcvfl.engine.state import changed_books
from hpcvfl.errors import ConfigError, DataError, HpcvflError
from hpcvfl.transport.base import Transport

ADVICE = "give what the run was started with, or start afresh with --resume never"


@dataclass
class Chosen:
    """The folder to go on in, its lock (at rank 0), or the summary of a run that has finished."""

    path: Path
    lock: RunLock | None = None
    summary: dict[str, Any] | None = None
    name: str = ""  # of a fresh run


def choose(config: Config, transport: Transport) -> Chosen | None:
    """What to go on with, the same on every rank; None: a fresh run. What rank 0 is told counts.

    Raises ConfigError or DataError, on every rank, that names the field or the folder.
    """
    found: list[Chosen] = []

    def look() -> dict[str, Any] | None:
        chosen = None if transport.rank else find(config)
        found.extend([chosen] if chosen else [])
        return {"path": str(chosen.path), "summary": chosen.summary} if chosen else None

    told = together(transport, look)[0]
    if told is None:
        return None
    lock = found[0].lock if found else None
    return Chosen(Path(told["path"]), lock, told["summary"])


def find(config: Config) -> Chosen | None:
    """`choose` at rank 0."""
    if config.run.resume == "never":
        return None
    if config.run.resume != "auto":
        path = Path(config.run.resume)
        require_run_folder(path)
        require_same_config(path, folder.read_config(path), config)
        return finished(path) or unfinished(path)
    for path in newest_first(config):
        there = _readable_config(path)
        if there is None:  # killed while it was made: nothing to go on with
            continue
        done = finished(path)
        if done and first_difference(there, config) is None:
            return done
        if not done and sets.rounds_here(path, 0):
            require_same_config(path, there, config)
            return unfinished(path)
    return None


def require_run_folder(path: Path) -> None:
    """Raise ConfigError if `run.resume` names what is no folder, or one in a run folder."""
    if folder.is_file(path / "config.toml"):
        return
    if sets.rounds_here(path, 0):
        raise ConfigError(
            f"resume {path}: the run has checkpoints and no config.toml that can be read; put a"
            " copy of the config there that it was started with"
        )
    inside = [p for p in path.resolve().parents if folder.is_file(p / "config.toml")]
    advice = f"did you mean {inside[0]}?" if inside else "give a run folder, auto or never"
    raise ConfigError(f"resume {path}: is no run folder (it has no config.toml); {advice}")


def passed_over(config: Config, chosen: Chosen | None) -> str | None:
    """A line that names the newest unfinished run that auto did not choose, as it could not."""
    for path in newest_first(config) if config.run.resume == "auto" else ():
        if chosen and path == chosen.path:
            return None
        if not finished(path):
            return f"{path} has not finished and {_no_checkpoint(path)}; it is left as it is"
    return None


def _no_checkpoint(path: Path) -> str:
    try:
        for place in (path / "checkpoints").iterdir():
            next(place.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return f"its checkpoints cannot be read ({error.strerror})"
    return "holds no complete checkpoint"


def newest_first(config: Config) -> Iterator[Path]:
    """The run folders of this name, by the date in theirs."""
    pattern = re.compile(rf"{re.escape(config.name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    found = []
    for path in Path(config.run.folder).glob("*"):
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((match[1], int(match[2] or 0), path.resolve()))
    yield from (path for _, _, path in sorted(found, reverse=True))


def _readable_config(path: Path) -> Config | None:
    """The config of a run folder; None if it has none that can be read, and no checkpoint either.

    Raises ConfigError if there is one: hours of work are not passed over without a word.
    """
    try:
        return folder.read_config(path)
    except HpcvflError as error:
        if finished(path) or not sets.rounds_here(path, 0):
            return None
        raise ConfigError(
            f"{error}; the run has checkpoints: put the file right (a copy of the config it was"
            " started with, or the version of hpcvfl that wrote it), or start afresh with"
            " --resume never"
        ) from None


def finished(path: Path) -> Chosen | None:
    """The summary of a run that has finished; None if it has not, or what is there is none."""
    try:
        summary = folder.read_summary(path)
    except DataError:
        return None
    ours = isinstance(summary.get("metrics"), dict) and isinstance(summary.get("seconds"), dict)
    return Chosen(path, summary=summary) if ours and "rounds" in summary else None


def unfinished(path: Path) -> Chosen:
    """Take the lock of a folder to go on in; DataError if there is no checkpoint in it."""
    with folder.writing(path):
        lock = RunLock(path)
    done = finished(path)  # by the job that had the lock until now
    if done:
        lock.release()
        return done
    if not sets.rounds_here(path, 0):
        raise DataError(
            f"resume {path}: holds no complete checkpoint; start afresh with --resume never"
        )
    return Chosen(path.resolve(), lock)


def require_same_config(path: Path, there: Config, here: Config) -> None:
    """Raise ConfigError that names the first field in which a run's config differs from this."""
    differs = first_difference(there, here)
    if differs:
        field, run_has, came = differs
        raise ConfigError(f"resume {path}: {field} is {came!r}, the run has {run_has!r}; {ADVICE}")


def first_difference(there: Config, here: Config) -> tuple[str, Any, Any] | None:
    """(field, there, here) of the first field that changes numbers and differs; None: same run."""
    shared = [path for path, scope in all_fields() if scope == "shared"]
    ours, theirs = _values(here), _values(there)
    for path in shared:
        if ours[path] != theirs[path]:
            return path, theirs[path], ours[path]
    local = [path for path, scope in all_fields() if scope == "local"]
    for block in range(here.num_parties + 1):
        ours, theirs = _values(here.for_block(block)), _values(there.for_block(block))
        for path in local:
            if ours[path] != theirs[path]:
                return f"{path} of block {block}", theirs[path], ours[path]
    return None


def _values(config: Config) -> dict[str, Any]:
    return dict(flatten(config.model_dump(mode="json", exclude={"party"})))


def pick(path: Path, due: dict[str, Any], transport: Transport) -> tuple[Part, list[str]]:
    """This rank's part of the newest set that every rank has in whole, and a line for each newer
    one that is broken; called by every rank. Newer sets are removed, as the books will be cut.

    due : what must be the same there and here (state.py)
    Raises on every rank: ConfigError or DataError that names the field in which a checkpoint is of
    another run; DataError if no set is whole.
    """
    rank = transport.rank
    told = exchange(transport, sets.rounds_here(path, rank))
    common = sorted(set(told[0]).intersection(*told[1:]), reverse=True)
    parts: list[Part] = []
    broken: list[str] = []

    def read(rounds: int) -> tuple[str, str]:
        try:
            part = sets.read_part(path, rounds, rank)
        except DataError as error:
            return str(error), ""
        wrong = misplaced(part.record, rounds, rank)
        if wrong:
            return f"{sets.part_path(path, rounds, rank)}: {wrong}", ""
        require_same_run(path, part.record.get("due", {}), due)
        parts[:] = [part]
        return changed_books(path, part.record), part.record["run"]

    for rounds in common:
        told = together(transport, partial(read, rounds))
        said = [text for text, _ in told if text]
        others = [k for k, (_, name) in enumerate(told) if name != told[0][1]]
        if others and not said:
            said = [f"the file of rank {others[0]} is of another run than that of rank 0"]
        if not said:
            together(transport, partial(drop_newer, path, rounds, rank))
            return parts[0], broken
        broken.append(f"checkpoint of round {rounds} is not used: {said[0]}")
    reason = broken[0] if broken else "no set of files is there on every rank"
    text = f"resume {path}: no checkpoint is whole ({reason}); start afresh with --resume never"
    raise shared_error("DataError", text)


def misplaced(record: Mapping[str, Any], rounds: int, rank: int) -> str:
    """What a file is of, if not of this round and rank; empty if it is. Of a file of an older
    format that is for `require_same_run` to say.
    """
    came = record.get("rounds"), record.get("rank", rank)
    if came == (rounds, rank):
        return ""
    return f"is of round {came[0]}, rank {came[1]}, due are {rounds}, {rank}; it was moved here"


def drop_newer(path: Path, rounds: int, rank: int) -> None:
    """Remove this rank's share of all sets after `rounds`."""
    for newer in sets.all_rounds(path):
        if newer > rounds:
            sets.drop_part(path, newer, rank)


def require_same_run(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ConfigError, of sample ids, labels and rows DataError, that names the first field."""
    for field in dict.fromkeys([*there, *here]):
        if there.get(field) != here.get(field):
            kind = DataError if field.startswith(("digest of the", "number of")) else ConfigError
            if field == "digest of the steps planned":
                kind = ConfigError
            raise kind(
                f"resume {path}: {field} is {here.get(field)!r}, the checkpoint has"
                f" {there.get(field)!r}; {ADVICE}"
            )
