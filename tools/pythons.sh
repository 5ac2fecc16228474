#!/usr/bin/env bash
# Fetches Pythons of Debian's other releases into build/pythons, for the tests of the agent in any Python of a job.
#
#   tools/pythons.sh            those that are missing
#   tools/pythons.sh --torch    and PyTorch for the newest: 245 MB to fetch, 1.1 GB on disk
#
# Nothing is installed: apt is given lists of its own and only downloads; the packages are unpacked beside each other,
# each release with the libraries that its Python needs, and a starter for each is put into build/pythons/bin. If a
# release's C library is newer than this machine's, the starter uses that release's own dynamic loader.
set -euo pipefail

mirror=${HEGM_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD/build/pythons

say() { echo "pythons: $*" >&2; }

for needed in apt-get dpkg-deb; do
    command -v "$needed" >/dev/null || { say "there is no $needed here; this works on Debian and Ubuntu"; exit 1; }
done
[ -r "$keyring" ] || { say "there is no $keyring; install debian-archive-keyring"; exit 1; }

fetch() { # SUITE VERSION LIBFFI
    local suite=$1 version=$2 libffi=$3 place=$root/$1
    local name=python$version
    if [ -x "$root/bin/$name" ] && "$root/bin/$name" -c ''; then return; fi
    say "fetching $name from Debian $suite"
    set_up_apt "$suite" "$place"
    (cd "$place/archives" && apt-get "${options[@]}" download "$name-minimal" "lib$name-minimal" "lib$name-stdlib" \
        libc6 libexpat1 zlib1g "$libffi" >/dev/null)
    local package
    for package in "$place"/archives/*.deb; do
        case ${package##*/} in
        libc6_*) dpkg-deb -x "$package" "$place/libc" ;;
        *) dpkg-deb -x "$package" "$place/rest" ;;
        esac
    done
    rm -rf "$place"/{lists,archives}
    write_starter "$place" "$name" "$(ls -d /lib64/ld-linux-*.so.* /lib/ld-linux-*.so.* 2>/dev/null | head -n 1)" ""
    "$root/bin/$name" -c 'import ctypes' 2>/dev/null ||
        write_starter "$place" "$name" "$(find "$place/libc" -name 'ld-linux-*.so.*' | head -n 1)" "$place/libc"
    "$root/bin/$name" -c 'import ctypes, mmap, select, socket, struct' || { say "$name does not start here"; exit 1; }
}

set_up_apt() { # SUITE PLACE; sets `options`
    rm -rf "$2"
    mkdir -p "$2"/{lists/partial,archives/partial,rest,libc} "$root/bin"
    echo "deb [signed-by=$keyring] $mirror $1 main" >"$2/sources.list"
    : >"$2/status"
    options=(-q -o "Dir::Etc::sourcelist=$2/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$2/lists" -o "Dir::State::status=$2/status" -o "Dir::Cache=$2"
        -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::http::Timeout=10 -o Acquire::Retries=0)
    apt-get "${options[@]}" update >/dev/null
}

fetch_torch() { # SUITE VERSION; Debian's own build, for the processor alone
    local place=$root/torch name=python$2-torch package
    if [ -x "$root/bin/$name" ] && "$root/bin/$name" -c 'import torch' 2>/dev/null; then return; fi
    say "fetching PyTorch for python$2 from Debian $1: 245 MB"
    set_up_apt "$1" "$place"
    apt-get "${options[@]}" install --no-install-recommends --download-only -y python3-torch >/dev/null
    for package in "$place"/archives/*.deb; do
        case ${package##*/} in
        libc6_*) dpkg-deb -x "$package" "$place/libc" ;;
        *) dpkg-deb -x "$package" "$place/rest" ;;
        esac
    done
    rm -rf "$place"/{lists,archives}
    write_starter "$place" "python$2" "$(find "$place/libc" -name 'ld-linux-*.so.*' | head -n 1)" "$place/libc" "$name"
    sed -i "2i export PYTHONPATH='$place/rest/usr/lib/python3/dist-packages'\${PYTHONPATH:+:\$PYTHONPATH}" "$root/bin/$name"
    "$root/bin/$name" -c 'import torch' || { say "$name does not start here"; exit 1; }
}

write_starter() { # PLACE NAME LOADER LIBC [STARTER]
    local place=$1 name=$2 loader=$3 libc=$4 starter=$root/bin/${5:-$2} folders
    folders=$(find "$place/rest" ${libc:+"$libc"} -name '*.so.*' -printf '%h\n' | sort -u | paste -s -d :)
    cat >"$starter" <<END
#!/bin/sh
exec '$loader' --argv0 '$place/rest/usr/bin/$name' --library-path '$folders' '$place/rest/usr/bin/$name' "\$@"
END
    chmod +x "$starter"
}

fetch sid 3.14 libffi8
fetch trixie 3.13 libffi8
fetch bullseye 3.9 libffi7
if [ "${1:-}" = --torch ]; then fetch_torch sid 3.14; fi
say "in $root/bin: $(ls "$root/bin" | tr '\n' ' ')"
