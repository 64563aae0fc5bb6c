#!/usr/bin/env bash
# Builds the registry that the tests push to, in the version of go.mod, once, into a folder of the cache that is named by what it was
# built from. The last line that it prints is that folder.
set -euo pipefail
cd "$(dirname "$0")"

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/registry
version=$(find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c 1-16)

main() {
    mkdir -p "$cache"
    # Whoever comes second waits, and finds the work done.
    exec 9> "$cache/lock"
    flock 9
    if [ ! -d "$cache/$version" ]; then
        command -v go > /dev/null || { echo "the tests' registry is built from its source: install Go 1.26" >&2; exit 1; }
        echo "building the tests' registry (once, 2 CPU minutes)" >&2
        rm -rf "$cache/unfinished"
        CGO_ENABLED=0 GOGC=400 GOBIN=$cache/unfinished/bin go install -trimpath -gcflags=all=-dwarf=false -ldflags "-s -w" . >&2
        mv "$cache/unfinished" "$cache/$version"
    fi
    echo "$cache/$version/bin"
}

main
