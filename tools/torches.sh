#!/usr/bin/env bash
# Fetches releases of PyTorch into build/torches, each with a Python of its own, for the tests of communicators.
#
#   tools/torches.sh 2.4.1 2.8.0    those that are missing
#
# A build for GPUs takes 3 GB to fetch and 5 GB on disk. If its index can be reached, a build for the CPU takes a
# tenth: HEGM_TORCH_INDEX=https://download.pytorch.org/whl/cpu. The first release that has no build for this machine's
# Python ends it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD/build/torches
base=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
index=()
[ -z "${HEGM_TORCH_INDEX:-}" ] || index=(--index-url "$HEGM_TORCH_INDEX" --extra-index-url https://pypi.org/simple)

for version in "$@"; do
    place=$root/$version
    if [ -x "$place/bin/python" ] && "$place/bin/python" -c 'import msgpack, torch; torch.__version__' 2>/dev/null; then continue; fi
    echo "torches: fetching PyTorch $version" >&2
    rm -rf "$place"
    "$base" -m venv "$place"
    "$place/bin/python" -m pip install --quiet "${index[@]}" "torch==$version" msgpack
done
echo "torches: in $root: $(cd "$root" && echo *)" >&2
