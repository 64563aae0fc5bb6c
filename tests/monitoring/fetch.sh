#!/usr/bin/env bash
# Fetches Prometheus and promtool, once, from Debian's package, which is not installed: a service of its own would start.
# The last line that it prints is their folder.
set -euo pipefail
cd "$(dirname "$0")"

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/monitoring
. /etc/os-release
version=${VERSION_CODENAME:-debian}-$(sha256sum < fetch.sh | cut -c 1-16)

main() {
    mkdir -p "$cache"
    # Whoever comes second waits, and finds the work done.
    exec 9> "$cache/lock"
    flock 9
    if [ ! -d "$cache/$version" ]; then
        echo "fetching Debian's Prometheus (once, 20 MB)" >&2
        rm -rf "$cache/unfinished"
        mkdir "$cache/unfinished"
        (cd "$cache/unfinished" && fetch) >&2
        mv "$cache/unfinished" "$cache/$version"
    fi
    echo "$cache/$version/root/usr/bin"
}

fetch() {
    apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }
    dpkg-deb --extract prometheus_*.deb root
    rm prometheus_*.deb
}

main
