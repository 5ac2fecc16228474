"""The groups of a block over ranks: what is kept of them once the block has ended."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from hegmd.agent.ranks.groups import Groups
from tests.needs import need_torch

torch: Any = need_torch()

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.leaks_allowed("gloo has a thread and its descriptors until the process ends"),
    pytest.mark.xdist_group("torch"),
]


def test_models_of_a_block_that_has_ended_are_not_kept(tmp_path: Path) -> None:
    groups = Groups(str(tmp_path))
    groups.connect("gloo", 0, 0, 1, {})
    try:
        wrapped = groups.wrap(torch.nn.Linear(1, 1), is_first_step=True, options={})
        known = weakref.ref(wrapped)
        groups.forget()
        del wrapped
        gc.collect()
        assert known() is None
    finally:
        groups.leave()
