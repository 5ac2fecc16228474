"""Prometheus metrics of the node and of the daemon.

The daemon's parts count in `Counters`, `render` writes the text, and only `read_own_process` reads /proc. The hardware
and our own lists of words bound the number of series: none is per process, since pids are many and each would stay in
the monitoring system. Unknown values are left out, never 0.
"""

from hegmd.telemetry.metrics.counters import Counters, Histogram
from hegmd.telemetry.metrics.own_process import OwnProcess, read_own_process
from hegmd.telemetry.metrics.report import CONTENT_TYPE, Build, Snapshot, Tallies, render

__all__ = [
    "CONTENT_TYPE",
    "Build",
    "Counters",
    "Histogram",
    "OwnProcess",
    "Snapshot",
    "Tallies",
    "read_own_process",
    "render",
]
