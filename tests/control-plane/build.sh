#!/usr/bin/env bash
# Builds programs of the tests' clusters in the versions of go.mod, once, into a folder of the cache that is named by what it was
# built from. The last line that it prints is the folder of the programs.
#
#   build.sh api-server    kube-apiserver and kube-controller-manager, what they keep objects in (etcd, and kine as k3s has it),
#                          and who talks to them: kubectl, Helm, kubeconform
#   build.sh nodes         what a cluster has beside that: kubelet, kube-proxy, kube-scheduler, CoreDNS
set -euo pipefail
cd "$(dirname "$0")"
. ../once.sh

group=$1
cache=${PRIMA_CACHE:-$HOME/.cache/prima}/control-plane
version=$group-$(contents)

case $group in
    api-server)
        packages=(k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kubectl} go.etcd.io/etcd/server/v3
            github.com/k3s-io/kine helm.sh/helm/v4/cmd/helm github.com/yannh/kubeconform/cmd/kubeconform)
        ;;
    nodes) packages=(k8s.io/kubernetes/cmd/{kubelet,kube-proxy,kube-scheduler} ./coredns) ;;
    *) echo "build.sh: expected api-server or nodes, found $group" >&2; exit 1 ;;
esac

main() {
    once "$cache/$version" build
    echo "$cache/$version/bin"
}

# build FOLDER
build() {
    command -v go > /dev/null || { echo "the tests' Kubernetes is built from its source: install Go 1.26" >&2; exit 1; }
    # A server that was not told its version calls itself v0.0.0, and Helm refuses charts on it.
    local kubernetes version_package=k8s.io/component-base/version major minor
    kubernetes=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
    IFS=. read -r major minor _ <<< "${kubernetes#v}"
    local flags="-s -w -X $version_package.gitVersion=$kubernetes -X $version_package.gitMajor=$major -X $version_package.gitMinor=$minor"

    echo "building the tests' Kubernetes $kubernetes: $group (once, takes some minutes)" >&2
    # All of it with cgo, as SQLite in kine takes it: what they share is compiled once. The compiler is told to collect its garbage
    # less often and to leave out what debuggers want. It says how far it is, since these are thousands of packages.
    CGO_ENABLED=1 CGO_CFLAGS=-O1 GOGC=400 GOBIN=$1/bin \
        go install -v -trimpath -gcflags=all=-dwarf=false -ldflags "$flags" "${packages[@]}" 2>&1 |
        awk '/^[[:alnum:]_.\/~-]+$/ { if (++packages % 250 == 0) print "  " packages " packages compiled"; fflush(); next } { print }' >&2
    [ "$group" != api-server ] || mv "$1/bin/server" "$1/bin/etcd"
}

main
