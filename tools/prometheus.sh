#!/usr/bin/env bash
# Unpacks the distribution's prometheus and promtool below build/prometheus, for the tests of contrib/prometheus and
# contrib/grafana. Installs nothing and needs no root. apt checks what it fetches against the archive's signature.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
place=build/prometheus

say() { echo "prometheus: $*" >&2; }

if [ -x "$place/bin/promtool" ]; then exit 0; fi
for needed in apt-get dpkg-deb; do
    command -v "$needed" >/dev/null || { say "there is no $needed here; its tests are skipped"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=(-q -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::http::Timeout=10 -o Acquire::Retries=1)
download() { (cd "$work" && apt-get "${options[@]}" "$@" download prometheus >/dev/null 2>&1); }

if ! download; then
    # The lists of this machine are old or missing. Lists of our own need no root.
    mkdir -p "$work"/lists/partial "$work"/archives/partial
    own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work")
    apt-get "${options[@]}" "${own[@]}" update >/dev/null 2>&1 || true
    download "${own[@]}" || { say "the package cannot be fetched; its tests are skipped"; exit 1; }
fi
dpkg-deb -x "$work"/prometheus_*.deb "$work/root"
mkdir -p "$work/new/bin"
mv "$work/root/usr/bin/prometheus" "$work/root/usr/bin/promtool" "$work/new/bin/"
"$work/new/bin/promtool" --version >/dev/null
mkdir -p build
rm -rf "$place"
mv "$work/new" "$place"
say "$("$place/bin/promtool" --version 2>&1 | sed -n '1s/ (.*//p') is in $place/bin"
