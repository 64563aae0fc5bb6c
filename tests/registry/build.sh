#!/usr/bin/env bash
# Builds the registry that the tests push to, in the version of go.mod, once, into a folder of the cache that is named by what it was
# built from. The last line that it prints is that folder.
set -euo pipefail
cd "$(dirname "$0")"
. ../once.sh

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/registry
version=$(contents)

main() {
    once "$cache/$version" build
    echo "$cache/$version/bin"
}

# build FOLDER
build() {
    command -v go > /dev/null || { echo "the tests' registry is built from its source: install Go 1.26" >&2; exit 1; }
    echo "building the tests' registry (once, 2 CPU minutes)" >&2
    CGO_ENABLED=0 GOGC=400 GOBIN=$1/bin go install -trimpath -gcflags=all=-dwarf=false -ldflags "-s -w" . >&2
}

main
