"""Checks of rights: what the daemon may do, and who can use its socket."""

from __future__ import annotations

import re
import stat

from hegmd.node.doctor.facts import CheckResult, NodeFacts, clipped, fail, listed, ok, skip, warn

CAP_DAC_OVERRIDE = 1
CAP_KILL = 5
CAP_SYS_PTRACE = 19


def has_capability(facts: NodeFacts, number: int) -> bool:
    """Return True if this process has that effective capability."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", facts.read("proc/self/status") or "", re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> number & 1)


def rights(facts: NodeFacts) -> CheckResult:
    """The daemon may see and signal the processes that it serves."""
    if facts.user_mode:
        return ok(f"user mode: processes of uid {facts.uid} only")
    if facts.uid != 0:
        return warn(
            f"runs as uid {facts.uid}: only processes of that user can be acted on",
            "sudo systemctl start hegmd, or run hegmd --user if that is intended",
        )
    missing = [
        name
        for name, number in (
            ("CAP_SYS_PTRACE", CAP_SYS_PTRACE),
            # Reading another user's files needs less, but the NVIDIA driver's checkpoint calls require this capability.
            ("CAP_DAC_OVERRIDE", CAP_DAC_OVERRIDE),
            ("CAP_KILL", CAP_KILL),
        )
        if not has_capability(facts, number)
    ]
    if missing:
        return warn(
            f"root without {listed(missing)}: other users' processes cannot be seen in full, signalled or moved",
            f"give the container {' '.join(f'--cap-add {name}' for name in missing)}, or use the shipped hegmd.service",
        )
    return ok("root, with the capabilities to see, signal and move every process")


def group(facts: NodeFacts) -> CheckResult:
    """The group whose members may use the daemon exists."""
    if facts.user_mode:
        return skip("in user mode only its user can use the socket")
    gid = facts.group_id(facts.group)
    if gid is None:
        return warn(
            f"there is no group {facts.group}: only root can use the socket", f"sudo groupadd --system {facts.group}"
        )
    return ok(f"group {facts.group} exists (gid {gid}); its members may act on every process")


def socket(facts: NodeFacts) -> CheckResult:
    """Only the daemon can change the socket's directory, and the permitted users can open the socket."""
    path, directory = facts.socket_path, facts.socket_path.parent
    sudo = "" if facts.user_mode else "sudo "
    if not directory.is_dir():
        return fail(f"{clipped(str(directory), 60)} does not exist", f"{sudo}install -d -m 0755 {directory}")
    status = directory.stat()
    # A user who can rename files in the directory can replace the socket.
    if status.st_uid not in (0, facts.uid):
        return fail(f"{clipped(str(directory), 60)} belongs to uid {status.st_uid}", f"{sudo}chown root: {directory}")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        return fail(f"other users can write to {clipped(str(directory), 60)}", f"{sudo}chmod go-w {directory}")
    try:
        status = path.stat()
    except FileNotFoundError:
        return fail(f"{clipped(str(path), 60)} was removed: no client can reach the daemon", _restart(facts))
    if not stat.S_ISSOCK(status.st_mode):
        return fail(f"{clipped(str(path), 60)} is not a socket", f"{sudo}rm {path}; {_restart(facts)}")
    return _judge_access(facts, status.st_mode, status.st_gid)


def _judge_access(facts: NodeFacts, mode: int, gid: int) -> CheckResult:
    path, shown = facts.socket_path, clipped(str(facts.socket_path), 50)
    bits = f"{stat.S_IMODE(mode):04o}"
    owner = facts.group_name(gid) or str(gid)
    if facts.user_mode:
        if mode & 0o066 and facts.socket_path.parent.stat().st_mode & 0o011:
            return warn(f"{shown} is open to others ({bits})", f"chmod 0600 {path}")
        return ok(f"{shown} is private to its user")
    if mode & 0o006:
        return warn(f"{shown} ({bits}) is open to every user of the node", f"sudo chmod 0660 {path}")
    if not mode & 0o060 or gid != facts.group_id(facts.group):
        fix = f"sudo chgrp {facts.group} {path} && sudo chmod 0660 {path}"
        return warn(f"{shown} ({bits}, group {owner}) is closed to group {facts.group}", fix)
    return ok(f"{shown} ({bits}, group {owner})")


def _restart(facts: NodeFacts) -> str:
    with_systemd = facts.at("run/systemd/system").exists()
    if facts.user_mode:
        return "systemctl --user restart hegmd.socket" if with_systemd else "hegmd --user"
    return "sudo systemctl restart hegmd.socket hegmd.service" if with_systemd else "start hegmd as root"
