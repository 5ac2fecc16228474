"""What users of HeGM 0.3 type and call, kept: `hegm-launcher`, `hegm-ctrl`, its REST interface and its files.

Owns that outside and nothing else. The state of a training is taken and put back by the agent, as for `hegmctl migrate
--via restart`; here it goes by way of files instead of the daemon's pool, so none of this needs a daemon.
"""
