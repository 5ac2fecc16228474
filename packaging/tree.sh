#!/usr/bin/env bash
# Fills one directory with a daemon that needs nothing but the interpreter of the distribution: hegmd, hegmctl, the
# libraries they need, byte code, and launchers. install.sh and, through it, deb.sh put it where it belongs.
#
#   packaging/tree.sh ROOT DIRECTORY
#
# ROOT/DIRECTORY is filled; DIRECTORY is the place where it will be found at run time (ROOT is empty for an
# installation, a staging directory for a package), so nothing in it names ROOT. PYTHON is the interpreter that it will
# run with, by default the distribution's. SOURCE_DATE_EPOCH, when set, becomes the time of every file.
#
# The layout is that of a virtual environment, written by hand: that is an interpreter link, pyvenv.cfg and
# site-packages, and `python -m venv` would record in it where it was made. The launchers start the interpreter with -I,
# to ignore PYTHONPATH, the user site and the current directory, and with -B, so that nothing is ever written here after
# the installation.
set -euo pipefail
umask 022

root=$1
place=$2
into=$root$place
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-/usr/bin/python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "packaging: $*" >&2
    exit 1
}

[ -x "$python" ] || fail "there is no $python; install python3, or name an interpreter with PYTHON="
"$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python is older than Python 3.10"
# The link names the minor version: the libraries are for that one only, and a later `python3` must not be taken for it.
read -r interpreter minor < <("$python" -I -c '
import os, sys
minor = "%d.%d" % sys.version_info[:2]
versioned = os.path.join(os.path.dirname(os.path.realpath(sys.executable)), "python" + minor)
print(versioned if os.path.exists(versioned) else os.path.realpath(sys.executable), minor)')

# ---- tools: pip under that very interpreter, and hatchling ----------------------------------------------------------

runs_the_same() {
    [ -x "$1" ] && [ "$(readlink -f "$1")" = "$(readlink -f "$interpreter")" ] && "$1" -m pip --version >/dev/null 2>&1
}

tools=$source/.venv/bin/python
if ! runs_the_same "$tools"; then
    tools=$source/build/packaging-venv-$minor/bin/python
    if ! runs_the_same "$tools"; then
        "$interpreter" -m venv --clear "$source/build/packaging-venv-$minor" ||
            fail "$interpreter cannot make a virtual environment; run: apt-get install python3-venv"
    fi
fi
pip() { "$tools" -m pip --quiet --disable-pip-version-check --no-input "$@"; }

# ---- wheels ---------------------------------------------------------------------------------------------------------

if "$tools" -c 'import hatchling' 2>/dev/null; then
    (cd "$source" && "$tools" -m hatchling build -t wheel -d "$work/own") >"$work/log" 2>&1 ||
        { cat "$work/log" >&2 && fail "the wheel could not be built"; }
else
    pip wheel --no-deps --wheel-dir "$work/own" "$source"
fi

# The libraries are fetched once for as long as what is asked for stays the same.
asked_for=$(cat "$source/pyproject.toml" "$source/packaging/constraints.txt" | sha256sum | cut -c 1-16)
wheels=$source/build/wheels-$minor-$asked_for
if [ ! -d "$wheels" ]; then
    pip wheel --wheel-dir "$work/wheels" --constraint "$source/packaging/constraints.txt" "$(echo "$work"/own/*.whl)[top]"
    rm "$work"/wheels/hegmd-*.whl
    mkdir -p "$source/build"
    mv -T "$work/wheels" "$wheels.$$" && mv -T "$wheels.$$" "$wheels" 2>/dev/null || rm -rf "$wheels.$$"
fi

# ---- the tree -------------------------------------------------------------------------------------------------------

libraries=$into/lib/python$minor/site-packages
mkdir -p "$into/bin" "$libraries"
link=$interpreter
case $place:$interpreter in
/usr/*:/usr/*) link=$(realpath -m --no-symlinks --relative-to="$place/bin" "$interpreter") ;; # so Debian wants it
esac
ln -s "$link" "$into/bin/python3"
printf 'home = %s\ninclude-system-site-packages = false\n' "$(dirname "$interpreter")" >"$into/pyvenv.cfg"

# By name and not by path: pip would record where the file lay.
pip install --no-index --find-links "$work/own" --find-links "$wheels" --no-compile --target "$libraries" 'hegmd[top]'
rm -rf "$libraries/bin"
sed -i '\#^[./]*bin/#d' "$libraries"/*.dist-info/RECORD

"$interpreter" -I - "$libraries" "$into/bin" "$place/bin/python3" <<'LAUNCHERS'
import configparser, pathlib, sys

libraries, programs, interpreter = sys.argv[1:]
(found,) = pathlib.Path(libraries).glob("hegmd-*.dist-info/entry_points.txt")
entry_points = configparser.ConfigParser()
entry_points.read(found)
for name, target in entry_points["console_scripts"].items():
    module, function = target.split(":")
    launcher = pathlib.Path(programs, name)
    launcher.write_text(
        f"#!{interpreter} -IB\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
    )
    launcher.chmod(0o755)
LAUNCHERS

if [ -n "${SOURCE_DATE_EPOCH:-}" ]; then
    find "$into" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
fi
# Checked by time, so that a file mended on the spot counts; the hash seed fixes the order of constant sets.
PYTHONHASHSEED=0 "$interpreter" -s -m compileall -q -j 1 --invalidation-mode timestamp \
    -s "${root:-/}" -p / "$libraries"
if [ -n "${SOURCE_DATE_EPOCH:-}" ]; then
    find "$into" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
fi
