#!/usr/bin/env bash
# Makes the images that the clusters of the tests start from, once, without a registry, as OCI archives in the cache:
#
#   base.tar   what a Containerfile builds on (buildah bud --build-arg BASE=oci-archive:FOLDER/base.tar): the C and C++
#              libraries of this machine's Debian, so that programs built here run there, and certificates
#   tools.tar  localhost/tools: busybox on top, for test pods, and for pods that only hold a network
#
# The last line that it prints is their folder. Takes root, mmdebstrap and buildah.
set -euo pipefail
cd "$(dirname "$0")"

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/images
. /etc/os-release
version=$VERSION_CODENAME-$(sha256sum < images.sh | cut -c 1-16)

main() {
    mkdir -p "$cache"
    # Whoever comes second waits, and finds the work done.
    exec 9> "$cache/lock"
    flock 9
    if [ ! -d "$cache/$version" ]; then
        echo "making the images of the tests' clusters (once)" >&2
        rm -rf "$cache/unfinished"
        mkdir "$cache/unfinished"
        make_images "$cache/unfinished"
        mv "$cache/unfinished" "$cache/$version"
    fi
    echo "$cache/$version"
}

# make_images FOLDER
make_images() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT

    # No package's own script runs, so the bundle of certificates is put together here.
    mmdebstrap --quiet --variant=extract --include=libc6,libstdc++6,libgcc-s1,ca-certificates \
        --customize-hook='cat "$1"/usr/share/ca-certificates/mozilla/*.crt > "$1/etc/ssl/certs/ca-certificates.crt"' \
        --customize-hook='rm -rf "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale "$1"/var/lib/apt "$1"/var/cache' \
        "$VERSION_CODENAME" "$work/base-root.tar"
    image "$1/base.tar" scratch "$work/base-root.tar"

    mmdebstrap --quiet --variant=extract --include=busybox "$VERSION_CODENAME" "$work/busybox-root.tar"
    tar -C "$work" -xf "$work/busybox-root.tar" ./bin/busybox
    image "$1/tools.tar" "oci-archive:$1/base.tar" "$work/bin/busybox" /bin/busybox \
        --cmd '["/bin/busybox", "sleep", "infinity"]'
}

# image ARCHIVE FROM ADDED [AT [CONFIG...]]: names the image by the archive's name.
image() {
    local archive=$1 from=$2 added=$3 at=${4:-/} container
    container=$(with_storage from --quiet "$from")
    with_storage add --quiet "$container" "$added" "$at" > /dev/null
    [ $# -lt 5 ] || with_storage config "${@:5}" "$container"
    with_storage commit --quiet "$container" "oci-archive:$archive:localhost/$(basename "$archive" .tar):latest" > /dev/null
}

# Not the user's own images.
with_storage() {
    buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"
}

main
