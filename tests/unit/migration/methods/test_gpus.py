"""The node as the methods see it: an old answer of the driver does not count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration.methods.gpus import Gpus
from hegmd.protocol.snapshots import Gpu, GpuProcess, Vendor
from tests.unit.doubles import gpu


@dataclass
class NodeWithVendor:
    state: str

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return (gpu(0, id="gpu0"),)

    @property
    def processes(self) -> tuple[GpuProcess, ...]:
        return ()

    @property
    def vendors(self) -> tuple[Vendor, ...]:
        return (Vendor(vendor="nvidia", state=self.state, message="it hangs"),)


@pytest.mark.parametrize("state", ["stale", "failed"])
async def test_old_figures_of_a_driver_that_does_not_answer_do_not_count_as_current(state: str) -> None:
    """Issue 14, row 20: no test noticed that they were used."""

    async def look() -> NodeWithVendor:
        return NodeWithVendor(state)

    gpus = Gpus(look)
    for ask in (gpus.node, lambda: gpus.gpu("gpu0")):
        with pytest.raises(HegmError, match="the library of nvidia does not answer: it hangs") as refused:
            await ask()
        assert refused.value.code == UNAVAILABLE


async def test_a_driver_that_answers_is_believed() -> None:
    async def look() -> NodeWithVendor:
        return NodeWithVendor("ok")

    assert (await Gpus(look).gpu("gpu0")).id == "gpu0"
