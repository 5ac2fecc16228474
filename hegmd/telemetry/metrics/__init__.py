"""Prometheus metrics of the node and of the daemon: what is counted, and how it is written.

`Counters` is what the daemon's parts count into, `render` gives the text, and `read_own_process` alone looks at /proc.
Series are bounded by the hardware and by our own lists of words: there is none per process, since pids come and go by
the thousand and each would stay in the monitoring system for good. What is not known is left out, never 0.
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
