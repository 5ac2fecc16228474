"""The shape of every module: its size, its name, its docstring, and what it must leave to others.

The rules are in rules.py; this file says where they apply, and names every exception with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.house import rules
from tests.house.source import Module, modules, modules_of_tests, python_files

# The project is parsed once, by the first of them in one process, and is in that one's way until its end.
pytestmark = [pytest.mark.xdist_group("source")]

Rule = Callable[[Module], Iterator[str]]

EVERYWHERE: tuple[Rule, ...] = (
    rules.module_size,
    rules.function_size,
    rules.docstring,
    rules.name,
    rules.asyncio_import,
    rules.open_ends,
    rules.ignores,
)
IN_THE_PRODUCT: tuple[Rule, ...] = (rules.output, rules.leaving, rules.bare_tasks, rules.hints)
IN_TESTS: tuple[Rule, ...] = (rules.sleep, rules.patching, rules.impatience)

# (rule, module): why it may.
EXCEPTIONS: dict[tuple[Rule, str], str] = {
    (rules.output, "hegmcompat.terminal"): "the sink of both its programs",
    (rules.output, "hegmctl.output"): "the sink of the command line",
    (rules.output, "hegmctl.watch"): "hands the terminal to the screen",
    (rules.output, "hegmd.__main__"): "says what is wrong before there is a log",
    (rules.leaving, "hegmd.agent.dumpable_launcher"): "the end of a child that answered a question",
    (rules.leaving, "hegmd.images.criu.parent"): "a program of its own, whose status is the job's",
    (rules.leaving, "hegmcompat.ctrl_cli"): "the one exit of hegm-ctrl",
    (rules.leaving, "hegmcompat.launcher_cli"): "the one exit of hegm-launcher",
    (rules.leaving, "hegmctl.cli"): "the client's one exit",
    (rules.leaving, "hegmctl.running"): "ends the child that stands between it and a daemon",
    (
        rules.leaving,
        "hegmctl.nccl_training",
    ): "a program of its own; with gloo some processes abort at the end of Python",
    (rules.leaving, "hegmctl.interruption"): "dies of the signal that asked it to",
    (rules.leaving, "hegmd.__main__"): "the daemon's one exit",
    (rules.leaving, "hegmd.agent.inject.sitecustomize"): "a Python that was started before its turn runs no script",
    (rules.leaving, "hegmd.agent.ranks.faults"): "a fault that a script has asked for is to end it",
    (rules.leaving, "hegmd.agent.standby"): "ends what was started before its turn, and is not to have one",
    (rules.leaving, "hegmd.gpu_helper.child"): "ends at once, whatever its threads wait for in the driver",
    (rules.leaving, "hegmd.agent.state.save_and_exit"): "ends a worker that has left its state, or cannot have it back",
    (rules.leaving, "hegmd.memory.keeper.__main__"): "the keeper's one exit",
    (rules.sleep, "tests/gpu/bench_sharing.py"): "a program that watches a machine with a GPU",
    (rules.sleep, "tests/e2e/training/sleeper.py"): "a job that is slow, with a thread that sleeps, is what it plays",
}


JUDGED = ((EVERYWHERE, python_files), (IN_THE_PRODUCT, modules), (IN_TESTS, modules_of_tests))


@pytest.mark.parametrize(
    ("rule", "judged"),
    [pytest.param(rule, judged, id=rule.__name__) for rule_set, judged in JUDGED for rule in rule_set],
)
def test_every_module_keeps_the_rule(rule: Rule, judged: Callable[[], tuple[Module, ...]]) -> None:
    offences = [
        f"{module.where}:{line}" if line[0].isdigit() else f"{module.where}: {line}"
        for module in judged()
        if (rule, module.name) not in EXCEPTIONS
        for line in rule(module)
    ]
    if offences:
        pytest.fail("\n".join(offences), pytrace=False)


def test_every_exception_is_still_needed() -> None:
    by_name = {module.name: module for module in python_files()}
    idle = [f"{rule.__name__} for {name}" for rule, name in EXCEPTIONS if not list(rule(by_name[name]))]
    assert not idle
