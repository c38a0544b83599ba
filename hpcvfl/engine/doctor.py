"""What the program finds on this machine and in this launch, before anybody trains."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from hpcvfl.codecs import table
from hpcvfl.codecs.feedback import FeedbackCodec, memory_nbytes
from hpcvfl.config import Config
from hpcvfl.data import load
from hpcvfl.engine.agree import exchange
from hpcvfl.engine.summary import versions
from hpcvfl.errors import ConfigError
from hpcvfl.models import build_head
from hpcvfl.transport import launcher
from hpcvfl.transport.base import Transport

THREAD_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND")


def examine(
    transport: Transport, affinity_before: list[int], config: Config | None = None
) -> dict[str, Any]:
    """Everybody's findings, the same on every rank.

    affinity_before : cores this process could use before torch was imported
    config          : of a run whose needs are to be told
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    own = {
        "host": platform.node(),
        "affinity_before": affinity_before,
        "affinity_after": cores,
        "torch_threads": torch.get_num_threads(),
        "launcher": chosen(os.environ, launcher.VARIABLES),
        "threads": chosen(os.environ, THREAD_NAMES),
    }
    launch = launcher.detect()
    library, trouble = getattr(transport, "library", ""), ""
    if transport.name == "threads":
        agrees = "no communicator: one process"
    else:
        try:
            launcher.check(transport.size, transport.rank, library=library)
            agrees = "agrees with the communicator"
        except ConfigError as error:
            agrees, trouble = "DISAGREES with the communicator", str(error)
    return {
        "agrees": agrees,
        "trouble": trouble,
        "ranks": exchange(transport, own),
        "transport": transport.name,
        "library": library or "no MPI in this process",
        "launched_by": launch.name if launch else "no launcher",
        "cores": os.cpu_count() or 1,
        "versions": versions(),
        "memory": memory(config) if config and transport.rank == 0 else "",
    }


def memory(config: Config) -> str:
    """What the memories of error feedback take on every rank; reads the server's part of the data.

    Payloads are relayed, so that every rank remembers every party's embeddings and the head.
    """
    if config.private_labels:
        return private_memory(config)
    codecs = [table.parse(config.for_block(k).codec) for k in range(1, config.num_parties + 1)]
    codecs.append(table.parse(config.head_codec))
    if not any(isinstance(codec, FeedbackCodec) for codec in codecs):
        return "no error feedback: nothing is remembered from round to round"
    shard = load(config.data, 0, config.num_parties, config.seed, config.dtype)
    head = build_head(config.model, config.num_parties, shard.num_classes, torch.float32, 0)
    rows, width = shard.num_rows, config.model.embedding_dim
    total = sum(memory_nbytes(codec, rows, width) for codec in codecs[:-1])
    total += memory_nbytes(codecs[-1], 1, sum(p.numel() for p in head.parameters()))
    remembered = sum(isinstance(codec, FeedbackCodec) for codec in codecs[:-1])
    return (
        f"{total / 1e6:.1f} MB of error feedback on every rank ({remembered} parties x {rows} rows"
        f" x {width} values, and the head if it has it), {config.num_parties + 1} times that in one"
        " process; --run.memory-folder keeps it in files, ef16 halves it"
    )


def private_memory(config: Config) -> str:
    """The same where labels are private: a party remembers its own messages only."""
    parties = [k for k in config.block_of_rank if k]
    codecs = [table.parse(config.for_block(k).codec) for k in parties]
    gradient = table.parse(config.labels.gradient_codec)
    rows = load(config.data, 0, config.num_parties, config.seed, config.dtype).num_rows
    width = config.model.embedding_dim
    down = memory_nbytes(gradient, rows, width)
    both_ways = [memory_nbytes(codec, rows, width) + down for codec in codecs]
    if not any(both_ways):
        return "no error feedback: nothing is remembered from round to round"
    return (
        f"{sum(both_ways) / 1e6:.1f} MB of error feedback at the server,"
        f" {max(both_ways) / 1e6:.1f} MB at a party (its own embeddings and gradients);"
        " --run.memory-folder keeps it in files,"
        " ef16 halves it"
    )


def chosen(environ: Mapping[str, str], beginnings: tuple[str, ...]) -> dict[str, str]:
    """The variables that are set and whose names begin so."""
    return {k: v for k, v in sorted(environ.items()) if k.startswith(beginnings)}


def text(found: dict[str, Any]) -> str:
    """The findings as a page; what needs doing starts with "!"."""
    ranks = found["ranks"]
    lines = [
        f"ranks      {len(ranks)} ({found['transport']}), started by {found['launched_by']}",
        f"MPI        {found['library']}",
        f"launcher   {found['agrees']}",
        "versions   " + ", ".join(f"{k} {v}" for k, v in found["versions"].items()),
    ]
    for rank, own in enumerate(ranks):
        before, after = own["affinity_before"], own["affinity_after"]
        lines.append(
            f"rank {rank:<5} host {own['host']}, cores {spell(before)} before and {spell(after)}"
            f" after importing torch, {own['torch_threads']} torch threads"
        )
        if before != after:
            lines.append(f"! rank {rank}: importing torch took cores away; unset OMP_PROC_BIND")
    shared = {own["host"]: [o["host"] for o in ranks].count(own["host"]) for own in ranks}
    per_rank = max(1, found["cores"] // max(shared.values()))
    lines.append(
        f"threads    {found['cores']} cores for {max(shared.values())} ranks a host allow"
        f" --threads {per_rank} (the config's default is 1)"
    )
    if max(shared.values()) > found["cores"]:
        lines.append("! more ranks than cores: fine for tests, not for timing")
    if found["memory"]:
        lines.append(f"memory     {found['memory']}")
    for name, value in {**ranks[0]["launcher"], **ranks[0]["threads"]}.items():
        lines.append(f"variable   {name}={value} (rank 0)")
    return "\n".join(lines)


def spell(cores: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"; "unknown" where the system does not tell."""
    if not cores:
        return "unknown"
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
