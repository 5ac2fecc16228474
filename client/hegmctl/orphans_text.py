"""What was found on the node and no operation has, as text: what it is, why nobody has it, and what can be done."""

from __future__ import annotations

from hegmctl.quantities import binary_size
from hegmctl.tables import UNKNOWN, printable, wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.tables import Style
    from hegmd.protocol.messages import Dropped, OrphansReply
    from hegmd.protocol.operations import Orphan


def orphans_text(reply: OrphansReply, style: Style) -> list[str]:
    """All of `hegmctl adopt`."""
    if not reply.orphans:
        return ["Nothing was found that no operation has."]
    return orphans_lines(reply.orphans, style)


def orphans_lines(orphans: tuple[Orphan, ...], style: Style) -> list[str]:
    """A paragraph for each, the command in a line of its own, to be copied."""
    lines = [style.paint("Needs a person:", "yellow")]
    for orphan in orphans:
        size = UNKNOWN if orphan.size_bytes is None else binary_size(orphan.size_bytes)
        text = printable(f"{orphan.kind} {orphan.name}: {size}, {orphan.where}; {orphan.why}")
        lines += [f"  {line}" for line in wrapped(text, style.paragraph_columns)]
        lines.append(f"    next: {printable(orphan.next)}")
    return lines


def dropped_text(reply: Dropped, style: Style) -> list[str]:
    """That it is gone."""
    size = "" if reply.size_bytes is None else f", {binary_size(reply.size_bytes)}"
    return [f"given up: {printable(reply.name)}{size}"]
