"""Runs a script as that many ranks that meet, without a launcher and an import of PyTorch for each.

ranks_alone.py RANKS SCRIPT [ARGUMENTS]: for undisturbed runs, whose launcher is not under test. Ends well if all do.
"""

import gc
import os
import runpy
import socket
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    ranks, script, argv = int(sys.argv[1]), sys.argv[2], sys.argv[2:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # All ranks share these imports: an optimizer imports the compiler, which takes two thirds of a second. The garbage
    # collector would look through the imported objects again and again, here and in each rank. It takes as long.
    gc.disable()
    import_module("torch.distributed")
    import_module("torch._dynamo")
    gc.freeze()
    gc.enable()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            sys.argv = argv
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
