#!/usr/bin/env bash
# Builds the Kubernetes, etcd, Helm, kubeconform, kine and CoreDNS of the versions in go.mod and beside/go.mod, once (9
# minutes on two cores, 2 GB to download), into a folder of the cache that is named by what it was built from. The last line that it
# prints is the folder of the programs.
set -euo pipefail
cd "$(dirname "$0")"

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/control-plane
version=$(cat go.mod go.sum beside/go.mod beside/go.sum build.sh | sha256sum | cut -c 1-16)

main() {
    mkdir -p "$cache"
    # Whoever comes second waits, and finds the work done.
    exec 9> "$cache/lock"
    flock 9
    if [ ! -d "$cache/$version" ]; then
        command -v go > /dev/null || { echo "the tests' Kubernetes is built from its source: install Go 1.26" >&2; exit 1; }
        rm -rf "$cache/unfinished"
        build "$cache/unfinished/bin"
        mv "$cache/unfinished" "$cache/$version"
    fi
    echo "$cache/$version/bin"
}

# build FOLDER
build() {
    # A server that was not told its version calls itself v0.0.0, and Helm refuses charts on it.
    local kubernetes version_package=k8s.io/component-base/version major minor
    kubernetes=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
    IFS=. read -r major minor _ <<< "${kubernetes#v}"
    local flags="-s -w -X $version_package.gitVersion=$kubernetes -X $version_package.gitMajor=$major -X $version_package.gitMinor=$minor"

    echo "building Kubernetes $kubernetes and what the tests need beside it (once, takes some minutes)" >&2
    CGO_ENABLED=0 GOBIN=$1 install_tools "$flags"
    mv "$1/server" "$1/etcd"
    # SQLite, in kine, is C.
    (cd beside && CGO_ENABLED=1 GOBIN=$1 install_tools "-s -w")
}

# install_tools LINKER_FLAGS: says how far it is, since this is thousands of packages.
install_tools() {
    go install -v -trimpath -ldflags "$1" tool 2>&1 |
        awk '/^[[:alnum:]_.\/~-]+$/ { if (++packages % 250 == 0) print "  " packages " packages compiled"; fflush(); next } { print }' >&2
}

main
