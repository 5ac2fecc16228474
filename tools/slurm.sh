#!/usr/bin/env bash
# Unpacks the distribution's Slurm (slurmctld, slurmd, its clients and its headers) below build/slurm, for the tests of
# contrib/slurm. Installs nothing and needs no root. apt checks what it fetches against the archive's signature.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
place=build/slurm
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins libslurm-dev)

say() { echo "slurm: $*" >&2; }

if [ -x "$place/usr/sbin/slurmctld-wlm" ] && [ -e "$place/usr/include/slurm/spank.h" ]; then exit 0; fi
for needed in apt-get apt-cache dpkg-deb; do
    command -v "$needed" >/dev/null || { say "there is no $needed here; its tests are skipped"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/debs"
options=(-q -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::http::Timeout=10 -o Acquire::Retries=1)

# Packages that are missing on this machine, from apt's simulation; installs nothing.
wanted() {
    apt-get "${options[@]}" "$@" install --simulate --no-install-recommends "${packages[@]}" |
        sed -n 's/^Inst \([^ ]*\).*/\1/p' | grep -v '^\(munge\|ucf\)$'
}
download() { (cd "$work/debs" && wanted "$@" | xargs apt-get "${options[@]}" "$@" download >/dev/null 2>&1); }

if ! download 2>/dev/null; then
    # The lists of this machine are old or missing. Lists of our own need no root.
    mkdir -p "$work"/lists/partial "$work"/archives/partial
    own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work")
    apt-get "${options[@]}" "${own[@]}" update >/dev/null 2>&1 || true
    download "${own[@]}" || { say "the packages cannot be fetched; its tests are skipped"; exit 1; }
fi
for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$work/root"; done
[ -x "$work/root/usr/sbin/slurmctld-wlm" ] || { say "the packages have no slurmctld; its tests are skipped"; exit 1; }
mkdir -p build
rm -rf "$place"
mv "$work/root" "$place"
say "slurmctld and slurmd are in $place/usr/sbin"
