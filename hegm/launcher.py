"""HeGM's name for `hegm-launcher`: `python3 -m hegm.launcher COMMAND`, and the function behind it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "main_cli"]


def main(command: Sequence[str]) -> int:
    """Run the command as `hegm-launcher` does; its exit status."""
    program: Any = importlib.import_module("hegmcompat.launcher_cli")
    return int(program.run([*command]))


def main_cli() -> int:
    """The program, with the words of the command line."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    importlib.import_module("hegmcompat.launcher_cli").main()
