#!/usr/bin/env bash
# Fetches Prometheus and promtool, once, from Debian's package, which is not installed: a service of its own would start.
# The last line that it prints is their folder.
set -euo pipefail
cd "$(dirname "$0")"
. ../once.sh

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/monitoring
. /etc/os-release
version=${VERSION_CODENAME:-debian}-$(sha256sum < fetch.sh | cut -c 1-16)

main() {
    once "$cache/$version" fetch
    echo "$cache/$version/root/usr/bin"
}

# fetch FOLDER
fetch() {
    echo "fetching Debian's Prometheus (once, 20 MB)" >&2
    mkdir "$1"
    (cd "$1" && unpack) >&2
}

unpack() {
    apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }
    dpkg-deb --extract prometheus_*.deb root
    rm prometheus_*.deb
}

main
