"""The house rules that can be read off one module's syntax. Each takes a module and yields one line per offence.

Pure functions over an ast; no files, no pytest. Kept apart from the tests that apply them so that
test_rules_can_fail.py can show, with a bad snippet for each, that every rule finds what it is there to find.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator

from tests.house.source import Module, dotted, is_within

MODULE_LINES = 600
MODULE_LINES_WITHOUT_REASON = 400
FUNCTION_LINES = 60
# Before a test may say that what it waits for hangs.
MIN_S = 120
LONG_REASON = "Longer than 400 lines because"

# The simulation has an event loop of its own kind, on which time is what it says; anyio has no such thing.
OWN_LOOP = ("simulation", "loop.py")

# A name that could hold anything will in the end hold everything.
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "misc", "base_utils", "tools"}

# Calls whose results depend on more than their arguments.
IMPURE = {
    "anyio",
    "asyncio",
    "ctypes",
    "multiprocessing",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}

# Spelled in parts, so that this file does not match itself.
_OPEN_ENDS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")

_IGNORE = re.compile(r"#\s*(?P<tool>noqa|type:\s*ignore|pyright:\s*ignore)(?P<rest>.*)$", re.MULTILINE)
_IGNORED_RULE = re.compile(r"^(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|\s*\[[\w\-, ]+\])(?P<reason>.*)$")


def module_size(module: Module) -> Iterator[str]:
    """600 lines at most; past 400 the docstring gives the reason in the words of LONG_REASON.

    An import counts as one line, on however many the formatter puts its names: a longer path splits no module.
    """
    wrapped = sum((node.end_lineno or node.lineno) - node.lineno for node in module.nodes(ast.ImportFrom))
    lines = module.lines - wrapped
    if lines > MODULE_LINES:
        yield f"{lines} lines; {MODULE_LINES} is the end: split it"
    elif lines > MODULE_LINES_WITHOUT_REASON and LONG_REASON not in " ".join(module.docstring.split()):
        yield f"{lines} lines: split it, or say «{LONG_REASON} ...» in its docstring"


def function_size(module: Module) -> Iterator[str]:
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = module.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    for node in functions:
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has {lines} lines; {FUNCTION_LINES} is the end"


def docstring(module: Module) -> Iterator[str]:
    """Says what the module owns, must not do, and why it is so; one word is none of that."""
    if len(module.docstring.split()) < 6:
        yield "no docstring that says what the module owns and what it must not do"


def name(module: Module) -> Iterator[str]:
    stem = module.path.stem
    if stem in VAGUE_NAMES:
        yield f"«{stem}» could hold anything; name the thing that is in it"
    if stem.startswith("_") and not stem.startswith("__"):
        yield "modules with an underscore are for libraries; this is a program"


def asyncio_import(module: Module) -> Iterator[str]:
    if module.path.parts[-2:] == OWN_LOOP:
        return
    for found in module.imports():
        if is_within(found.target, "asyncio"):
            yield f"{found.line}: asyncio; anyio has it"


def purity(module: Module) -> Iterator[str]:
    for found in module.imports():
        if found.target.split(".")[0] in IMPURE:
            yield f"{found.line}: {found.target} in a part that is to be pure"


@functools.cache
def _called(node: ast.Call) -> str:
    """The dotted name of what is called, as it is written."""
    return dotted(node.func) or ast.unparse(node.func)


def sleep(module: Module) -> Iterator[str]:
    """A test waits for what it waits for: an event, a reply, the end of a process. Never for time."""
    slept = {"time", "anyio", "asyncio", "trio"}
    direct = {
        alias.asname or alias.name
        for node in module.nodes(ast.ImportFrom)
        if node.module in slept
        for alias in node.names
        if alias.name in {"sleep", "sleep_until"}
    }
    for node in module.nodes(ast.Call):
        called = _called(node)
        owner, _, last = called.rpartition(".")
        if called in direct or (owner in slept and last in {"sleep", "sleep_until"}):
            yield f"{node.lineno}: {called}() to synchronise"


def impatience(module: Module) -> Iterator[str]:
    """A limit on something that must happen says only that it hangs: tests/patience.py has the one figure.

    Less than a second is a time that a test gives, to see it pass.
    """
    for node in module.nodes(ast.Call):
        given = [word.value for word in node.keywords if word.arg == "timeout"]
        if _called(node).rpartition(".")[2] in {"fail_after", "timeout"}:
            given += node.args[:1]
        if isinstance(node.func, ast.Attribute) and node.func.attr in {"wait", "join", "settimeout"}:
            given += node.args[:1]
        if _called(node) == "select.select":
            given += node.args[3:]
        if _called(node) in {"connect", "connect_async"}:
            given += [word.value for word in node.keywords if word.arg == "timeout_s"]
        for limit in given:
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and 1 <= limit.value < MIN_S:
                yield f"{node.lineno}: {limit.value} s in {_called(node)}() depends on the machine: HANG_S"


def patching(module: Module) -> Iterator[str]:
    """No mocks and no replaced attributes: our code is given its parts, bindings run against stub libraries."""
    ours: set[str] = set()
    for imported in module.nodes(ast.Import):
        ours |= {(alias.asname or alias.name).split(".")[0] for alias in imported.names if _is_product(alias.name)}
    for from_one in module.nodes(ast.ImportFrom):
        if _is_product(from_one.module or ""):
            ours |= {alias.asname or alias.name for alias in from_one.names}
    for found in module.imports():
        if is_within(found.target, "unittest.mock") or found.target == "mock":
            yield f"{found.line}: {found.target}"
    for call in module.nodes(ast.Call):
        if re.search(r"(?i)monkeypatch\.(setattr|delattr|setitem|delitem)$", _called(call)):
            yield f"{call.lineno}: {_called(call)}()"
    assigned: list[ast.Assign | ast.AugAssign | ast.AnnAssign]
    assigned = module.nodes(ast.Assign, ast.AugAssign, ast.AnnAssign)
    for node in assigned:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in ours:
                yield f"{node.lineno}: assigns to {ast.unparse(target)}"


def _is_product(dotted: str) -> bool:
    return dotted.split(".")[0] in {"hegm", "hegmd", "hegmctl", "hegmcompat", "pynvml", "amdsmi"}


def output(module: Module) -> Iterator[str]:
    """Nothing but the sinks writes to the standard streams."""
    for call in module.nodes(ast.Call):
        if _called(call) == "print":
            yield f"{call.lineno}: print()"
    for node in module.nodes(ast.Attribute):
        if dotted(node) in {"sys.stdout", "sys.stderr"}:
            yield f"{node.lineno}: {dotted(node)}"


def leaving(module: Module) -> Iterator[str]:
    """Only the doors exit; everything else raises."""
    for call in module.nodes(ast.Call):
        if _called(call) in {"sys.exit", "exit", "quit", "os._exit", "os.abort"}:
            yield f"{call.lineno}: {_called(call)}()"
    for node in module.nodes(ast.Raise):
        if node.exc is not None and "SystemExit" in ast.unparse(node.exc):
            yield f"{node.lineno}: raises SystemExit"


def open_ends(module: Module) -> Iterator[str]:
    if not _OPEN_ENDS.search(module.text):
        return
    for number, line in enumerate(module.text.splitlines(), 1):
        if found := _OPEN_ENDS.search(line):
            yield f"{number}: {found[0]}: do it, or write it where work is planned"


def ignores(module: Module) -> Iterator[str]:
    """An ignore names its rule, and has a reason beside it or in a comment just above."""
    if not _IGNORE.search(module.text):
        return  # most have none, and to read all tokens takes long
    lines = module.text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type != tokenize.COMMENT or not (found := _IGNORE.search(token.string)):
            continue
        number = token.start[0]
        ruled = _IGNORED_RULE.match(found["rest"])
        above = lines[number - 2].strip() if number > 1 else ""
        if not ruled:
            yield f"{number}: {found['tool']} without the rule it ignores"
        elif len(re.findall(r"[a-z]{2,}", ruled["reason"])) < 2 and not above.startswith("#"):
            yield f"{number}: {found['tool']}{found['rest']} without a reason"


def hints(module: Module) -> Iterator[str]:
    """Every error made here says what failed and what to do next, and the two are not the same words."""
    arguments = {"HegmError": (1, 2), "PeerError": (1, 2), "Refused": (0, 1), "ExternalError": (0, 1)}
    for node in module.nodes(ast.Call):
        if (kind := _called(node).rpartition(".")[2]) not in arguments:
            continue
        if any(isinstance(argument, ast.Starred) for argument in node.args) or None in {k.arg for k in node.keywords}:
            continue  # made from another error's parts
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        at_message, at_hint = arguments[kind]
        message = node.args[at_message] if len(node.args) > at_message else named.get("message")
        hint = node.args[at_hint] if len(node.args) > at_hint else named.get("hint")
        if message is None or hint is None:
            yield f"{node.lineno}: {kind} without a message and a hint"
        elif isinstance(hint, ast.Constant) and len(str(hint.value).split()) < 2:
            yield f"{node.lineno}: {kind} with the hint {hint.value!r}, which names no next step"
        elif ast.unparse(message) == ast.unparse(hint):
            yield f"{node.lineno}: {kind} whose hint only repeats its message"


def bare_tasks(module: Module) -> Iterator[str]:
    """A task belongs to a group, and a thread to its limiter; nothing is started without an owner."""
    for node in module.nodes(ast.Call):
        if _called(node).rpartition(".")[2] in {"create_task", "ensure_future"}:
            yield f"{node.lineno}: {_called(node)}(): a task outside of a task group"
