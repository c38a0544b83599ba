"""What ranks must have in common, and how an error on one of them becomes the error of all.

Everything here happens outside the rounds (start-up, end), as JSON text behind a length: no pickle
of a peer's bytes, and nothing is read past a length that was not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hpcvfl import errors
from hpcvfl.errors import ConfigError, DataError, HpcvflError, WireError
from hpcvfl.transport.base import Slots, Transport

T = TypeVar("T")

MAX_TEXT_NBYTES = 1 << 24
"""Longest text a rank may send, in bytes; a longer length is refused before memory is set aside."""


def exchange(transport: Transport, value: Any) -> list[Any]:
    """Everybody's `value` (anything JSON can spell), in rank order, on every rank."""
    text_B = np.frombuffer(json.dumps(value).encode(), np.uint8)
    kinds = ["control"] * transport.size
    lengths = Slots([8] * transport.size, kinds, [8] * transport.size)
    lengths[transport.rank].view(np.int64)[0] = text_B.size
    transport.allgather(lengths)
    sizes = [int(n) for n in lengths.buffer_B.view(np.int64)]
    for rank, nbytes in enumerate(sizes):
        if not 0 < nbytes <= MAX_TEXT_NBYTES:
            raise WireError(
                f"start-up: rank {rank} announces {nbytes} bytes of text, possible are 1 to"
                f" {MAX_TEXT_NBYTES}; do all ranks run the same version?"
            )
    texts = Slots(sizes, kinds, sizes)
    texts[transport.rank][:] = text_B
    transport.allgather(texts)
    values = []
    for rank in range(transport.size):
        try:
            values.append(json.loads(texts[rank].tobytes()))
        except (ValueError, RecursionError):
            raise WireError(
                f"start-up: rank {rank} sent {sizes[rank]} bytes that are no JSON"
            ) from None
    return values


def each(transport: Transport, work: Callable[[], T]) -> T:
    """`together` for work whose result stays on its rank and may be anything: the own result."""
    made: list[T] = []
    together(transport, lambda: made.append(work()))
    return made[0]


def together(transport: Transport, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank; its results (JSON values) in rank order, or the same error on all
    ranks.

    Only HpcvflError is shared; anything else is a fault of the program and ends the run where it
    is. The raised error has `everywhere = True`: rank 0 prints it, and all can leave without an
    abort.
    """
    failure: HpcvflError | None = None
    value = None
    try:
        value = work()
    except HpcvflError as error:
        failure = error
    report = (
        {"error": type(failure).__name__, "text": str(failure)} if failure else {"value": value}
    )
    reports = exchange(transport, report)
    for rank, came in enumerate(reports):
        if not isinstance(came, dict) or not {"error", "value"} & came.keys():
            raise WireError(
                f"start-up: rank {rank} sent {str(came)[:80]!r}, due is a report of its start;"
                " do all ranks run the same version?"
            )
    failed = [(rank, r) for rank, r in enumerate(reports) if "error" in r]
    if failed:
        rank, first = failed[0]
        same = len(failed) == transport.size and all(
            r.get("text") == first.get("text") for _, r in failed
        )
        others = f" (also rank {', '.join(str(k) for k, _ in failed[1:])})" if failed[1:] else ""
        text = str(first.get("text")) if same else f"rank {rank}{others}: {first.get('text')}"
        raise shared_error(str(first["error"]), text)
    return [r["value"] for r in reports]


def shared_error(name: str, text: str) -> HpcvflError:
    """An error that every rank raises alike."""
    kind = getattr(errors, name, HpcvflError)
    known = isinstance(kind, type) and issubclass(kind, HpcvflError)
    error: HpcvflError = kind(text) if known else HpcvflError(text)
    error.everywhere = True
    return error


def require_equal(values: list[dict[str, Any]]) -> None:
    """Raise the same error on every rank if a field differs between ranks: DataError for what the
    data say, ConfigError for the rest.

    values : one dict a rank, {field: value}; a field that a rank lacks counts as None. The text
             names the first rank that is out of step, the field, both values.
    """
    fields = list(dict.fromkeys(field for value in values for field in value))
    for field in fields:
        present = [(rank, v.get(field)) for rank, v in enumerate(values)]
        spelled = [json.dumps(value) for _, value in present]
        common = max(spelled, key=spelled.count)
        for rank, value in present:
            if json.dumps(value) != common:
                whose = next(r for r, v in present if json.dumps(v) == common)
                kind = DataError if field in _ADVICE and field != "wire version" else ConfigError
                error = kind(
                    f"start-up: rank {rank}: {field}: {value}, rank {whose} has"
                    f" {json.loads(common)};"
                    f" {_ADVICE.get(field, 'start all ranks with one config')}"
                )
                error.everywhere = True
                raise error


_ADVICE = {
    "wire version": "install one version of hpcvfl everywhere",
    "digest of the sample ids": "every party must hold the same samples in the same order",
    "digest of the labels": "the label policy is shared: every rank must hold the same labels",
    "number of training rows": "every party must hold the same samples",
    "number of classes": "every party must hold the same labels",
    "number of test rows": "every party must hold the same samples",
}
