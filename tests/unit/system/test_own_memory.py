"""The daemon's own memory: how it is started again to be able to give memory back, and when it does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hegmd.system.own_memory import BETWEEN_S, CHOICES, CONNECTIONS, PAUSE_S, MemoryReturn, started_again
from tests.patience import HANG_S

IN_PLACE = """
import os, sys
print(os.getpid(), os.environ.get("PYTHONMALLOC"), os.environ.get("PYTHONSAFEPATH"), flush=True)
from hegmd.system.own_memory import start_again_if_useful
start_again_if_useful()
print(sys.argv[1:], os.environ.get("PYTHONMALLOC"), os.environ.get("PYTHONSAFEPATH"), "" in sys.path)
"""


class Returned:
    """Counts how often memory was given back."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def test_memory_of_a_burst_was_never_given_back() -> None:
    """Issue 14, row 17: 2,000 connections came and went, and the daemon kept 19 MB for them."""
    returned = Returned()
    memory = MemoryReturn(returned, now=0.0)
    memory.look(CONNECTIONS - 1, BETWEEN_S)
    assert returned.times == 0
    memory.look(CONNECTIONS, BETWEEN_S)
    assert returned.times == 1
    memory.look(CONNECTIONS, 2 * BETWEEN_S)  # what was not free yet: the tasks end after they are counted
    assert returned.times == 2
    memory.look(CONNECTIONS + 2, 3 * BETWEEN_S)  # one that has nothing to do with it
    assert returned.times == 2


def test_memory_is_not_given_back_all_the_time() -> None:
    returned = Returned()
    memory = MemoryReturn(returned, now=0.0)
    for tick in range(1, 100):
        memory.look(tick * 10 * CONNECTIONS, tick * BETWEEN_S / 100)
    assert returned.times == 0


def test_what_no_connection_used_is_given_back_after_a_time() -> None:
    returned = Returned()
    memory = MemoryReturn(returned, now=0.0)
    memory.look(0, PAUSE_S)
    memory.look(0, PAUSE_S + BETWEEN_S)
    assert returned.times == 1


def test_the_choice_is_added_to_the_environment_and_the_words_stay() -> None:
    again = started_again(["-m", "hegmd", "--user"], {"A": "b"}, isolated=False, ignores=False)
    assert again == (["-m", "hegmd", "--user"], {"A": "b", **CHOICES})


@pytest.mark.parametrize("value", ["malloc", "debug"])
def test_a_choice_that_was_made_stays(value: str) -> None:
    assert started_again(["-m", "hegmd"], {"PYTHONMALLOC": value}, isolated=False, ignores=False) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an older Python cannot leave the script's folder out alone")
def test_a_python_that_was_isolated_takes_nothing_from_its_environment() -> None:
    """The installed daemon is started with -IB, by which Python reads no choice either."""
    environ = {"A": "b", "PYTHONPATH": "/evil", "PYTHONMALLOC": "debug"}
    again = started_again(["-IB", "/usr/bin/hegmd", "--user"], environ, isolated=True, ignores=True)
    assert again == (["-sB", "/usr/bin/hegmd", "--user"], {"A": "b", **CHOICES, "PYTHONSAFEPATH": "1"})


@pytest.mark.parametrize("options", [["-E"], ["-IX", "dev"], ["hegmd"]])
def test_a_python_with_other_options_stays_as_it_was_started(options: list[str]) -> None:
    assert started_again([*options, "hegmd"], {}, isolated=options[0] != "-E", ignores=True) is None


def test_the_process_is_the_same_and_its_children_do_not_inherit_the_choice() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [sys.executable, "-c", IN_PLACE, "one", "two"]
    with subprocess.Popen(
        words, env={**environ, "PYTHONPATH": os.getcwd()}, stdout=subprocess.PIPE, text=True
    ) as child:
        said, _ = child.communicate(timeout=HANG_S)
    first, *others, last = said.splitlines()
    assert first == f"{child.pid} None None"
    assert others in ([], [f"{child.pid} malloc None"])  # none with a C library that gives nothing back
    assert last == "['one', 'two'] None None True"


@pytest.mark.parametrize("options", [[], ["-IB"]])
def test_the_installed_program_started_itself_again_without_end(options: list[str]) -> None:
    """It made the choice in the installed entry and again in the program, which had dropped it from its environment."""
    code = "import sys; sys.argv = ['hegmd', '--version']; from hegmd.system.own_memory import main; main()"
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stdout.split()[:1], done.stderr) == (0, ["hegmd"], "")
