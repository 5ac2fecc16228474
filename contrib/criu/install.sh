#!/usr/bin/env bash
# Gets a CRIU that works on today's kernels: 4.1 or newer.
#
#   contrib/criu/install.sh                  install it (root)
#   contrib/criu/install.sh --prefix DIR     unpack one below DIR whatever the distribution has; DIR/bin/criu starts it
#   contrib/criu/install.sh --download DIR   only fetch the packages, for a machine without a network
#   contrib/criu/install.sh --from DIR       unpack those instead of fetching any
#   --suite NAME                             Debian's release to fetch from (sid; trixie has 4.1.1)
#
# If the distribution's own criu is 4.1 or newer, apt installs it. Debian 12 has 3.17, which does not start on newer
# kernels (vDSO), and later releases' packages need a newer C library. So theirs are unpacked beside the system, with all
# that they depend on, into /usr/local/lib/hegm-criu, where hegmd looks too, and are started by that release's own dynamic
# loader: nothing of the system is touched. Debian's sid is asked first because its 4.2 knows the guard pages that stacks
# have since glibc 2.42. The unpacked folder can be moved, also to another machine.
#
# apt checks what it fetches against the archive's signature, with the keyring of this machine; --download writes the
# packages' checksums beside them, and --from refuses what does not have them.
set -euo pipefail

mirror=${HEGM_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
least=4.1
place=/usr/local/lib/hegm-criu
suite=sid prefix="" from="" download=""

say() { echo "criu: $*" >&2; }

fail() {
    say "$@"
    exit 1
}

usage() { sed -n '2,/^set -e/s/^# \{0,1\}//p' "$0" | sed '$d'; }

while [ $# -gt 0 ]; do
    case $1 in
    --prefix | --from | --download | --suite)
        [ $# -ge 2 ] || fail "$1 needs a value"
        declare "${1#--}=$2"
        shift 2
        ;;
    -h | --help) usage; exit ;;
    *) fail "unknown argument '$1'; see --help" ;;
    esac
done

for needed in dpkg dpkg-deb sha256sum; do
    command -v "$needed" >/dev/null || fail "there is no $needed here; this works on Debian and Ubuntu"
done
for given in prefix from download; do
    if [ -n "${!given}" ]; then declare "$given=$(realpath -m "${!given}")"; fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ---- the distribution's own -----------------------------------------------------------------------------------------

offered() { LC_ALL=C apt-cache policy criu 2>/dev/null | sed -n 's/^ *Candidate: //p'; }

install_from_distribution() {
    local version
    version=$(offered)
    if [ -z "$version" ] || [ "$version" = "(none)" ] || ! dpkg --compare-versions "$version" ge "$least"; then
        say "this distribution offers criu ${version:-not at all}; $least is needed"
        return 1
    fi
    say "installing criu $version of this distribution"
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends criu >/dev/null
    criu --version >&2
}

# ---- a later release's --------------------------------------------------------------------------------------------

fetch() { # FOLDER
    command -v apt-get >/dev/null || fail "there is no apt-get here; fetch elsewhere with --download and use --from"
    [ -r "$keyring" ] || fail "there is no $keyring; install debian-archive-keyring, or use --from"
    mkdir -p "$work"/lists/partial "$work"/archives/partial
    echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/sources.list"
    : >"$work/status"
    local options=(-q -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work"
        -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::http::Timeout=10 -o Acquire::Retries=1)
    apt-get "${options[@]}" update >/dev/null || fail "Debian's $suite cannot be read from $mirror"
    # To apt nothing is installed here, so it names every package that criu needs, the C library too.
    apt-get "${options[@]}" install -y --no-install-recommends --download-only criu >/dev/null ||
        fail "the packages of $suite cannot be fetched from $mirror"
    mkdir -p "$1"
    mv "$work"/archives/*.deb "$1"
    (cd "$1" && sha256sum ./*.deb >SHA256SUMS)
}

check_sums() { # FOLDER
    [ -f "$1/SHA256SUMS" ] || fail "$1 has no SHA256SUMS; --download makes a folder that has"
    (cd "$1" && sha256sum --quiet --strict --check SHA256SUMS >&2) || fail "the packages in $1 are not those that were fetched"
}

unpack() { # FOLDER TARGET
    local archives=$1 target=$2 new=$work/new package
    mkdir -p "$new/root" "$new/bin"
    # Only packages from the list of checksums: ignore other files in that folder.
    while read -r _ package; do
        case ${package##*/} in
        gcc-*-base_* | libc-gconv-modules-extra_*) ;;
        *) dpkg-deb -x "$archives/${package##*/}" "$new/root" ;;
        esac
    done <"$archives/SHA256SUMS"
    rm -rf "$new"/root/usr/share/{doc,man,locale,lintian,bug,doc-base} "$new"/root/{etc,var} "$new"/root/usr/lib/*/gconv
    write_launcher "$new"
    "$new/bin/criu" --version >/dev/null || fail "what was unpacked does not start here"
    mkdir -p "$(dirname "$target")"
    rm -rf "$target.old"
    if [ -e "$target" ]; then mv "$target" "$target.old"; fi
    mv "$new" "$target"
    rm -rf "$target.old"
    say "$("$target/bin/criu" --version | sed -n 's/^Version: /version /p') is in $target/bin/criu"
}

write_launcher() { # PLACE
    local loader folders
    loader=$(cd "$1" && find root -name 'ld-linux-*.so.*' | sort | head -n 1)
    [ -n "$loader" ] || fail "there is no dynamic loader among the packages"
    # shellcheck disable=SC2016 # $here is the launcher's own
    folders=$(cd "$1" && find root -name '*.so.*' -printf '$here/%h\n' | sort -u | paste -s -d :)
    cat >"$1/bin/criu" <<END
#!/bin/sh
# CRIU of a later Debian, with the libraries and the dynamic loader that belong to it.
set -e
here=\$(dirname "\$(dirname "\$(readlink -f "\$0")")")
exec "\$here/$loader" --argv0 criu --library-path "$folders" "\$here/root/usr/sbin/criu" "\$@"
END
    chmod 0755 "$1/bin/criu"
}

# ---- which of them --------------------------------------------------------------------------------------------------

if [ -n "$download" ]; then
    fetch "$download"
    say "$(find "$download" -name '*.deb' | wc -l) packages are in $download; carry it and give it to --from"
    exit
fi
if [ -z "$prefix" ]; then
    [ "$(id -u)" = 0 ] || fail "this needs root; or unpack one for yourself with --prefix DIR"
    if [ -z "$from" ] && command -v apt-cache >/dev/null && install_from_distribution; then exit; fi
    prefix=$place
fi
if [ -z "$from" ]; then
    from=$work/packages
    fetch "$from"
fi
check_sums "$from"
unpack "$from" "$prefix"
