"""summary.json: what a run was and came to, from what every rank told at its end."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from hpcvfl import __version__
from hpcvfl.clock import WORKING_PHASES
from hpcvfl.config import Config, digest
from hpcvfl.engine.prepare import Run


def summarise(run: Run, told: list[dict[str, Any]]) -> dict[str, Any]:
    """summary.json from what every rank told at the end."""
    last = run.lines[-1]
    config = run.config
    return {
        "name": config.name,
        "folder": str(run.path),
        "metrics": {
            "accuracy": last["test_accuracy"],
            "loss": last["test_loss"],
            "train_loss": last["train_loss"],
        },
        "evaluated_on": "held-out rows" if config.data.validation_rows else "test",
        "driver": config.algorithm.driver,
        "rounds": run.rounds,
        "resumed_after_rounds": run.resumed,
        "epochs": last["epoch"],
        "local_steps": config.algorithm.local_steps,
        "steps": steps_text(config),
        **({"units": last["units"]} if "units" in last else {}),
        "wire_bytes": last["wire_bytes"],
        "raw_bytes": last["raw_bytes"],
        "wire_bytes_by": bytes_by(told),
        "accounting": "measured",
        "clock": "wall",
        "seconds": {
            "total": told[0]["total_s"],
            "training": last["seconds"],
            "server": told[0]["seconds"],
            "slowest_party": max((t["seconds"] for t in told[1:] or told), key=busy_s),
        },
        "codec": [codec.spec for codec in run.exchange.agreement.codecs_R],
        "warnings": run.warnings,
        "transport": run.transport.name,
        "pattern": config.transport.pattern,
        "threads": config.threads,
        "config_digest": digest(config),
        "hosts": [process.host for process in run.processes],
        "versions": versions(),
    }


def steps_text(config: Config) -> str:
    """How many local steps a block takes in a round, in a word."""
    policy = config.steps.policy
    if config.algorithm.driver == "vafl":
        return f"vafl, {policy}"
    if policy == "fixed":
        return str(config.algorithm.local_steps)
    return f"{policy}, sync {config.steps.sync}" if config.steps.sync != "none" else policy


def busy_s(seconds: dict[str, float]) -> float:
    """Seconds of own work of a rank, from its phases."""
    return sum(seconds[phase] for phase in WORKING_PHASES)


def bytes_by(told: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Received bytes over all ranks: {phase: {"uplink head": n, "downlink embed": n, ..}}.

    uplink = received by the server, downlink = received by a party.
    """
    out: dict[str, dict[str, int]] = {}
    for rank, t in enumerate(told):
        for row in t["bytes"]:
            if row["direction"] == "in":
                key = f"{'downlink' if rank else 'uplink'} {row['kind']}"
                phase = out.setdefault(row["phase"], {})
                phase[key] = phase.get(key, 0) + row["wire_bytes"]
    return out


def versions() -> dict[str, str]:
    """Versions of what decides the numbers and the speed."""
    out = {"hpcvfl": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "numba", "mpi4py"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out
