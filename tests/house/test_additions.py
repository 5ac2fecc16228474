"""The rows "to add X, touch Y" of CONTRIBUTING: a dummy in a copy of a table proves each.

If the code had a second list, kept by hand, the dummy would be missing from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hegmctl.grammar import COMMANDS
from hegmd.migration.carriers.driver import DriverCarrier
from hegmd.migration.model import CARRIERS, CarrierRow
from hegmd.migration.plan.carrier_choice import Choice, choose_as_asked, estimate_s
from hegmd.migration.plan.throughput import OUT, Throughputs
from hegmd.node.devices.base import PROVIDERS
from hegmd.node.inventory.vendors import providers_for, vendors_off
from hegmd.protocol.operations import CARRIER_NAMES
from hegmd.setting_types import OneOf
from hegmd.settings import SECTIONS, InventorySettings, LogSettings, rows_of, setting
from tests.house.source import ROOT
from tests.unit.migration.nvidia_nodes import GIB, a_gpu, a_process, a_snapshot, an_agent, to
from tools.docs.settings import example_of


class OneMoreVendor(InventorySettings):
    """The section with the switch of a vendor that there is not."""

    acme: str = setting(OneOf(("auto", "off")), "auto", "Acme's GPUs: detected, or ignored.", reloads=False)


class OneMoreSetting(LogSettings):
    """The section with a setting that there is not."""

    colour: str = setting(OneOf(("red", "blue")), "red", "The colour of the log.", reloads=True)


@pytest.mark.thorough
def test_a_vendor_is_a_provider_and_a_setting_of_its_name() -> None:
    acme = object()
    vendors: Any = {"acme": lambda: acme}
    on, off = (OneMoreVendor(acme=switch).is_off for switch in ("auto", "off"))
    assert providers_for(on, None, vendors) == (acme,)
    assert (providers_for(off, None, vendors), vendors_off(off, None, vendors)) == ((), ("acme",))


@pytest.mark.thorough
def test_each_vendor_has_a_switch() -> None:
    assert [vendor for vendor in PROVIDERS if InventorySettings().is_off(vendor)] == []


@pytest.mark.thorough
def test_a_setting_is_one_row() -> None:
    sections = {**SECTIONS, "log": OneMoreSetting}
    rows = rows_of(sections)
    assert rows["log.colour"].kind.parse("blue") == "blue"
    assert "# The colour of the log." in example_of(sections)
    assert '#colour = "red"' in example_of(sections)


DUMMY = CarrierRow("dummy", in_pool=True, rates=("host_out_bytes_per_s", "host_in_bytes_per_s"))


@pytest.mark.thorough
def test_a_carrier_is_one_row_for_the_planner_and_the_measurements() -> None:
    carriers = {DUMMY.name: DUMMY, **CARRIERS}
    candidate = a_process(an_agent())
    request, source, target = to("gpu1", carrier="dummy"), a_gpu("gpu0"), a_gpu("gpu1")
    found = choose_as_asked(a_snapshot(candidate), request, candidate, [source], [target], carriers)
    assert isinstance(found, Choice)
    assert (found.carrier, found.pool_bytes) == ("dummy", 32 * GIB)
    best = choose_as_asked(a_snapshot(candidate), to("gpu1"), candidate, [source], [target], carriers)
    assert isinstance(best, Choice)
    assert best.carrier == "dummy"  # the first that can
    paces = Throughputs(carriers)
    before = paces.rates()
    paces.note("dummy", OUT, 32 * GIB, 1.0)
    assert paces.rates().host_out_bytes_per_s != before.host_out_bytes_per_s
    assert estimate_s("migrate", DUMMY, 32 * GIB, 0, before) == estimate_s(
        "migrate",
        CARRIERS["worker"],
        32 * GIB,
        0,
        before.replace(cuda_out_bytes_per_s=4.9e10, cuda_in_bytes_per_s=4.5e10),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", CARRIERS)
def test_each_carrier_of_the_table_is_a_module_with_a_class_of_that_name(name: str) -> None:
    found = vars(import_module(f"hegmd.migration.carriers.{name}")).values()
    assert name in {getattr(each, "name", None) for each in found if isinstance(each, type)}
    assert DriverCarrier.name in CARRIERS


@pytest.mark.thorough
def test_the_names_of_the_carriers_are_the_same_for_the_planner_the_protocol_and_the_client() -> None:
    (carrier,) = (option for option in COMMANDS["migrate"].options if option.key == "carrier")
    assert tuple(CARRIERS) == CARRIER_NAMES == carrier.choices


# ---- a command -------------------------------------------------------------------------------------------------------

REQUEST = '''

class Shaken(Record):
    """What was shaken."""

    pid: int = field("the process")


class Shake(Request, op="shake", reply=Shaken, changes_state=True):
    """Shake a process."""

    pid: int = field("the process to be shaken")
    strength_s: float | None = field("shake it for so long", default=None)
    dry_run: bool = field("whether only the plan is wanted", default=False)
'''
ROW = """
LOOKING = (*LOOKING, Command("shake", "shake a process", request="shake", render="answers_text:shaken_text"))
"""
RENDERER = """

def shaken_text(reply: Record, style: Style) -> list[str]:
    return [f"shaken: {reply.pid}"]
"""
# Each line is a part of the client that knows of the command, and its text for it.
ASKED = """
from hegmctl.arguments import parse
from hegmctl.commands import ask
from hegmctl.grammar import COMMANDS
from hegmctl.help import program_help, command_help
from hegmctl.library import AsyncCalls, SyncCalls
from hegmctl.output import sink_for
from hegmctl.cli import Session
from hegmd.protocol.messages import Shake, Shaken
from tools.docs.hegmctl.completions import completions
from tools.docs.hegmctl.json_reference import reference
from tools.docs.hegmctl.library_stub import stub
from tools.docs.hegmctl.manual import client_page
from tools.docs.reference import reference as protocol_reference


class Node(SyncCalls):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, request, reply, *, fds=()):
        assert request == Shake(pid=4711, strength_s=2.0, dry_run=True), request
        return Shaken(pid=request.pid)


class Handed(Session):
    def connect(self, *_, **__):
        return Node()


class AsyncNode(AsyncCalls):
    async def call(self, request, reply, *, fds=()):
        return Node().call(request, reply)


def last(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value


words = ("shake", "4711", "--strength", "2", "--dry-run")
assert ask(Handed(parse(words), sink_for(json=False, quiet=False, colour=None))) == 0
assert Node().shake(4711, strength_s=2.0, dry_run=True) == Shaken(pid=4711)
assert last(AsyncNode().shake(4711, strength_s=2.0, dry_run=True)) == Shaken(pid=4711)
assert "  shake " in program_help(80)
assert "--strength SECONDS" in command_help(COMMANDS["shake"], 80)
assert "shake it for so long" in command_help(COMMANDS["shake"], 80)
assert all("shake" in text and "strength" in text for text in completions().values())
assert ".SS hegmctl shake [OPTION]... JOB" in client_page("2026-11-21")
assert "| `shake` | [Shaken](protocol.md#shake) |" in reference()
assert all(part in protocol_reference() for part in ("#### `shake`", "* `strength_s` float?: shake", "Reply, Shaken:"))
signature = "def shake(self, pid: int, *, strength_s: float | None = ..., dry_run: bool = ...) -> m.Shaken: ..."
assert stub().count(signature) == 2
"""


@pytest.mark.thorough
def test_a_command_is_one_row_a_request_and_a_renderer(tmp_path: Path) -> None:
    """The three are written into a copy of the program; everything else follows."""
    for top in ("client", "hegmd", "tools"):
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    for place, text in (
        ("hegmd/protocol/messages.py", REQUEST),
        ("client/hegmctl/grammar/looking.py", ROW),
        ("client/hegmctl/answers_text.py", RENDERER),
    ):
        with open(tmp_path / place, "a", encoding="utf-8") as file:
            file.write(text)
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/client:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("shaken: 4711\n", "")
