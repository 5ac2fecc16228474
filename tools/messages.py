"""List every message that a user can see, with file and line: `python tools/messages.py [WORDS...]`.

Reads the code and runs none of it. A message is each text of several words that is no docstring: given to an error, to
a parameter such as `hint=` or `help=`, returned, or in a table. A value that is filled in appears as `{name}`. With
WORDS, only messages that have all of them are listed. If none has, WORDS are taken for a message as a user saw it, and
the messages that can read so are listed. A test holds docs/troubleshooting.md against this list.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A shown text has its message and perhaps parts from other functions.
_MAX_SEEN = 5
SHIPPED = ("hegm", "hegmd", "client")
# Nodes that hold no text: two thirds of all.
_WITHOUT_PARTS = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop, ast.arg)


@dataclass(frozen=True)
class Message:
    """One text of the code. `kind` is the error it is raised with, or the parameter it is given to."""

    place: str
    kind: str
    text: str


def text_of(node: ast.expr) -> str | None:
    """The text that an expression makes, with `{name}` for what is filled in. None where it makes none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text_of(part) or "" if isinstance(part, ast.Constant) else f"{{{ast.unparse(_filled(part))}}}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else f"{left or '{…}'}{right or '{…}'}"
    if isinstance(node, ast.IfExp):
        both = [text for text in (text_of(node.body), text_of(node.orelse)) if text]
        return " / ".join(both) or None
    return None


def _filled(part: ast.expr) -> ast.expr:
    return part.value if isinstance(part, ast.FormattedValue) else part


def _is_sentence(text: str | None) -> bool:
    """True for words of a message; false for names, keys and separators."""
    return text is not None and " " in text.strip() and any(character.isalpha() for character in text)


def in_source(place: str, source: str) -> Iterator[Message]:
    """The messages of one file."""
    nodes = [node for node in ast.walk(ast.parse(source)) if not isinstance(node, _WITHOUT_PARTS)]
    visited = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        for kind, value in _given(node):
            text = text_of(value)
            if id(value) in visited or text is None or not _is_sentence(text):
                continue
            visited.update(id(part) for part in ast.walk(value))
            yield Message(f"{place}:{value.lineno}", kind, text)


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The expressions right below a node, each with what it is given to. Outer ones come before those inside them."""
    if isinstance(node, ast.Call):
        name = _last_name(node.func)
        yield from ((name, value) for value in node.args)
        yield from ((word.arg or name, word.value) for word in node.keywords)
    elif isinstance(node, ast.Return):
        yield from (("returned", value) for value in [node.value] if value is not None)
    else:
        yield from (("text", value) for value in ast.iter_child_nodes(node) if isinstance(value, ast.expr))


def _last_name(function: ast.expr) -> str:
    """`Refused` of `errors.Refused`; empty for a function that has no name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def messages() -> list[Message]:
    """Every message of the shipped packages, by file and line."""
    found: list[Message] = []
    for package in SHIPPED:
        for path in sorted((ROOT / package).rglob("*.py")):
            found += in_source(str(path.relative_to(ROOT)), path.read_text())
    return sorted(
        set(found), key=lambda message: (message.place.rpartition(":")[0], int(message.place.rpartition(":")[2]))
    )


def with_words(found: list[Message], words: list[str]) -> list[Message]:
    """The messages that have all of these words, or else those that a user may have seen as these words."""
    some = [message for message in found if all(word.lower() in message.text.lower() for word in words)]
    return some or seen_as(found, " ".join(words))


def seen_as(found: list[Message], shown: str) -> list[Message]:
    """The messages that a shown text contains, with anything for each `{name}`. The longest one comes first."""
    fixed = {message: [part.strip() for part in re.split(r"\{[^{}]*\}", message.text)] for message in found}
    able = [
        message
        for message, parts in fixed.items()
        if any(" " in part for part in parts) and re.search(".*".join(map(re.escape, parts)), shown, re.IGNORECASE)
    ]
    return sorted(able, key=lambda message: -sum(map(len, fixed[message])))[:_MAX_SEEN]


def main() -> None:
    for message in with_words(messages(), sys.argv[1:]):
        print(f"{message.place}: {message.kind}: {message.text}")


if __name__ == "__main__":
    main()
