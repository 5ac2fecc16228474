"""The agent: our thread and a few hooks inside a training process. Standard library only, on the job's own Python.

It is loaded by file path under the private name `_hegm`, next to nothing else of hegmd, so that nothing has to be
installed where the job runs. An error in here never reaches the training script: the agent reports it and withdraws.
"""
