"""Runs a program with no more than a systemd unit allows: `confined.py UNIT PROGRAM...`.

Of the unit it takes CapabilityBoundingSet=, NoNewPrivileges= and MemoryDenyWriteExecute=, and the limit on locked
memory that systemd gives to services. The kernel keeps all of these across exec. What takes namespaces or a compiled
filter is left to the tests under a real systemd.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 24, 38, 65
CAPABILITIES = 41
NUMBERS = {"CAP_DAC_OVERRIDE": 1, "CAP_DAC_READ_SEARCH": 2, "CAP_KILL": 5, "CAP_SYS_PTRACE": 19, "CAP_SYS_RESOURCE": 24}
LOCKED_BYTES = 8 << 20


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    allowed = re.search(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE)
    assert allowed is not None
    kept = {NUMBERS[name] for name in allowed[1].split()}
    libc = ctypes.CDLL(None, use_errno=True)

    def set_for_good(option: int, value: int) -> None:
        if libc.prctl(option, value, 0, 0, 0):
            sys.exit(f"prctl {option}: {os.strerror(ctypes.get_errno())}")

    for number in range(CAPABILITIES):
        if number not in kept:
            set_for_good(PR_CAPBSET_DROP, number)
    if "\nNoNewPrivileges=yes" in text:
        set_for_good(PR_SET_NO_NEW_PRIVS, 1)
    if "\nMemoryDenyWriteExecute=yes" in text:
        set_for_good(PR_SET_MDWE, 1)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED_BYTES, LOCKED_BYTES))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
