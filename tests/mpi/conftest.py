"""Suites under mpiexec: every rank runs the same tests, and nothing may be skipped.

Without --with-mpi pytest-mpi skips every test and the run would end well: here that is a failure.
Ranks above 0 print failures only.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from mpi4py import MPI

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
# Two buffers of 2 GiB each: not collected elsewhere, rather than skipped.
collect_ignore = [] if SIZE == 2 else ["test_transport_large.py"]


@pytest.fixture
def folder():
    """One temporary folder for all ranks."""
    kept = tempfile.TemporaryDirectory() if RANK == 0 else None
    yield MPI.COMM_WORLD.bcast(kept.name if kept else None)
    MPI.COMM_WORLD.Barrier()
    if kept:
        kept.cleanup()


class NothingSkipped:
    """Turns a session in which a test was skipped into a failed one."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            first = f"first: {self.skipped[0]}"
            print(f"\nrank {RANK}: {len(self.skipped)} skipped, so this suite fails ({first})")


class FailuresOnly:
    """The report of a rank above 0."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\nrank {RANK}: {report.nodeid} failed in {report.when}\n{report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(f"\nrank {RANK}: {report.nodeid} cannot be collected\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NothingSkipped())


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: Any) -> None:
    plugins = session.config.pluginmanager
    if RANK > 0 and plugins.hasplugin("terminalreporter"):
        plugins.unregister(name="terminalreporter")
        plugins.register(FailuresOnly())
