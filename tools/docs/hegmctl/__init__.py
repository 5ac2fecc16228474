"""Manual pages, shell completions and the reference of the JSON output, all made from the tables they speak of.

Used when the package is built and in tests, never by a command. The one part of the client that also reads tables of
the daemon (its options and its settings), whose pages are made here too.
"""
