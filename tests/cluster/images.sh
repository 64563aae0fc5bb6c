#!/usr/bin/env bash
# Makes what the images of the tests' clusters are made of, once, by the scripts that make what ships:
#
#   root.tar        the root file system of prima's images, but of this machine's Debian, so that programs built here run in it
#   root-gpu.tar    the same with Vulkan, for agents on nodes with a GPU
#   tools-root.tar  the same with busybox
#   tools.tar       the image localhost/tools, as an OCI archive: for test pods, and for pods that only hold a network
#
# The last line that it prints is their folder. Takes root, mmdebstrap and Python 3.11.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/once.sh

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/images
. /etc/os-release
# What such images have of Debian.
vulkan=$(sed -n 's/^vulkan=//p' images/compile.sh)
version=$VERSION_CODENAME-$(cat tests/cluster/images.sh images/root.sh images/assemble.py - <<< "$vulkan" | sha256sum | cut -c 1-16)

main() {
    once "$cache/$version" make_images
    echo "$cache/$version"
}

# make_images FOLDER
make_images() {
    echo "making the images of the tests' clusters (once)" >&2
    # What earlier versions of this script made.
    rm -rf "${cache:?}"/*/
    mkdir "$1"
    local architecture
    architecture=$(dpkg --print-architecture)
    images/root.sh "$VERSION_CODENAME" "$architecture" "$1/root.tar"
    images/root.sh "$VERSION_CODENAME" "$architecture" "$1/root-gpu.tar" "$vulkan"
    images/root.sh "$VERSION_CODENAME" "$architecture" "$1/tools-root.tar" busybox
    # An image has one program, which is started without arguments: here a script.
    printf '%s\n' '#!/bin/busybox sh' 'exec /bin/busybox sleep infinity' > "$1/tools"
    python3 images/assemble.py --output "$1/tools.tar" --platform "$architecture=$1" \
        --name localhost/tools:latest --program tools --root tools-root.tar --title tools
}

main
