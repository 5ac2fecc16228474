#!/usr/bin/env bash
# Installs hegmd and hegmctl with an environment of their own; `make install` calls it, after `make man completions`.
#
#   PREFIX      where, by default /usr/local
#   DESTDIR     a staging directory before every path; then the running system is left alone
#   SYSCONFDIR  where the configuration lies, by default /etc
#   PYTHON      the interpreter to run with, by default /usr/bin/python3
#
# It can be run again over an older installation. What it put outside of PREFIX/lib/hegm is listed in
# PREFIX/lib/hegm/installed-files, which is what uninstall.sh takes away.
set -euo pipefail
umask 022

prefix=${PREFIX:-/usr/local}
root=${DESTDIR:-}
sysconfdir=${SYSCONFDIR:-/etc}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(dirname "$here")
place=$prefix/lib/hegm
list=$root$place/installed-files

fail() {
    echo "install: $*" >&2
    exit 1
}

case $prefix$sysconfdir in
/*) ;;
*) fail "PREFIX must be an absolute path, not '$prefix'" ;;
esac
# A shebang line, which names the interpreter under PREFIX, ends at the first blank.
case $prefix in *[[:space:]]*) fail "PREFIX must not hold a blank: '$prefix'" ;; esac
if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
    fail "this changes the system, so it needs root: sudo make install (or stage it with DESTDIR=)"
fi

# systemd and the tools beside it look into /usr/lib and /usr/local/lib; for another PREFIX only /etc is left.
case $prefix in
/usr | /usr/local) units=$prefix/lib/systemd drop_ins=$prefix/lib ;;
*) units=/etc/systemd drop_ins=/etc ;;
esac

if [ -n "$root" ]; then mkdir -p "$root"; fi

# ---- the programs ---------------------------------------------------------------------------------------------------

# Made beside the old tree and swapped in, so that a failing build leaves a working installation as it was.
made=$(mktemp -d)
trap 'rm -rf "$made" "$root$place.new"' EXIT
"$here/tree.sh" "$made" "$place"
files=$made$place/installed-files
: >"$files"

# Directories made on the way are listed too, with a slash at the end: those that were there before are not ours to take
# away, empty or not.
make_directory() { # DIRECTORY
    [ -n "$1" ] && [ ! -d "$root$1" ] || return 0
    make_directory "${1%/*}"
    mkdir "$root$1"
    echo "$1/" >>"$files"
}

put() { # MODE FILE TARGET
    make_directory "${3%/*}"
    install -m "$1" "$2" "$root$3"
    echo "$3" >>"$files"
}

install -D -m 0644 "$source/contrib/hegmd.toml" "$made$place/share/hegmd.toml"
install -D -m 0755 "$source/contrib/criu/install.sh" "$made$place/share/get-criu"
for program in hegmd hegmctl hegm-launcher hegm-ctrl; do
    make_directory "$prefix/bin"
    ln -sfn "../lib/hegm/bin/$program" "$root$prefix/bin/$program"
    echo "$prefix/bin/$program" >>"$files"
done

# ---- systemd --------------------------------------------------------------------------------------------------------

put_unit() { # FILE TARGET: the units name the programs by the path of a package
    sed "s#/usr/bin/hegm#$prefix/bin/hegm#g" "$1" >"$made/unit"
    put 0644 "$made/unit" "$2"
}
for unit in hegmd.service hegmd.socket; do
    put_unit "$source/systemd/$unit" "$units/system/$unit"
    put_unit "$source/systemd/user/$unit" "$units/user/$unit"
done
put 0644 "$source/systemd/hegm.sysusers" "$drop_ins/sysusers.d/hegm.conf"
put 0644 "$source/systemd/hegm.tmpfiles" "$drop_ins/tmpfiles.d/hegm.conf"

# ---- manual pages, completions, configuration -----------------------------------------------------------------------

for page in "$source"/build/man/*.[158]; do
    [ -e "$page" ] || continue
    gzip -9n <"$page" >"$made/page"
    put 0644 "$made/page" "$prefix/share/man/man${page##*.}/$(basename "$page").gz"
done
for completion in "$source"/build/completions/*; do
    case $completion in
    *.bash) put 0644 "$completion" "$prefix/share/bash-completion/completions/$(basename "$completion" .bash)" ;;
    *.fish) put 0644 "$completion" "$prefix/share/fish/vendor_completions.d/$(basename "$completion")" ;;
    */_*) put 0644 "$completion" "$prefix/share/zsh/site-functions/$(basename "$completion")" ;;
    esac
done

configuration=$sysconfdir/hegm/hegmd.toml
if [ ! -e "$root$configuration" ]; then
    make_directory "$sysconfdir"
    install -D -m 0644 "$source/contrib/hegmd.toml" "$root$configuration"
fi

# ---- the swap, and what an older installation had and this one has not ------------------------------------------------

stale=""
if [ -e "$list" ]; then
    stale=$(sort "$list" | comm -23 - <(sort "$files"))
    grep '/$' <<<"$stale" >>"$files" || true # directories that the older one made
fi
make_directory "$prefix/lib"
rm -rf "$root$place.new"
mv -T "$made$place" "$root$place.new"
rm -rf "$root$place"
mv -T "$root$place.new" "$root$place"
while read -r file; do
    case $file in
    "") ;;
    */) ;;
    *) rm -f "$root$file" ;;
    esac
done <<<"$stale"

if [ -n "$root" ]; then exit 0; fi

# ---- the running system ---------------------------------------------------------------------------------------------

if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers "$drop_ins/sysusers.d/hegm.conf"
elif ! getent group hegm >/dev/null; then
    groupadd --system hegm
fi
if [ -d /run/systemd/system ]; then
    systemd-tmpfiles --create "$drop_ins/tmpfiles.d/hegm.conf"
    systemctl daemon-reload
    systemctl enable --quiet hegmd.socket
    systemctl start hegmd.socket
    systemctl try-restart hegmd.service
    echo "hegmd is installed and starts with its first client; try: hegmctl doctor"
else
    echo "hegmd is installed; systemd does not run here, so start it by hand: $prefix/bin/hegmd"
fi
