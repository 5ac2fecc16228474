"""Every house rule, shown to find what it is there to find, and to leave alone what looks like it and is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.cells import in_one_test
from tests.house import rules, test_shape
from tests.house.source import Module

Rule = Callable[[Module], Iterator[str]]

GOOD_DOCSTRING = '"""Owns one thing, must not do another, and says why."""\n'
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
# In parts, so that this file keeps the rule itself.
OPEN_END = "x = 1  # TO" + "DO: later"

BAD: list[tuple[Rule, str, str]] = [
    (rules.module_size, "x.py", GOOD_DOCSTRING + "x = 1\n" * 601),
    (rules.module_size, "x.py", GOOD_DOCSTRING + "x = 1\n" * 401),
    (rules.function_size, "x.py", LONG_FUNCTION),
    (rules.function_size, "x.py", "class A:\n    async " + LONG_FUNCTION.replace("\n", "\n    ")),
    (rules.docstring, "x.py", "x = 1\n"),
    (rules.docstring, "x.py", '"""Things."""\n'),
    (rules.name, "utils.py", ""),
    (rules.name, "helpers.py", ""),
    (rules.name, "_inner.py", ""),
    (rules.asyncio_import, "x.py", "import asyncio"),
    (rules.asyncio_import, "x.py", "def f():\n    from asyncio.subprocess import PIPE"),
    (rules.purity, "x.py", "import time"),
    (rules.purity, "x.py", "def f():\n    from anyio.abc import TaskGroup"),
    (rules.impatience, "x.py", "process.wait(timeout=10)"),
    (rules.impatience, "x.py", "assert entered.wait(10)"),
    (rules.impatience, "x.py", "with connect(path, timeout_s=5) as hegmd:\n    hegmd.ping()"),
    (rules.impatience, "x.py", "with anyio.fail_after(5):\n    await told.wait()"),
    (rules.impatience, "x.py", "assert select.select([stream], [], [], 10)[0]"),
    (rules.impatience, "x.py", "pytestmark = pytest.mark.timeout(60)"),
    (rules.sleep, "x.py", "import time\ntime.sleep(1)"),
    (rules.sleep, "x.py", "from anyio import sleep as rest\nasync def f():\n    await rest(1)"),
    (rules.sleep, "x.py", "import anyio\nasync def f():\n    await anyio.sleep(0)"),
    (rules.patching, "x.py", "from unittest import mock\nimport unittest.mock"),
    (rules.patching, "x.py", "def test(monkeypatch):\n    monkeypatch.setattr('hegmd.node.inventory.read', None)"),
    (rules.patching, "x.py", "from hegmd.node import inventory\ninventory.read = None"),
    (rules.patching, "x.py", "import hegmd.node.inventory\nhegmd.inventory.LIMIT += 1"),
    (rules.patching, "x.py", "import pynvml\npynvml.nvmlInit = None"),
    (rules.output, "x.py", "print(1)"),
    (rules.output, "x.py", "import sys\nsys.stderr.write('x')"),
    (rules.leaving, "x.py", "import sys\nsys.exit(1)"),
    (rules.leaving, "x.py", "raise SystemExit(1)"),
    (rules.leaving, "x.py", "import os\nos._exit(1)"),
    (rules.open_ends, "x.py", OPEN_END),
    (rules.ignores, "x.py", "import x  # noqa"),
    (rules.ignores, "x.py", "import x  # noqa: F401"),
    (rules.ignores, "x.py", "x = y  # type: ignore"),
    (rules.ignores, "x.py", "x = y  # type: ignore[name-defined]"),
    (rules.ignores, "x.py", "x = y  # pyright: ignore[reportUndefinedVariable]"),
    (rules.hints, "x.py", "raise Refused('GPU 0 is full')"),
    (rules.hints, "x.py", "raise Refused('GPU 0 is full', 'no')"),
    (rules.hints, "x.py", "raise errors.HegmError(DENIED, f'{x} is full', f'{x} is full')"),
    (rules.hints, "x.py", "raise ExternalError('failed', argv=[], status=1, output_tail='')"),
    (rules.bare_tasks, "x.py", "loop.create_task(f())"),
    (rules.bare_tasks, "x.py", "ensure_future(f())"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (rules.module_size, "x.py", '"""Longer than 400 lines\nbecause it is one flat table."""\n' + "x = 1\n" * 401),
    (rules.module_size, "x.py", "x = 1\n" * 400),
    (rules.function_size, "x.py", "def f():\n" + "    x = 1\n" * 59),
    (rules.docstring, "x.py", GOOD_DOCSTRING),
    (rules.name, "inventory.py", ""),
    (rules.name, "__main__.py", ""),
    (rules.asyncio_import, "x.py", "import anyio, asyncio_like"),
    (rules.purity, "x.py", "import os, timeit\nfrom hegmd.protocol import time"),
    (rules.impatience, "x.py", "process.wait(timeout=HANG_S)\nwire.receive(timeout=0.05)\nrun(timeout=600)"),
    (rules.sleep, "x.py", "import anyio\nasync def f():\n    await anyio.sleep_forever()\n    bed.sleep()"),
    (rules.patching, "x.py", "def test(monkeypatch):\n    monkeypatch.setenv('HEGM_SOCKET', '/nowhere')"),
    (rules.patching, "x.py", "from hegmd.node.inventory import Inventory\nnode = Inventory()\nnode.name = 'a'"),
    (rules.output, "x.py", "sink.print(1)"),
    (rules.leaving, "x.py", "raise Refused('no room', 'free some room')"),
    (rules.open_ends, "x.py", "todo = 'methods of doing'"),
    (rules.ignores, "x.py", "import x  # noqa: F401 - the import registers the codec"),
    (rules.ignores, "x.py", "x = y  # type: ignore[no-any-return]  # the binding has no types"),
    (rules.ignores, "x.py", "# The binding has no types.\nx = y()  # type: ignore[no-any-return]"),
    (rules.hints, "x.py", "raise Refused(f'GPU {n} is full', 'free some of it')"),
    (rules.hints, "x.py", "raise Refused(message='GPU 0 is full', hint=hint)"),
    (rules.hints, "x.py", "raise HegmError(*parts)"),
    (rules.bare_tasks, "x.py", "group.start_soon(f)"),
]


def _module(name: str, text: str) -> Module:
    return Module.parse(f"hegmd.{Path(name).stem}", Path(name), text)


@in_one_test(("rule", "name", "text"), BAD)
def test_the_rule_finds_it(rule: Rule, name: str, text: str) -> None:
    assert list(rule(_module(name, text)))


@in_one_test(("rule", "name", "text"), GOOD)
def test_the_rule_leaves_it_alone(rule: Rule, name: str, text: str) -> None:
    assert not list(rule(_module(name, text)))


def test_every_rule_has_both_kinds_of_snippet() -> None:
    applied = {*test_shape.EVERYWHERE, *test_shape.IN_THE_PRODUCT, *test_shape.IN_TESTS, rules.purity}
    assert applied == {rule for rule, _, _ in BAD} == {rule for rule, _, _ in GOOD}
