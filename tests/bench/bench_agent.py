"""The cost of the agent for the start of a Python, and for a boundary without a request.

Paired with the same work without the agent. `bench_steps` measures a whole training.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import timeit
from time import perf_counter

from hegmctl.running import prepare
from tests.bench.report import Row

BOUNDARY_CALLS = 200_000
ROUNDS = 7
STARTS = 40


def run() -> list[Row]:
    return [*_boundary(), *_start()]


def _start() -> list[Row]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HEGM_", "PYTHON"))}
    agented = dict(plain)
    prepare(agented, "/nonexistent/hegmd.sock", "bench", None)
    times_ms = [(_start_ms(plain), _start_ms(agented)) for _ in range(STARTS)]
    more_ms = statistics.median(after - before for before, after in times_ms[1:])
    return [Row("a Python start under `hegmctl run`: more by", more_ms, "ms")]


def _start_ms(environ: dict[str, str]) -> float:
    began = perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environ, check=True)
    return (perf_counter() - began) * 1e3


def _boundary() -> list[Row]:
    from types import SimpleNamespace

    from hegmd.agent import boundary
    from hegmd.agent.quiesce import Gate

    iterators = type("_BaseDataLoaderIter", (), {"__next__": lambda self: 1})
    plain, hooked = iterators(), type("Hooked", (), {"__next__": lambda self: 1})
    boundary.watch_loaders(SimpleNamespace(_BaseDataLoaderIter=hooked), Gate())
    costs: list[float] = []
    watched = hooked()
    for _ in range(ROUNDS):
        pair = [timeit.timeit("next(it)", globals={"it": it}, number=BOUNDARY_CALLS) for it in (plain, watched)]
        costs.append((pair[1] - pair[0]) / BOUNDARY_CALLS * 1e9)
    return [Row("a boundary with nothing asked", statistics.median(costs), "ns", 100.0)]
