"""What all tests share: one thread for each process, the pool of workers, the settings of hypothesis."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.pool import Pool

# before anything imports torch: sums come out the same in one process and in many only if none of them splits its loops
os.environ["OMP_NUM_THREADS"] = "1"

# examples are the same in every run, and a slow machine is no failure; the deadline of the whole test still holds
settings.register_profile("pdsl", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("pdsl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the expected output of tests/specs anew")


@pytest.fixture(scope="session", autouse=True)
def threads() -> Iterator[None]:
    """No thread may outlive the tests: one that waits in torch while Python ends aborts the process, after all tests have passed."""
    yield
    limit = time.monotonic() + 10.0
    while (left := [t.name for t in threading.enumerate() if t is not threading.main_thread()]) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, f"threads that outlive the tests: {', '.join(left)}"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for functions that need several ranks; see `tests.pool`."""
    workers = Pool()
    try:
        yield workers
    finally:
        workers.close()
