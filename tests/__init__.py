"""The tests; a package, so that no other package named `tests` on the path is mistaken for it."""
