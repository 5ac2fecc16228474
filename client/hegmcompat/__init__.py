"""The interface of HeGM 0.3, unchanged: `hegm-launcher`, `hegm-ctrl`, the REST interface and the files.

Owns that interface and nothing else. The agent saves and restores the state of a training, as for `hegmctl migrate
--via restart`. Here the state goes through files instead of the daemon's pool, so no daemon is needed.
"""
