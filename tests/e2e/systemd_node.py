"""A whole small machine for the tests: a real systemd as PID 1 of its own namespaces, over an overlay of this machine.

It owns the namespaces, the overlay, the cgroup and the processes of one such machine, from boot to the last trace of
it. It must never let the systemd inside see the real root file system, which it would clean up, the real cgroup tree,
in which it would leave its slices behind, or the real kernel's settings.

Shape. The root of the machine is an overlay whose upper layer is a tmpfs, mounted in a mount namespace that dies with
the machine; so everything that happens there (packages installed, users added, units enabled) is gone with its PID 1.
/dev, /sys, /run and /tmp are its own. PID 1 announces the end of the boot on a notify socket, as any Type=notify
service would, so nothing here polls or sleeps. Commands are run in it with nsenter; files are put in and read through
`/proc/PID/root`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tests.patience import HANG_S

if TYPE_CHECKING:
    from typing_extensions import Self

BOOT_TIMEOUT_S = HANG_S
COMMAND_TIMEOUT_S = HANG_S

# Runs as the first process of the new namespaces; $1 is an empty directory, $2 the notify socket, the rest directories
# to show inside. Every path it removes or empties lies below the overlay, and `set -e` ends it if that is not mounted.
_BECOME_PID_1 = r"""
set -eu
base=$1 root=$1/root
mount -t tmpfs -o mode=0755 tmpfs "$base"
mkdir "$base/upper" "$base/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$root"
mkdir -p "$root/.old"

# What the real machine's administrator enabled is not wanted here, and its disks are not here to be mounted.
rm -rf "$root/etc/systemd/system" && mkdir "$root/etc/systemd/system"
for unit in systemd-modules-load.service modprobe@.service sys-kernel-debug.mount sys-kernel-tracing.mount; do
    ln -s /dev/null "$root/etc/systemd/system/$unit"
done
: > "$root/etc/fstab"
rm -f "$root/usr/sbin/policy-rc.d"  # an image for containers forbids packages to start anything
rm -rf "$root/etc/hegm" "$root/var/lib/hegm" "$root/var/log/hegm"  # of a hegmd of the real machine
rm -f "$root/var/lib/man-db/auto-update"  # the index of manual pages, two seconds at every installation
tr -d - < /proc/sys/kernel/random/uuid > "$root/etc/machine-id"

mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
for shared in sys sysrq-trigger; do  # the kernel's own settings are the same inside and outside
    [ -e "$root/proc/$shared" ] || continue
    mount --bind "$root/proc/$shared" "$root/proc/$shared"
    mount -o remount,bind,ro "$root/proc/$shared"
done
mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755,nosuid,nodev tmpfs "$root/run"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
mount -t tmpfs -o mode=0755,nosuid tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
    (IFS=:; set -- $node; mknod -m 0666 "$root/dev/$1" c "$2" "$3")
done
mkdir "$root/run/host" "$root/run/host/changes"
mount --bind "$base/upper" "$root/run/host/changes"
: > "$root/run/host/notify"
mount --bind "$2" "$root/run/host/notify"
shift 2
for shown do  # these may lie on another file system, which an overlay of / does not show
    mkdir -p "$root$shown"
    mount --bind "$shown" "$root$shown"
    mount -o remount,bind,ro "$root$shown"
done

hostname hegm-node
cd "$root"
pivot_root . .old
umount -l /.old
rmdir /.old
exec env -i container=hegm-test NOTIFY_SOCKET=/run/host/notify PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    /lib/systemd/systemd --system --unit=basic.target --show-status=0 --log-target=journal
"""

# The mounts that a container or a lean kernel may refuse, tried in a mount namespace that is thrown away.
_PROBE = """
mount -t tmpfs tmpfs /tmp
mkdir /tmp/upper /tmp/work /tmp/root
mount -t overlay overlay -o lowerdir=/,upperdir=/tmp/upper,workdir=/tmp/work /tmp/root
mount -t cgroup2 cgroup2 /tmp/root/sys
"""


def why_not() -> str | None:
    """The reason why no such machine can be started here, or None when it can."""
    if os.geteuid() != 0:
        return "starting a systemd in namespaces needs root"
    if not Path("/lib/systemd/systemd").exists():
        return "systemd is not installed"
    for program in ("unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} (util-linux) is not installed"
    probe = subprocess.run(
        ["unshare", "--fork", "--pid", "--mount", "--cgroup", "--net", "sh", "-e", "-c", _PROBE],
        check=False,
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        return f"namespaces or the mounts in them are refused here: {probe.stderr.strip()}"
    return None


class SystemdNode:
    """One machine; a context manager. Entering boots it; leaving removes everything of it.

    `shown` are directories of the real machine that are visible inside, read-only and at the same path.
    """

    def __init__(self, *shown: Path) -> None:
        self._shown = [str(each) for each in shown]
        self._stack = contextlib.ExitStack()
        self._pid: int | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._boot()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pid = None
        self._stack.close()

    def _boot(self) -> None:
        base = Path(tempfile.mkdtemp(prefix="hegm-node-"))
        self._stack.callback(base.rmdir)  # the machine's tmpfs never covered it in our own mount namespace
        cgroup = self._stack.enter_context(_own_cgroup(base.name))
        notify_path = Path(f"{base}.notify")
        notify = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC))
        notify.bind(str(notify_path))
        self._stack.callback(notify_path.unlink)

        # Entering the cgroup comes before `unshare --cgroup`, so that it is the root which the machine sees.
        enter = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
        unshare = ["unshare", "--fork", "--kill-child", "--propagation", "private"]
        unshare += ["--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net"]
        boot = ["sh", "-c", _BECOME_PID_1, "node", str(base), str(notify_path), *self._shown]
        # pdeathsig: when this test process is killed, the machine goes with it.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "sh", "-c", enter, "sh", str(cgroup), *unshare, *boot],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._stack.callback(_end_machine, process)
        self._wait_for_boot(notify, process)
        self._pid = _children(process.pid)[0]

    def _wait_for_boot(self, notify: socket.socket, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        pidfd = os.pidfd_open(process.pid)
        try:
            while True:
                ready, _, _ = select.select([notify.fileno(), pidfd], [], [], max(0.0, deadline - time.monotonic()))
                if notify.fileno() in ready and b"READY=1" in notify.recv(65536).split(b"\n"):
                    return
                if not ready or pidfd in ready:
                    process.kill()
                    output = process.stderr.read().decode(errors="replace") if process.stderr else ""
                    raise RuntimeError(f"the systemd of the tests did not come up: {output.strip() or 'no message'}")
        finally:
            os.close(pidfd)

    # -- work ----------------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Path:
        """The machine's root directory, from outside: to put files into it and to look at what it wrote."""
        assert self._pid is not None, "the machine is not running"
        return Path(f"/proc/{self._pid}/root")

    @property
    def changes(self) -> Path:
        """The upper layer of the root: every file that is not as it is on the real machine."""
        return self.root / "run/host/changes"

    def argv(self, *command: str, user: str | None = None) -> list[str]:
        """The command line that runs `command` inside, for callers who need the process themselves.

        nsenter forks, and would leave the command behind when it is killed: hence the death signal.
        """
        enter = ["nsenter", "-t", str(self._pid), "-m", "-p", "-u", "-i", "-n", "-C", "--wd"]
        switch = ["setpriv", "--pdeathsig", "KILL"]
        home = "/root"
        if user is not None:
            switch += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
            home = f"/home/{user}"
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = ["env", "-i", path, "LANG=C.UTF-8", f"HOME={home}", "DEBIAN_FRONTEND=noninteractive"]
        return [*enter, *switch, *environment, *command]

    @contextlib.contextmanager
    def start(self, *command: str, user: str | None = None) -> Iterator[subprocess.Popen[str]]:
        """A command that runs inside until the end of the block."""
        process = subprocess.Popen(
            self.argv(*command, user=user), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            _end(process)

    def run(
        self, *command: str, user: str | None = None, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside; with `check`, anything but status 0 raises with what it printed."""
        done = subprocess.run(
            self.argv(*command, user=user),
            check=False,
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def show(self, unit: str, property_name: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", property_name, unit).stdout.strip()

    # -- journal -------------------------------------------------------------------------------------------------------

    def journal_cursor(self) -> str:
        """A place in the journal: everything logged until now lies before it."""
        self.run("journalctl", "--sync")
        output = self.run("journalctl", "-n", "0", "--show-cursor", "-q").stdout
        return output.strip().removeprefix("-- cursor: ")

    def journal(self, unit: str | None = None, after: str | None = None) -> list[dict[str, Any]]:
        """The entries written so far, oldest first, as field maps."""
        self.run("journalctl", "--sync")
        output = self.run("journalctl", "-o", "json", "--all", "-q", *_matching(unit, after)).stdout
        return [json.loads(line) for line in output.splitlines()]

    def wait_for_journal(
        self, *words: str, after: str, unit: str | None = None, timeout_s: float = HANG_S
    ) -> dict[str, Any]:
        """The first entry after `after` whose message holds all the words; waits for it to be written."""
        observed: list[str] = []
        with self.start(
            "journalctl", "-f", "-o", "json", "--all", "-q", "--no-tail", *_matching(unit, after)
        ) as follow:
            timer = threading.Timer(timeout_s, follow.kill)
            timer.start()
            try:
                for line in follow.stdout or ():
                    entry = json.loads(line)
                    message = str(entry.get("MESSAGE"))
                    if all(word in message for word in words):
                        return dict(entry)
                    observed.append(message)
            finally:
                timer.cancel()
                timer.join()
        raise AssertionError(f"no journal entry with {words} within {timeout_s} s, but:\n" + "\n".join(observed))


def _matching(unit: str | None, after: str | None) -> list[str]:
    return [*(["-u", unit] if unit else []), *(["--after-cursor", after] if after else [])]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _end_machine(process: subprocess.Popen[bytes]) -> None:
    """Kill PID 1 and reap `unshare`, which ends once the kernel has ended every process of the machine."""
    if process.poll() is None:
        for pid in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=HANG_S)
    _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@contextlib.contextmanager
def _own_cgroup(name: str) -> Iterator[Path]:
    """A cgroup for the machine, in the unified hierarchy wherever that is mounted; removed with all below it."""
    with contextlib.ExitStack() as stack:
        mounted = _mounted_cgroup2()
        if mounted is None:
            mounted = Path(tempfile.mkdtemp(prefix="hegm-cgroup-"))
            stack.callback(mounted.rmdir)
            subprocess.run(["mount", "-t", "cgroup2", "cgroup2", str(mounted)], check=True)
            stack.callback(subprocess.run, ["umount", str(mounted)], check=True)
        cgroup = mounted / name
        cgroup.mkdir()
        stack.callback(_remove_cgroup, cgroup)
        yield cgroup


def _mounted_cgroup2() -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    return None


def _remove_cgroup(cgroup: Path) -> None:
    for directory, _, _ in os.walk(cgroup, topdown=False):
        os.rmdir(directory)
