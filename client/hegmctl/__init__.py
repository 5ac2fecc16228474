"""hegmctl, the command line of hegmd, and the library faces `hegmctl.connection` and `hegmctl.async_connection`.

Imports nothing: every module that this one would import is paid for by every command.
"""
