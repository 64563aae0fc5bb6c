#!/usr/bin/env bash
# Builds the images of the operator and the agents, with and without Vulkan, for amd64 and arm64, into one archive that every node can
# import: target/images/prima.tar.
#
#   REGISTRY       what names begin with [default: ghcr.io/prima-dev]
#   TAG            the version [default: the chart's appVersion]
#   ARCHITECTURES  [default: amd64 arm64]
#   RUST_IMAGE     what to compile in [default: Containerfile's, by its tag]; docker.io/library/rust@sha256:... never changes
#
# Beside it lie lists of what each image has, and of what it was compiled in (SBOM, CycloneDX), one for each processor.
#
# Docker (with buildx), podman or buildah compiles in a container of this machine's processor, with compilers for the other one: nothing
# is emulated. Files come out, and images/assemble.py makes images of them, so that it is the same whoever compiled. Takes Python 3.11 or later.
set -euo pipefail
cd "$(dirname "$0")/.."

registry=${REGISTRY:-ghcr.io/prima-dev}
tag=${TAG:-$(sed -n 's/^appVersion: "\(.*\)"$/\1/p' charts/prima/Chart.yaml)}
read -ra architectures <<< "${ARCHITECTURES:-amd64 arm64}"
rust=${RUST_IMAGE:-$(sed -n 's/^ARG RUST_IMAGE=//p' images/Containerfile)}
files=target/images

main() {
    expect_python
    rm -rf "$files"
    mkdir -p "$files"
    build --file images/Containerfile --build-arg "RUST_IMAGE=$rust" --build-arg "ARCHITECTURES=${architectures[*]}" \
        --output "type=local,dest=$files" .
    local architecture platforms=()
    for architecture in "${architectures[@]}"; do
        platforms+=(--platform "$architecture=$files/$architecture")
    done
    python3 images/assemble.py --output "$files/prima.tar" "${platforms[@]}" \
        --name "$registry/prima-operator:$tag" --program prima --root root.tar --title "prima operator" \
        --name "$registry/prima-node-agent:$tag" --program prima-node-agent --root root.tar --title "prima node-agent" \
        --name "$registry/prima-node-agent-gpu:$tag" --program prima-node-agent --root root-gpu.tar --title "prima node-agent, with Vulkan" \
        --label org.opencontainers.image.source=https://github.com/prima-dev/prima \
        --label org.opencontainers.image.licenses=Apache-2.0 \
        --label "org.opencontainers.image.version=$tag"
    # What is in each image, for whoever looks for known vulnerabilities.
    for architecture in "${architectures[@]}"; do
        list prima-operator prima root.tar "$architecture"
        list prima-node-agent prima-node-agent root.tar "$architecture"
        list prima-node-agent-gpu prima-node-agent root-gpu.tar "$architecture"
    done
    echo "$files/prima.tar"
}

# Only the last steps take it, half an hour later.
expect_python() {
    local found
    if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
        return
    fi
    found=$(python3 --version 2> /dev/null) || found="no python3"
    echo "images are put together by Python 3.11 or later, and there is $found: install a newer one" >&2
    exit 1
}

# list IMAGE PROGRAM ROOT ARCHITECTURE
list() {
    python3 images/sbom.py --program "$2" --version "$tag" --platform "$4" --compiled-in "$rust" --root "$files/$4/$3" > "$files/$1-$4.cdx.json"
}

# build ARGUMENT...: with the first engine that works; a docker without its daemon does not, and one without buildx neither.
build() {
    local engine
    for engine in "docker buildx" podman buildah; do
        if { "${engine%% *}" info && $engine version; } > /dev/null 2>&1; then
            $engine build "$@"
            return
        fi
    done
    echo "images are compiled in a container of docker (with buildx), podman or buildah: install one" >&2
    exit 1
}

main "$@"
