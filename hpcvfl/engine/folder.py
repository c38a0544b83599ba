"""The run folder: runs/NAME-DATE with everything a run leaves behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcvfl.config import Config, build
from hpcvfl.errors import ConfigError, DataError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import tomli_w


def create(config: Config) -> Path:
    """Make a fresh folder and write config.toml into it; ConfigError if that cannot be done."""
    stem = f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1000):
        path = Path(config.run.folder) / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
            write_config(config, path / "config.toml")
            make_folder(path, 2)
            return path.resolve()
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError(
                    f"run.folder = {config.run.folder!r}: a file is in the way"
                ) from None
        except (OSError, ValueError) as error:  # ValueError: no name that a file can have
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"run.folder = {config.run.folder!r}: cannot be written ({reason});"
                " choose another with --run.folder"
            ) from None
    raise ConfigError(f"run.folder = {config.run.folder!r}: 1000 runs named {stem} exist already")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into the run folder into one ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run folder {path}: cannot be written ({error.strerror or error}); free space, or"
            " choose another with --run.folder"
        ) from None


def put_in_place(aside: Path, path: Path) -> int:
    """Give a file its name once it is on the disk; its bytes. A crash leaves it whole or not at
    all. Raises OSError.
    """
    with aside.open("rb") as file:
        os.fsync(file.fileno())
        nbytes = os.fstat(file.fileno()).st_size
    os.replace(aside, path)
    sync_folder(path.parent)
    return nbytes


def is_file(path: Path) -> bool:
    """Whether there is a file that this user may come to; no pipe or device, which may hang."""
    try:
        return path.is_file()
    except OSError:
        return False


def make_folder(path: Path, above: int = 1) -> None:
    """Make a folder if it is not there, and bring its name to the disk, and those of the next
    folders above it, `above` in all: whoever made them. Raises OSError.
    """
    path.mkdir(parents=True, exist_ok=True)
    for place in path.parents[:above]:
        sync_folder(place)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk. Raises OSError."""
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there in whole or not at all. Raises OSError."""
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    put_in_place(aside, path)


def write_config(config: Config, path: Path) -> None:
    """The effective config as TOML; fields that are not set are left out, and so is run.resume, of
    this start alone.
    """
    table = config.model_dump(mode="json", exclude_none=True, exclude={"run": {"resume"}})
    table["party"] = {str(block): override for block, override in config.party.items()}
    write_whole(path, tomli_w.dumps(table))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested tables; ConfigError names the line if it is broken."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and bad UTF-8 are ValueErrors
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def read_config(path: Path) -> Config:
    """The config of a run folder; ConfigError names the file and the field."""
    file = path / "config.toml"
    table = read_toml(file)
    try:
        return build(table)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, one dict an evaluation; DataError if the folder has none."""
    return _read_tables(path, "metrics.jsonl", "is this a run folder?", str.splitlines)


def read_messages(path: Path) -> list[dict[str, Any]]:
    """All lines of messages.jsonl, one dict a round; DataError if the folder has none."""
    return _read_tables(path, "messages.jsonl", "is this a run folder?", str.splitlines)


def read_summary(path: Path) -> dict[str, Any]:
    """summary.json of a finished run; DataError if there is none."""
    return _read_tables(path, "summary.json", "did the run finish?", lambda text: [text])[0]


def _read_tables(
    path: Path, name: str, question: str, split: Callable[[str], list[str]]
) -> list[dict[str, Any]]:
    """The JSON objects in a file of a run folder; DataError if it is missing or broken."""
    try:
        tables = [json.loads(text) for text in split((path / name).read_text(encoding="utf-8"))]
        if not all(isinstance(table, dict) for table in tables):
            raise ValueError("no table")
        return tables
    except OSError as error:
        raise DataError(f"{path}: no {name} ({error.strerror}); {question}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}/{name}: broken: {error}") from None
