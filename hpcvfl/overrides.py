"""Command-line overrides of a config: tyro reads them, its complaints become one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Sequence
from typing import Any

from hpcvfl.config import Config, all_fields, build, describe, merge, nest
from hpcvfl.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_overrides(config: Config, arguments: Sequence[str]) -> Config:
    """`config` with `--section.field value` laid over it; ConfigError names field, value and
    choices.
    """
    import tyro
    from pydantic import ValidationError

    if not arguments:
        return config
    bare = config.model_copy(update={"party": {}})
    said = io.StringIO()
    asked_help = any(a in ("-h", "--help") for a in arguments)
    try:
        with contextlib.nullcontext() if asked_help else contextlib.redirect_stderr(said):
            parsed = tyro.cli(
                Config, args=list(arguments), default=bare, prog="hpcvfl train CONFIG"
            )
    except ValidationError as error:
        raise ConfigError(describe(error)) from None
    except SystemExit as error:
        if not error.code:
            raise
        raise ConfigError(one_line(said.getvalue())) from None
    return build({**parsed.model_dump(), "party": config.model_dump()["party"]})


def one_line(box: str) -> str:
    """The message inside the box that tyro draws around an error."""
    words = []
    for line in box.splitlines():
        text = line.strip(" │╭╮╰╯─-|+").strip()
        if text.startswith(("Argument helptext", "For full helptext", "Perhaps you meant")):
            break
        if text:
            words.append(text)
    text = " ".join(words[1:] or words)
    # A value that pydantic refuses arrives as its report; keep the field, the complaint and the
    # value.
    text = re.sub(r"1 validation error for \w+ ([\w.]+)", r"\1:", text)
    text = text.replace(": Value error, ", ": ")
    text = re.sub(r" \[type=\w+, input_value=(.*?), input_type=.*$", r" (it is \1)", text)
    # Of a rule between fields pydantic shows the whole section, or config.
    text = re.sub(r"^Error parsing (Config|\w+): Value: error, (.*) \(it is \{.*\}\)$", _rule, text)
    names = [f"--{path.replace('_', '-')}" for path, _ in all_fields()]
    unknown = text.partition("Unrecognized options: ")[2].split(",")[0]
    near = difflib.get_close_matches(unknown, names, n=2)
    hint = f" (near: {', '.join(near)})" if near else ""
    return (
        f"command line: {text or 'cannot be read'}{hint};"
        " `hpcvfl train digits --help` lists the fields"
    )


def _rule(found: re.Match[str]) -> str:
    section = "" if found[1] == "Config" else f"{found[1]}: "
    return section + found[2]


def as_toml(text: str) -> Any:
    """A number, truth value or list as TOML spells it; anything else as it stands."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


SHORT = {"--resume": "--run.resume", "--max-seconds": "--run.max-seconds"}
"""Fields that have a short form on the command line."""


def take_party_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """Split off `--party K.section.field value` and `--slow party=K,factor=F`, which is short for
    --party K.steps.slow_factor F; spell out what is in SHORT; returns (the rest, {K: nested
    overrides}).
    """
    rest: list[str] = []
    party: dict[int, dict[str, Any]] = {}
    words = iter(arguments)
    value: str | None
    for word in words:
        if word == "--slow":
            path, value = _slow(next(words, ""))
        elif word == "--party":
            path, value = next(words, ""), next(words, None)
        else:
            rest.append(SHORT.get(word, word))
            continue
        block, _, field = path.partition(".")
        if not re.fullmatch(r"[0-9]{1,5}", block) or not field or value is None:
            raise ConfigError(
                f"command line: --party {path}: due is --party K.section.field value,"
                " e.g. --party 2.codec scalar:bits=2"
            )
        many = field in ("optimizer.milestones", "optimizer.step_rates")  # lists: 3,5
        new = nest({field: as_toml(f"[{value}]" if many else value)})
        party[int(block)] = merge(party.get(int(block), {}), new)
    return rest, party


def _slow(text: str) -> tuple[str, str]:
    """ "party=2,factor=4" -> ("2.steps.slow_factor", "4"); ConfigError for anything else."""
    found = re.fullmatch(r"party=(\d{1,5}),factor=([0-9.eE+-]{1,30})", text)
    if not found:
        raise ConfigError(
            f"command line: --slow {text}: due is --slow party=K,factor=F, e.g. --slow"
            " party=2,factor=4"
        )
    return f"{found[1]}.steps.slow_factor", found[2]
