"""Recovery: snapshots of jobs in the pool, and starts from them once a process has failed."""
