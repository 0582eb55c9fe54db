"""What tests of runs with losses share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdsl.runtime.resilient import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """A process that has imported torch and what trains, and forks the nodes of one run after another."""
    found = Nursery("train", threads=1)
    found.await_ready(120.0)
    yield found
    found.close()
