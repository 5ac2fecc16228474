"""The agent runs inside other people's trainings: it imports little and changes nothing of theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cells import in_one_test
from tests.house.source import Module, dotted, is_within, module, modules

pytestmark = [pytest.mark.xdist_group("source")]  # as in test_shape

# The standard library as far as the agent may use it. `mount` and `sitecustomize` run in every Python of a job.
ALLOWED = {
    *("__future__ _frozen_importlib _frozen_importlib_external _thread ctypes gc mmap os platform".split()),
    *("select signal socket struct sys time".split()),
}
# Additional modules of a restart; every training has them loaded, since torch imports them.
FOR_RESTARTS = set("array atexit binascii bisect collections dis functools marshal re weakref".split())
# The module that tells which call a thread is in; a job without torch loads it at its first move.
FOR_STILLNESS = {"dis"}
# The modules of the trap that reads all threads in one call; CPython 3.9 to 3.11 have them built in or loaded.
FOR_TRAP = {"_operator", "itertools"}
# A survey filters all objects of the collector with it, without a step for each; it is built into CPython.
FOR_SURVEY = {"itertools"}
# The modules of a block of `hegm.recovery`: only scripts that import it by name load this part.
FOR_RANKS = set("functools json pickle random stat tempfile threading warnings".split())
# The counts of messages end with their process group; torch imports it.
FOR_MESSAGES = {"weakref"}
BUILTINS = {"builtins", "__builtins__"}
AT_EVERY_START = {"hegmd.agent.import_hooks": {"__future__", "sys"}, "hegmd.agent.inject.sitecustomize": {"sys"}}


def foreign_imports(module: Module) -> Iterator[str]:
    allowed = ALLOWED | (FOR_RESTARTS if is_within(module.name, "hegmd.agent.state") else set())
    if is_within(module.name, "hegmd.agent.ranks"):
        allowed = allowed | FOR_RANKS
    if module.name == "hegmd.agent.other_threads":
        allowed = allowed | FOR_STILLNESS
    if module.name == "hegmd.agent.trap":
        allowed = allowed | FOR_TRAP
    if module.name == "hegmd.agent.torch_state":
        allowed = allowed | FOR_SURVEY
    if module.name == "hegmd.agent.messages":
        allowed = allowed | FOR_MESSAGES
    for found in module.imports():
        top = found.target.split(".")[0]
        if not found.for_types_only and top not in allowed | {"hegmd", "_hegm"}:
            yield f"{found.line}: imports {found.target}"


def imports_at_start(module: Module) -> set[str]:
    """Return the modules imported at import time: not inside functions, not for type checkers."""
    top: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            top |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            top.add("." * node.level + (node.module or ""))
    return top


def touches_builtins(module: Module) -> Iterator[str]:
    named = [node for node in module.nodes(ast.Name, ast.Attribute) if dotted(node).split(".")[0] in BUILTINS]
    imported = [node for node in module.nodes(ast.Import, ast.ImportFrom) if "builtins" in ast.unparse(node)]
    parts: list[ast.Subscript | ast.Attribute] = module.nodes(ast.Subscript, ast.Attribute)
    stored = [
        node
        for node in parts
        if isinstance(node.ctx, ast.Store | ast.Del) and ast.unparse(node).startswith("os.environ")
    ]
    yield from map(ast.unparse, [*named, *imported, *stored])


def test_the_agent_keeps_to_its_allowance() -> None:
    offences = [
        f"{judged.where}: {offence}"
        for judged in modules("hegmd.agent")
        for offence in (*foreign_imports(judged), *touches_builtins(judged))
    ]
    assert not offences


@pytest.mark.parametrize("name", AT_EVERY_START)
def test_startup_code_imports_nothing_more(name: str) -> None:
    assert imports_at_start(module(name)) <= AT_EVERY_START[name]


@in_one_test(
    "text",
    [
        "import torch",
        "def late():\n    import threading",
        "import builtins",
        "__builtins__.range = 1",
        "del os.environ['A']",
    ],
)
def test_a_violation_is_detected(text: str) -> None:
    module = Module.parse("hegmd.agent.x", Path("x.py"), text)
    assert [*foreign_imports(module), *touches_builtins(module)]
