#!/usr/bin/env bash
# Takes away what install.sh put there; `make uninstall` calls it. PREFIX, DESTDIR and SYSCONFDIR as there.
#
# Nothing stays but a configuration that was edited. It refuses nothing and can be run again: what is gone already is
# gone, and a machine without hegmd is left as it is.
set -euo pipefail

prefix=${PREFIX:-/usr/local}
root=${DESTDIR:-}
sysconfdir=${SYSCONFDIR:-/etc}
place=$prefix/lib/hegm
list=$root$place/installed-files

if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
    echo "uninstall: this changes the system, so it needs root: sudo make uninstall" >&2
    exit 1
fi

# The .deb and this installation can both be there; group and state are the package's then.
packaged=""
if [ -z "$root" ] && [ "$prefix" != /usr ] && [ -e /usr/lib/hegm/pyvenv.cfg ]; then packaged=yes; fi
running=""
if [ -z "$root" ] && [ -d /run/systemd/system ]; then running=yes; fi

if [ -n "$running" ] && [ -z "$packaged" ] && [ -e "$list" ]; then
    systemctl disable --now --quiet hegmd.socket hegmd.service 2>/dev/null || true
fi

configuration=$root$sysconfdir/hegm/hegmd.toml
if [ -e "$configuration" ]; then
    if cmp -s "$configuration" "$root$place/share/hegmd.toml"; then
        rm -f "$configuration"
        rmdir "$root$sysconfdir/hegm" 2>/dev/null || echo "uninstall: $sysconfdir/hegm is not empty and stays"
    else
        echo "uninstall: $sysconfdir/hegm/hegmd.toml was edited and stays; rm -r $sysconfdir/hegm takes it away"
    fi
fi

if [ -e "$list" ]; then
    listed=$(sort --reverse "$list") # what is in a directory comes before the directory
    rm -rf "$root$place"
    while read -r file; do
        case $file in
        */) rmdir "$root$file" 2>/dev/null || true ;; # not empty: somebody else's by now
        *) rm -f "$root$file" ;;
        esac
    done <<<"$listed"
fi
rm -rf "$root$place" "$root$place.new"

if [ -n "$running" ]; then systemctl daemon-reload; fi
if [ -z "$packaged" ]; then
    rm -rf "$root/var/lib/hegm" "$root/var/log/hegm" "$root/run/hegm"
    if [ -z "$root" ] && getent group hegm >/dev/null; then groupdel hegm; fi
fi
for drop_in in "$root"/etc/systemd/system/hegmd.{service,socket}.d; do
    if [ -d "$drop_in" ]; then echo "uninstall: ${drop_in#"$root"} holds changes of yours and stays"; fi
done
