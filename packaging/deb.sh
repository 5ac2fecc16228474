#!/usr/bin/env bash
# Builds dist/hegmd_VERSION_ARCH.deb; `make deb` calls it, after `make man completions`. Needs dpkg-deb and nothing else
# of Debian's packaging tools: the package is what install.sh stages for PREFIX=/usr, and the few files of packaging/deb.
#
# It brings its own libraries and runs them with the interpreter of the distribution, so it fits the distribution (the
# minor version of its Python) on which it was built. SOURCE_DATE_EPOCH, by default the time of the last commit, becomes
# the time of every file in it: the same sources give the same package. DEBFULLNAME and DEBEMAIL name who built it, and
# DPKG_DEB_COMPRESSOR_TYPE, by default xz, says how it is compressed, as for Debian's own tools.
set -euo pipefail
umask 022

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(dirname "$here")
export PYTHON=${PYTHON:-/usr/bin/python3}

fail() {
    echo "deb: $*" >&2
    exit 1
}

command -v dpkg-deb >/dev/null || fail "dpkg-deb is not installed; this works on Debian and its relatives"
case $(readlink -f "$PYTHON") in
/usr/bin/*) ;;
*) fail "$PYTHON is not of the distribution: no package could be named that brings it to another machine" ;;
esac
: "${SOURCE_DATE_EPOCH:=$(git -C "$source" log -1 --format=%ct 2>/dev/null || stat -c %Y "$source/pyproject.toml")}"
export SOURCE_DATE_EPOCH

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/root
mkdir -m 0755 "$root"
DESTDIR=$root PREFIX=/usr SYSCONFDIR=/etc "$here/install.sh"
rm "$root/usr/lib/hegm/installed-files" # dpkg has its own list

# Debian's zsh looks for the completions of packages elsewhere than zsh's own sources say.
if [ -d "$root/usr/share/zsh/site-functions" ]; then
    mv "$root/usr/share/zsh/site-functions" "$root/usr/share/zsh/vendor-completions"
fi

# ---- what a package has besides -------------------------------------------------------------------------------------

# 0.2.0rc1 comes before 0.2.0; in Debian's order that needs a tilde.
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$source/hegmd/__init__.py" | sed -E 's/\.?(a|b|rc|dev)([0-9]*)$/~\1\2/')
[ -n "$version" ] || fail "hegmd/__init__.py names no version"
maintainer="${DEBFULLNAME:-hegmd developers} <${DEBEMAIL:-hegmd@localhost}>"

documentation=$root/usr/share/doc/hegmd
install -D -m 0644 "$here/deb/copyright" "$documentation/copyright"
for file in README.md CHANGELOG.md docs/protocol.md; do
    if [ -e "$source/$file" ]; then
        gzip -9n <"$source/$file" >"$documentation/$(basename "$file").gz"
    fi
done
printf 'hegmd (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.gz beside this file.\n\n -- %s  %s\n' \
    "$version" "$maintainer" "$(date --utc --rfc-email --date "@$SOURCE_DATE_EPOCH")" |
    gzip -9n >"$documentation/changelog.gz"
install -D -m 0644 "$here/deb/lintian-overrides" "$root/usr/share/lintian/overrides/hegmd"
mkdir "$root/DEBIAN"
for script in postinst prerm postrm; do
    install -m 0755 "$here/deb/$script" "$root/DEBIAN/$script"
done
(cd "$root" && find etc -type f -printf '/%p\n' | LC_ALL=C sort) >"$root/DEBIAN/conffiles"

# ---- control --------------------------------------------------------------------------------------------------------

architecture=$(dpkg --print-architecture)
read -r minor next < <("$PYTHON" -I -c 'import sys; a, b = sys.version_info[:2]; print(f"{a}.{b} {a}.{b + 1}")')
# The libraries' own compiled code asks for no more of the C library than the symbol versions it names.
glibc=$(find "$root/usr/lib/hegm" -name '*.so' -exec grep -aoh 'GLIBC_2\.[0-9]*' {} + | sort -uV | tail -n 1)
# Counted as dpkg-gencontrol does. du also counts directories, whose size on a disk depends on what they once had in them.
size_kib=$(find "$root" -path "$root/DEBIAN" -prune -o -printf '%y %s\n' |
    awk '{ kib += $1 ~ /[fl]/ ? int(($2 + 1023) / 1024) : 1 } END { print kib }')
sed -e "s/@VERSION@/$version/" -e "s|@MAINTAINER@|$maintainer|" -e "s/@ARCHITECTURE@/$architecture/" \
    -e "s/@MINOR@/$minor/" -e "s/@NEXT@/$next/" \
    -e "s/@GLIBC@/${glibc#GLIBC_}/" -e "s/@SIZE_KIB@/$size_kib/" \
    "$here/deb/control" >"$root/DEBIAN/control"
if [ -z "$glibc" ]; then sed -i 's/, libc6 (>= )//' "$root/DEBIAN/control"; fi
(cd "$root" && find . -type f -not -path './DEBIAN/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) \
    >"$root/DEBIAN/md5sums"

find "$root" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
mkdir -p "$source/dist"
package=$source/dist/hegmd_${version}_$architecture.deb
dpkg-deb --root-owner-group -Z"${DPKG_DEB_COMPRESSOR_TYPE:-xz}" --build "$root" "$package" >/dev/null
echo "$package"
