"""Making all checks: order, failures of checks themselves, deadlines, and the table as a whole."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import anyio
import pytest

from hegmd.errors import EXTERNAL, HegmError
from hegmd.node.doctor.facts import SUMMARY_CHARACTERS, CheckResult, NodeFacts, ok, warn
from hegmd.node.doctor.run import CHECKS, BlockingCheck, ProgramCheck, Row, run_checks
from hegmd.protocol.snapshots import Check, Gpu, Vendor
from tests.patience import longer_and_longer
from tests.unit.node.doctor.node import FileNode, gpu, vendor


async def ignore(_check: Check) -> None:
    """A listener that does not listen."""


async def run_rows(node: FileNode, *rows: Row, deadline_s: float = 10.0) -> dict[str, Check]:
    made = await run_checks(node.facts(), ignore, checks=rows, deadline_s=deadline_s)
    return {check.id: check for check in made}


async def test_the_order_is_the_tables_whatever_takes_how_long(node: FileNode) -> None:
    quick_is_made = anyio.Event()
    messages: list[str] = []

    async def slow(_: NodeFacts) -> CheckResult:
        await quick_is_made.wait()
        return ok("slow")

    async def quick(_: NodeFacts) -> CheckResult:
        quick_is_made.set()
        return ok("quick")

    async def hear(check: Check) -> None:
        messages.append(check.id)

    rows = (ProgramCheck("a", slow), BlockingCheck("b", lambda _: ok("between")), ProgramCheck("c", quick))
    made = await run_checks(node.facts(), hear, checks=rows)
    assert messages == ["a", "b", "c"] == [check.id for check in made]


async def test_each_check_is_reported_before_the_next_one_runs(node: FileNode) -> None:
    reported = anyio.Event()

    async def second(_: NodeFacts) -> CheckResult:
        await reported.wait()
        return ok("second")

    async def hear(_check: Check) -> None:
        reported.set()

    await run_checks(
        node.facts(), hear, checks=(BlockingCheck("a", lambda _: ok("first")), ProgramCheck("b", second)), deadline_s=5
    )
    assert reported.is_set()


def breaks(error: Exception) -> BlockingCheck:
    def check(_: NodeFacts) -> CheckResult:
        raise error

    return BlockingCheck("broken", check)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (HegmError(EXTERNAL, "it said no", "ask again"), "could not be checked: it said no"),
        (PermissionError(13, "Permission denied", "/proc/secret"), "could not be checked: /proc/secret: Permission"),
        (KeyError("gpu9"), "the check itself failed: KeyError: 'gpu9'"),
    ],
)
async def test_a_failed_check_is_a_line_and_the_other_checks_run(
    node: FileNode, error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    made = await run_rows(node, breaks(error), BlockingCheck("good", lambda _: ok("fine")))
    assert made["broken"].status == "warn"
    assert words in made["broken"].summary
    assert made["broken"].fix
    assert made["good"].status == "ok"


async def test_a_check_that_hangs_is_a_line_and_left_behind(node: FileNode) -> None:
    release = threading.Event()

    def hang(_: NodeFacts) -> CheckResult:
        release.wait()
        return ok("too late")

    async def wait(_: NodeFacts) -> CheckResult:
        await anyio.Event().wait()
        return ok("never")

    try:
        rows = BlockingCheck("a", hang), ProgramCheck("b", wait), BlockingCheck("c", lambda _: ok("fine"))
        for deadline_s in longer_and_longer(0.1):
            made = await run_rows(node, *rows, deadline_s=deadline_s)
            if made["c"].status == "ok":
                break
    finally:
        release.set()
    assert [made[key].status for key in "abc"] == ["fail", "fail", "ok"]
    assert made["a"].summary == f"no answer within {deadline_s:g} s: a disk or a driver hangs"


async def test_more_hanging_checks_than_places_do_not_stop_the_rest(node: FileNode) -> None:
    release = threading.Event()

    def hang(_: NodeFacts) -> CheckResult:
        release.wait()
        return ok("too late")

    try:
        hanging = [BlockingCheck(f"h{number}", hang) for number in range(12)]
        for deadline_s in longer_and_longer(0.05):
            made = await run_rows(node, *hanging, BlockingCheck("last", lambda _: ok("fine")), deadline_s=deadline_s)
            if made["last"].status == "ok":
                break
        else:
            pytest.fail("the last check had no place")
    finally:
        release.set()


async def test_inapplicable_checks_are_skipped_with_the_reason(node: FileNode) -> None:
    row = BlockingCheck("x", lambda _: warn("not asked", "not asked"), lambda _: "there is none here")
    made = await run_rows(node, row)
    assert (made["x"].status, made["x"].summary, made["x"].fix) == ("skip", "there is none here", None)


async def test_an_error_of_the_listener_ends_the_run_unchanged(node: FileNode) -> None:
    class Gone(Exception):
        pass

    ended = anyio.Event()

    async def hear(_check: Check) -> None:
        raise Gone

    async def wait(_: NodeFacts) -> CheckResult:
        try:
            await anyio.Event().wait()
        finally:
            ended.set()
        return ok("never")

    with pytest.raises(Gone):
        await run_checks(
            node.facts(),
            hear,
            checks=(BlockingCheck("a", lambda _: ok("fine")), ProgramCheck("b", wait)),
            deadline_s=60,
        )
    assert ended.is_set()


# -- the table ---------------------------------------------------------------------------------------------------------


def check_form(check: Check) -> None:
    assert check.status in {"ok", "warn", "fail", "skip"}
    assert 0 < len(check.summary) <= SUMMARY_CHARACTERS
    assert check.summary.isprintable()
    assert bool(check.fix) == (check.status in {"warn", "fail"}), check


def test_every_check_has_a_stable_unique_name() -> None:
    names = [row.id for row in CHECKS]
    assert len(set(names)) == len(names)
    assert all(part.replace("-", "").isalpha() for name in names for part in name.split("."))


async def test_an_empty_node_is_described_in_full(node: FileNode, tmp_path: Path) -> None:
    """Nothing in /proc, /sys or /dev at all: still a line for each, and none that blames the check."""
    facts = node.facts(program_path=str(tmp_path), python_path=str(tmp_path))
    for check in await run_checks(facts, ignore):
        check_form(check)
        assert "the check itself failed" not in check.summary


SIMULATED = tuple(gpu(index, vendor="simulated", memory_total_bytes=8 * 1024**3) for index in range(2))


@pytest.mark.parametrize(
    ("vendors", "gpus", "simulated"),
    [
        ((), (), False),
        ((vendor("simulated"),), SIMULATED, True),
        ((vendor(), vendor("amd", state="absent")), tuple(gpu(index) for index in range(8)), False),
    ],
    ids=["bare", "simulated", "eight"],
)
async def test_this_very_machine(
    tmp_path: Path, vendors: tuple[Vendor, ...], gpus: tuple[Gpu, ...], simulated: bool
) -> None:
    facts = NodeFacts(
        vendors=vendors,
        gpus=gpus,
        simulated=simulated,
        user_mode=True,
        under_systemd=False,
        socket_path=tmp_path / "hegmd.sock",
        state_dir=tmp_path,
    )
    made = {check.id: check for check in await run_checks(facts, ignore)}
    assert len(made) == len(CHECKS)
    for check in made.values():
        check_form(check)
        assert "the check itself failed" not in check.summary
    assert made["kernel.version"].status == "ok"
    if simulated:
        hardware = {name for name in made if name.startswith(("nvidia.", "amd."))}
        assert {made[name].summary for name in hardware} == {"the GPUs are simulated"}
