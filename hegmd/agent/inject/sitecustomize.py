"""The only file of hegmd on a worker's path: mounts the agent, then runs the sitecustomize that would have run.

Python imports this at its start, in any version: the syntax must work in all of them, it must not raise or print, and
it imports only what a bare interpreter has loaded. Imports nothing of hegmd in Pythons that are too old for the agent.
The environment stays unchanged, so that child Pythons get an agent of their own; the search path of this process is
restored to what it would have been.
"""

# Annotations in comments, because this has to be Python 2 as well.
# pyright: reportTypeCommentUsage=false

import sys


def _mount_agent(root):
    # type: (str) -> None
    """Make hegmd's folder importable as `_hegm` and let the agent take its place; nothing is started yet."""
    import _frozen_importlib as bootstrap
    import _frozen_importlib_external as external

    spec = external.spec_from_file_location("_hegm", root + "/__init__.py", submodule_search_locations=[root])
    if spec is None or spec.loader is None:
        return
    package = bootstrap.module_from_spec(spec)
    sys.modules["_hegm"] = package
    spec.loader.exec_module(package)
    __import__("_hegm.agent.import_hooks")
    sys.modules["_hegm.agent.import_hooks"].mount()


def _run_next():
    # type: () -> None
    """Run the next sitecustomize on the path, if there is one. Its exceptions are passed on."""
    if sys.version_info < (3, 4):
        found = __import__("imp").find_module("sitecustomize", sys.path)
        __import__("imp").load_module("sitecustomize", *found)
        return
    import _frozen_importlib as bootstrap
    import _frozen_importlib_external as external

    spec = external.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = bootstrap.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _end_unless_agent_waits():
    # type: () -> None
    """Exit if this process was prestarted, but its agent cannot wait for its turn: the script must not run."""
    os = sys.modules["os"]
    if "HEGM_READY_FD" in os.environ:
        os._exit(97)  # as of standby.py


def _leave_path(here):
    # type: (str) -> None
    sys.path[:] = [entry for entry in sys.path if entry.rstrip("/") != here]


_here = __file__.rpartition("/")[0]
try:
    _leave_path(_here)
    if sys.version_info >= (3, 9) and "_hegm" not in sys.modules:
        _mount_agent(_here.rpartition("/")[0].rpartition("/")[0])
except Exception:  # noqa: BLE001 - whatever is wrong with the agent, the job's Python starts as it would without
    sys.modules.pop("_hegm", None)
_end_unless_agent_waits()
if sys.version_info >= (3, 4):
    _run_next()
else:
    try:
        _run_next()
    except ImportError:
        pass
