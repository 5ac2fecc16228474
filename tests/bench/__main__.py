"""`python -m tests.bench [NAME...]`: run all benchmarks, or those named, and show each figure beside its budget.

The exit status is 1 when a figure is over its budget. Figures are made one after another and by one process at a time
as far as possible; on a machine that does other things as well they are upper bounds, and the heading shows its load.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from tests.bench import (
    bench_agent,
    bench_carrier,
    bench_checkpoint,
    bench_clients,
    bench_downtime,
    bench_hegmctl,
    bench_idle,
    bench_image,
    bench_inventory,
    bench_parking,
    bench_refresh,
    bench_roundtrip,
    bench_sharing,
    bench_state,
    bench_steps,
    bench_top,
)
from tests.bench.machine import this_machine
from tests.bench.report import Row, as_json, as_markdown, as_text, is_within

Benchmark = Callable[[], Sequence[tuple[str, float, str, float | None]]]

BENCHMARKS: dict[str, Benchmark] = {
    "roundtrip": bench_roundtrip.run,
    "clients": bench_clients.run,
    "hegmctl": bench_hegmctl.run,
    "idle": bench_idle.run,
    "inventory": bench_inventory.run,
    "refresh": bench_refresh.run,
    "agent": bench_agent.run,
    "carrier": bench_carrier.run,
    "steps": bench_steps.run,
    "parking": bench_parking.run,
    "downtime": bench_downtime.run,
    "image": bench_image.run,
    "checkpoint": bench_checkpoint.run,
    "state": bench_state.run,
    "top": bench_top.run,
    "sharing": bench_sharing.run,
}


def main(argv: Sequence[str] | None = None, benchmarks: Mapping[str, Benchmark] = BENCHMARKS) -> int:
    """Run what is asked for, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Figures beside their budgets.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(benchmarks)}; all if none is named"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="show", action="store_const", const=as_json, help="print JSON")
    form.add_argument("--markdown", dest="show", action="store_const", const=as_markdown, help="print Markdown")
    parser.set_defaults(show=as_text)
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in benchmarks]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks)}")
    machine = this_machine()
    results: dict[str, list[Row]] = {}
    for name in arguments.names or benchmarks:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = [Row(*row) for row in benchmarks[name]()]
    print(arguments.show(machine, results))
    return 0 if is_within(results) else 1


if __name__ == "__main__":
    # The benchmarks measure warm starts. Without this run, a daemon whose sources are newer than their compiled form
    # would compile them at each start, which costs it memory permanently.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main())
