#!/usr/bin/env bash
# Fetches the definitions of ServiceMonitor, PrometheusRule and HTTPRoute in the versions of go.mod, once, into a folder of the cache
# that is named by what it was made from; go compares what it gets with go.sum. The last line that it prints is that folder.
set -euo pipefail
cd "$(dirname "$0")"
. ../once.sh

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/definitions
version=$(contents)

main() {
    once "$cache/$version" fetch
    echo "$cache/$version"
}

# fetch FOLDER
fetch() {
    command -v go > /dev/null || { echo "other projects' definitions are fetched by Go: install Go 1.26" >&2; exit 1; }
    echo "fetching other projects' definitions (once, 9 MB)" >&2
    mkdir "$1"
    go mod download >&2
    copy "$1" github.com/prometheus-operator/prometheus-operator example/prometheus-operator-crd \
        monitoring.coreos.com_servicemonitors.yaml monitoring.coreos.com_prometheusrules.yaml
    copy "$1" sigs.k8s.io/gateway-api config/crd/standard gateway.networking.k8s.io_httproutes.yaml
}

# copy TO MODULE FOLDER FILE...
copy() {
    local module folder=$3 file
    module=$(go list -m -f '{{.Dir}}' "$2")
    for file in "${@:4}"; do
        cp "$module/$folder/$file" "$1"
    done
}

main
