"""Tests and measurements on real GPUs. Nothing in here runs without them; `make test-gpu` and `make bench-gpu` do."""
