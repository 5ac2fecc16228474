"""The service starts the GPU helper by itself when operations of an earlier daemon need the driver."""

from __future__ import annotations

import pytest

from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import RESTART
from hegmd.operations.service import soon_needs_helper
from tests.unit.migration.operations import operation, worker


@pytest.mark.parametrize(
    ("phase", "method", "is_started"),
    [
        ("offloading", "driver", True),
        ("offloading", RESTART, False),
        (SUSPENDED, "driver", False),
        ("done", "driver", False),
    ],
)
def test_a_daemon_starts_its_helper_at_once_only_for_an_operation_that_calls_the_driver(
    phase: str, method: str, is_started: bool
) -> None:
    """After a crash during a restart on a node without NVIDIA's driver, a warning said that the helper cannot work."""
    assert soon_needs_helper(operation(worker(method=method), phase=phase)) is is_started
