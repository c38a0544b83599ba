"""The command line: one function per verb, and the one place where errors are caught (ranks are
ended in everywhere.py).

Heavy libraries are imported inside the verbs, so that `--help` is quick and the affinity of the
process can be looked at before torch changes it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcvfl.errors import ConfigError, DataError, HpcvflError
from hpcvfl.everywhere import alone, complain, on_every_rank, tell_all

if TYPE_CHECKING:
    from hpcvfl.config import Config
    from hpcvfl.engine.preempt import Asked
    from hpcvfl.transport.base import Transport

USAGE = """usage: hpcvfl VERB ...

  train CONFIG [--section.field value ..]   CONFIG: a preset (digits, fashion-mnist, synthetic),
        [--party K.section.field value ..]  a .toml file or a run folder; fields: see --help
        [--slow party=K,factor=F]           slow party K down: steps take F times as long
        [--resume auto|RUN|never]           go on with an unfinished run from its last checkpoint
        [--max-seconds N]                   stop with a checkpoint before a wall-time limit
  evaluate RUN                              accuracy of a finished run from its folder
  report RUN [RUN ..] [--out FOLDER]        table and plots of one or several runs; plots go to
                                            --out, else to the one run's folder or this one
  doctor [CONFIG ..]                        ranks, MPI, launcher, affinity, threads, versions; the
                                            memory that a config's error feedback takes
  theory CONFIG|RUN [--smoothness L]        limits on the rates by Flex-VFL's theory; of a run, the
                                            terms of its bound; L: estimated if not given
  theory --batch-size B --embedding-dim P   bits, cell volume and k that C-VFL's convergence asks
         --range D --steps T                for: B rows of P values in a range of width D, T local
                                            steps in all
  bench kernels|codecs|exchange|round [--smoke] [--json FILE]

in one process:  hpcvfl train digits
with MPI:        mpiexec -n 5 python -m mpi4py -m hpcvfl train digits --codec scalar:bits=2
without MPI:     torchrun --standalone --nproc-per-node 5 -m hpcvfl train digits"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status (0, or the `exit_code` of the error's class)."""
    from hpcvfl.engine import preempt

    before = preempt.handlers()
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        # Python gives signals back before it ends, and ranks have still to leave MPI: one more must
        # not make of a run that is over a failure. A caller of this function has them again.
        if argv is None:
            preempt.heed_no_more()
        else:
            preempt.give_back(before)


def _main(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if os.getcwd() not in sys.path:  # as `python -m` has it: a user's module beside the run
        sys.path.append(os.getcwd())
    asked = {"-h", "--help"} & set(arguments) and verb != "train"
    if verb in ("-h", "--help", "--version") or asked:
        return _say_about(verb)
    try:
        try:
            if verb not in VERBS:
                raise ConfigError(f"unknown verb {verb!r}; verbs: {', '.join(VERBS)}")
            status = VERBS[verb](arguments[1:])
            sys.stdout.flush()
            return status
        except HpcvflError as error:
            return tell_all(error)
    except HpcvflError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output, `head` say, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


def train(arguments: list[str]) -> int:
    """Train; the closing table goes to stdout, progress to stderr."""
    begun_s = time.perf_counter()
    from hpcvfl.engine.preempt import Asked
    from hpcvfl.engine.watch import stacks_on_stderr

    if not arguments:
        raise ConfigError("train: which config? a preset, a .toml file or a run folder")
    asked = Asked()
    asked.listen()  # before the long imports: a job may be taken away while it starts
    stacks_on_stderr()  # or hang there
    _train(arguments, asked, begun_s)
    return 0


def _train(arguments: list[str], asked: Asked, begun_s: float) -> None:
    from hpcvfl.engine.run import train as train_run
    from hpcvfl.report.progress import Progress
    from hpcvfl.report.tables import closing_table

    def work(config: Config, transport: Transport) -> dict[str, Any]:
        progress = Progress() if config.run.progress else None
        summary = train_run(config, transport, progress, begun_s=begun_s, asked=asked)
        if transport.rank == 0:
            print(closing_table(summary))
            if config.run.plots:
                _draw([Path(summary["folder"])], Path(summary["folder"]))
        return summary

    def configure() -> Config:
        config = load_config(arguments)
        if config.algorithm.driver != "rounds":  # the asynchronous one ends as any program does
            asked.decline()
        return config

    on_every_rank(configure, work)


def evaluate(arguments: list[str]) -> int:
    """Print the accuracy and loss of a finished run as one JSON line."""
    from hpcvfl.engine import folder
    from hpcvfl.engine.run import evaluate_run

    if len(arguments) != 1:
        raise ConfigError(f"evaluate: one run folder is due, {len(arguments)} arguments came")
    path = Path(arguments[0])

    def config_of_run() -> Config:
        # Wherever the run was trained, it may be evaluated here.
        config = folder.read_config(path)
        transport = config.transport.model_copy(update={"name": "auto"})
        return config.model_copy(update={"transport": transport})

    result = on_every_rank(
        config_of_run, lambda config, transport: evaluate_run(path, config, transport)
    )
    if result is not None:
        print(json.dumps(result))
    return 0


def report(arguments: list[str]) -> int:
    """Print the table of some runs and draw their plots (to --out, or the only run's folder)."""
    from hpcvfl.engine import folder
    from hpcvfl.report.tables import closing_table, comparison

    alone("report")
    out = None
    if "--out" in arguments:
        at = arguments.index("--out")
        if at + 1 == len(arguments):
            raise ConfigError("report: --out needs a folder")
        out = Path(arguments[at + 1])
        del arguments[at : at + 2]
    if not arguments:
        raise ConfigError("report: name at least one run folder")
    paths = [Path(a) for a in arguments]
    summaries, paths = _finished(paths, folder.read_summary)
    try:
        print(closing_table(summaries[0]) if len(paths) == 1 else comparison(summaries))
    except (LookupError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        names = ", ".join(str(path / "summary.json") for path in paths)
        raise DataError(f"report: not of this program: {names} ({error!r})") from None
    out = out or (paths[0] if len(paths) == 1 else Path("."))
    _draw(paths, out)
    return 0


def _finished(
    paths: list[Path], read: Callable[[Path], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[Path]]:
    """(summaries, folders) of the finished runs; of several, the others are named and left out."""
    found = []
    for path in paths:
        try:
            found.append((read(path), path))
        except DataError as error:
            if len(paths) == 1:
                raise
            print(f"hpcvfl: left out: {error}", file=sys.stderr)
    if not found:
        raise DataError(f"report: none of the {len(paths)} folders holds a finished run")
    return [summary for summary, _ in found], [path for _, path in found]


def doctor(arguments: list[str]) -> int:
    """Print what this machine and launch look like to the program, and what a config would take."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    from hpcvfl.engine.doctor import examine, text
    from hpcvfl.transport import launcher

    # With any number of ranks: the config is looked at, not run.
    config = load_config(arguments) if arguments else None
    found = on_every_rank(
        lambda: None, lambda _, transport: examine(transport, affinity, config), refuse=False
    )
    if found is None:
        return 0
    if launcher.expected_rank() in (None, 0):  # N processes that are all rank 0 of 1 speak once
        print(text(found), flush=True)
    if found["trouble"]:
        raise ConfigError(found["trouble"])
    return 0


def theory(arguments: list[str]) -> int:
    """Print what the theory says of a config or a run, or asks of the codecs for given sizes."""
    from hpcvfl import theory as calculator

    alone("theory")
    if arguments and not arguments[0].startswith("-"):
        print(_theory_of_rounds(arguments))
    else:
        print(calculator.page(calculator.parse(arguments)))
    return 0


def _theory_of_rounds(arguments: list[str]) -> str:
    from hpcvfl.engine.theory_page import page
    from hpcvfl.theory import take_smoothness

    rest, smoothness = take_smoothness(arguments)
    path = Path(rest[0])
    if not path.is_dir():
        return page(load_config(rest), None, smoothness)
    if len(rest) > 1:
        raise ConfigError(f"theory: {rest[1]}: a run is what it was; only --smoothness may follow")
    return page(load_config(rest), path, smoothness)


def bench(arguments: list[str]) -> int:
    """Run one of the shipped benchmarks."""
    from importlib import import_module

    alone("bench")
    names = ("kernels", "codecs", "exchange", "round")
    if not arguments or arguments[0] not in names:
        raise ConfigError(f"bench: which one? {', '.join(names)}")
    return import_module(f"hpcvfl.benchmarks.{arguments[0]}").main(arguments[1:])


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "evaluate": evaluate,
    "report": report,
    "doctor": doctor,
    "theory": theory,
    "bench": bench,
}


def load_config(arguments: Sequence[str]) -> Config:
    """Config of `CONFIG [--section.field value ..] [--party K.section.field value ..]`.

    Raises ConfigError with one line, whatever is wrong: the file, a field, a value.
    """
    from hpcvfl.config import build, merge
    from hpcvfl.overrides import parse_overrides, take_party_overrides

    if arguments[0] in ("-h", "--help"):
        arguments = ["digits", *arguments]
    table = _read_config_table(arguments[0])
    rest, party = take_party_overrides(arguments[1:])
    config = parse_overrides(build(table), rest)
    blocks = {k: merge(config.party.get(k, {}), party.get(k, {})) for k in {*config.party, *party}}
    return build({**config.model_dump(), "party": blocks})


def _read_config_table(name: str) -> dict[str, Any]:
    from importlib import resources

    from hpcvfl.engine.folder import read_toml

    path = Path(name)
    if path.is_dir():
        return read_toml(path / "config.toml")
    if path.suffix == ".toml":
        return read_toml(path)
    presets = resources.files("hpcvfl") / "presets"
    names = sorted(
        p.name.removesuffix(".toml") for p in presets.iterdir() if p.name.endswith(".toml")
    )
    if name not in names:
        raise ConfigError(
            f"config {name!r}: no such preset ({', '.join(names)}), .toml file or run folder"
        )
    with resources.as_file(presets / f"{name}.toml") as preset:
        return read_toml(preset)


def _say_about(verb: str) -> int:
    from hpcvfl import __version__

    print(__version__ if verb == "--version" else USAGE)
    return 0


def _draw(paths: Sequence[Path], out: Path) -> None:
    from hpcvfl.engine import folder
    from hpcvfl.report.plots import draw

    metrics = [(path.name, folder.read_metrics(path)) for path in paths]
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawn = draw(metrics, out)
    except (LookupError, TypeError) as error:
        raise DataError(f"plots: metrics.jsonl is not of this program ({error!r})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"plots: {out} cannot be written ({error})") from None
    if drawn:
        print("plots " + " ".join(str(path) for path in drawn))
    else:
        print("no plots: matplotlib is not installed (pip install 'hpcvfl[plot]')")
