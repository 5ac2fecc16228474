"""Prometheus metrics of the node and of the daemon.

The daemon's parts count in `Counters`, `render` writes the text, and only `read_own_process` reads /proc. The hardware
and our own lists of words bound the number of series. A job that has not ended has two. No process has any, since pids
are many and each would stay in the monitoring system. Unknown values are left out, never 0.
"""

from hegmd.telemetry.metrics.counters import Counters, Histogram
from hegmd.telemetry.metrics.own_process import OwnProcess, read_own_process
from hegmd.telemetry.metrics.report import CONTENT_TYPE, Build, JobTally, Snapshot, Tallies, render

__all__ = [
    "CONTENT_TYPE",
    "Build",
    "Counters",
    "Histogram",
    "JobTally",
    "OwnProcess",
    "Snapshot",
    "Tallies",
    "read_own_process",
    "render",
]
