"""Recovery within a process: `hegm.recovery` of a script, and its connection to `hegmctl run --ranks`."""
