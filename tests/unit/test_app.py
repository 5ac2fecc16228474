"""The daemon as a whole where no socket is needed: what a reload does when its file gives trouble."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from hegmd.app import App
from hegmd.config import Config, load
from hegmd.node.criu_program import usable_path
from hegmd.node.devices.node_spec import Topology
from hegmd.node.devices.topology import parse_topology
from hegmd.node.inventory import NodeSnapshot
from hegmd.node.inventory.vendors import VendorWatch, providers_for
from hegmd.protocol.snapshots import Check
from hegmd.server.session import PeerGone
from hegmd.system.systemd import Offer
from hegmd.telemetry.log import LogSetup
from hegmd.wiring import node_facts
from tests.patience import HANG_S

NO_OFFER = Offer(notify_address=None, watchdog_limit_s=None, descriptor_names=())


@pytest.fixture
def topology() -> Topology:
    return parse_topology("1x1GiB")


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """A disk that does not answer before the end of the test."""
    answers = threading.Event()
    yield answers
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "hegmd-config":
            thread.join(HANG_S)


def config_of(tmp_path: Path) -> Config:
    environ = {"HEGM_SOCKET": str(tmp_path / "s"), "HEGM_STATE_DIR": str(tmp_path / "state")}
    return load(user_mode=True, environ={**environ, "XDG_CONFIG_HOME": str(tmp_path)})


def app_of(topology: Topology, tmp_path: Path, load_again: Callable[[], Config]) -> App:
    vendors = [VendorWatch(provider) for provider in providers_for(lambda _: False, topology)]
    return App(config_of(tmp_path), load_again, LogSetup(2, {}, ""), NO_OFFER, topology, vendors, user_mode=True)


def _no_reload() -> Config:
    pytest.fail("the test does not reload the daemon")


async def test_a_reload_from_a_disk_that_hangs_can_be_cancelled(
    topology: Topology, tmp_path: Path, hung: threading.Event
) -> None:
    """It could not, nor could the daemon be stopped while SIGHUP waited for it."""

    def load_again() -> Config:
        hung.wait(HANG_S)
        raise AssertionError

    app = app_of(topology, tmp_path, load_again)
    with anyio.move_on_after(0.05) as limit:
        await app.reload()
    assert limit.cancelled_caught
    assert not hung.is_set()


@pytest.mark.thorough
async def test_a_caller_that_does_not_listen_to_its_checks_holds_up_no_other(
    topology: Topology, tmp_path: Path
) -> None:
    """The next caller's checks waited until the one before had taken each of its own."""
    app = app_of(topology, tmp_path, _no_reload)
    busy = anyio.Event()

    async def turn_away(_: Check) -> None:
        busy.set()
        await anyio.sleep_forever()

    async def ignore(_: Check) -> None:
        """Ignore the signal."""

    async with app._inventory, anyio.create_task_group() as tasks:
        tasks.start_soon(app._examination.examine, turn_away)
        await busy.wait()
        assert len(await app._examination.examine(ignore)) > 10
        tasks.cancel_scope.cancel()


async def test_the_checks_of_a_disconnected_caller_end_with_an_error(topology: Topology, tmp_path: Path) -> None:
    app = app_of(topology, tmp_path, _no_reload)

    async def gone(_: Check) -> None:
        raise PeerGone

    async with app._inventory:
        with pytest.raises(PeerGone):
            await app._examination.examine(gone)


def test_a_configured_criu_is_reported_as_installed(tmp_path: Path) -> None:
    """`hegmctl ps --ways` looked for the usual ones only, while checkpoints went well."""
    own = tmp_path / "criu"
    own.touch(mode=0o755)
    assert usable_path(own) == str(own)
    assert usable_path(tmp_path / "gone") is None


@pytest.mark.parametrize("is_booted", [True, False])
def test_a_service_manager_other_than_systemd_was_asked_to_start_units(is_booted: bool, tmp_path: Path) -> None:
    """Issue 14, row 18: the doctor had `criu check` run by a systemd that was not there; images did not."""
    node = NodeSnapshot(taken_utc=0.0, gpus=(), processes=(), vendors=(), monotonic=0.0)
    runs = str(tmp_path if is_booted else tmp_path / "nowhere")
    config = config_of(tmp_path)
    facts = node_facts(config, node, simulated=True, user_mode=False, under_systemd=True, systemd_runs=runs)
    assert facts.under_systemd is is_booted


async def test_pythons_collector_is_on_again_once_the_daemon_serves(topology: Topology, tmp_path: Path) -> None:
    """It is off during the imports. Nothing would have noticed if it had stayed off."""
    app = app_of(topology, tmp_path, _no_reload)
    gc.disable()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.run)
            with anyio.fail_after(HANG_S):
                while not gc.isenabled():
                    await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    finally:
        gc.unfreeze()
        gc.enable()
