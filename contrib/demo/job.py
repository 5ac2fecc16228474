"""A small process for the demonstration: it represents a training job and waits until its standard input ends."""

import sys

print(f"{sys.argv[1]} is running", flush=True)
sys.stdin.read()
