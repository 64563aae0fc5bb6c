#!/usr/bin/env bash
# Builds the images from source with docker, podman or buildah, whichever is there, and names them as the chart does:
#
#   images/build.sh [operator|node-agent|node-agent-cuda]...   [default: operator node-agent]
#
#   REGISTRY   what names begin with [default: ghcr.io/prima-dev]
#   TAG        the version [default: the chart's appVersion]
#   PLATFORMS  [default: this machine's] for example linux/amd64,linux/arm64: each is compiled on a processor of its kind,
#              or under QEMU (binfmt_misc), which takes hours. `docker buildx create --append` adds an arm64 machine.
#              With several, docker pushes the result, since it cannot keep it; podman and buildah make a manifest.
set -euo pipefail
cd "$(dirname "$0")/.."

registry=${REGISTRY:-ghcr.io/prima-dev}
tag=${TAG:-$(sed -n 's/^appVersion: "\(.*\)"$/\1/p' charts/prima/Chart.yaml)}
platforms=${PLATFORMS:-}

main() {
    local image arguments
    [ $# -gt 0 ] || set -- operator node-agent
    for image in "$@"; do
        # Stages by name, though these are the defaults: buildah sees what a stage is made of only where it is told.
        arguments=(BINARIES=compiled)
        case $image in
            operator) arguments+=(BASE=runtime) ;;
            node-agent) arguments+=(BUILDER=rust BASE=runtime) ;;
            node-agent-cuda) arguments+=(BUILDER=builder-cuda BASE=runtime-cuda FEATURES=cuda) ;;
            *) echo "no image is called $image" >&2; exit 1 ;;
        esac
        build "$registry/prima-$image:$tag" --file "images/${image%-cuda}.Containerfile" "${arguments[@]/#/--build-arg=}" .
    done
}

# build NAME ARGUMENT...
build() {
    local name=$1
    shift
    local target=(--tag "$name")
    case $(builder) in
        docker)
            [[ $platforms == *,* ]] && target+=(--push)
            docker buildx build ${platforms:+--platform "$platforms"} "${target[@]}" "$@"
            ;;
        podman | buildah)
            [[ $platforms == *,* ]] && target=(--manifest "$name")
            "$(builder)" build ${platforms:+--platform "$platforms"} --format oci "${target[@]}" "$@"
            ;;
    esac
}

# The first that works: a docker without its daemon does not.
builder() {
    local program
    for program in docker podman buildah; do
        if "$program" info > /dev/null 2>&1; then
            echo "$program"
            return
        fi
    done
    echo "images are built with docker, podman or buildah: install one" >&2
    exit 1
}

main "$@"
