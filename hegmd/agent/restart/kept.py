"""What a script has asked to be kept of its own variables: `hegm.keep(name, get, set)`. Owns the table.

The values have to be plain, as a state file writes them. `get` is called where the training stands, `set` in the
restarted script once everything else is back; both in the order of the first `keep`.
"""

from __future__ import annotations

from .unfit import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_table: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}


def keep(name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
    """From now on keep this under that name; a later call for the name takes the place of the earlier."""
    _table[name] = (get, put)


def is_in_use() -> bool:
    """Whether the script keeps its variables itself."""
    return bool(_table)


def take() -> tuple[dict[str, Any], list[Refusal]]:
    """All values, and why some could not be had."""
    values: dict[str, Any] = {}
    refusals: list[Refusal] = []
    for name, (get, _put) in list(_table.items()):
        try:
            values[name] = get()
        except Exception as error:  # noqa: BLE001 - the script's
            refusals.append(Refusal(f"hegm.keep({name!r}): its get raised {error!r}", "mend the script"))
    return values, refusals


def unfit(values: dict[str, Any]) -> list[str]:
    """What is to be put back and is not asked for here."""
    return [
        f"hegm.keep({name!r}) has not been called where the training goes on" for name in values if name not in _table
    ]


def put(values: dict[str, Any]) -> None:
    """Give the script its values."""
    for name, value in values.items():
        _table[name][1](value)
