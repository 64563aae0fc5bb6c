#!/usr/bin/env bash
# Compiles both programs for amd64 and arm64, on either of them, without emulation; and makes a root file system for each.
#
#   images/compile.sh FOLDER [amd64|arm64]...   [default: both]
#
# puts into FOLDER/amd64 and FOLDER/arm64 what images/assemble.py takes: prima, prima-node-agent, root.tar, and root-gpu.tar, which has Vulkan,
# too. Runs as root in a Debian with Rust, such as the image of images/Containerfile: it installs compilers there. The root file systems are of
# the same Debian, so that programs and libraries fit together.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
shift
[ $# -gt 0 ] || set -- amd64 arm64
here=$(dpkg --print-architecture)
# The loader and Mesa's drivers; and what NVIDIA's driver, which comes from the node, is opened through.
vulkan=libvulkan1,mesa-vulkan-drivers,libegl1,libgl1,libglx0
. /etc/os-release

main() {
    local architecture packages=(cmake make libclang-dev mmdebstrap) targets=()
    for architecture in "$@"; do
        [ "$architecture" = "$here" ] || packages+=("g++-$(gnu "$architecture" | tr _ -)")
        targets+=(--target "$(rust "$architecture")")
    done
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq install --yes --no-install-recommends "${packages[@]}" > /dev/null
    ! command -v rustup > /dev/null || rustup target add $(for architecture in "$@"; do rust "$architecture"; done)

    for architecture in "$@"; do
        cross "$architecture"
    done
    # Both programs at once, as everywhere: what both use is compiled once, with the features that the tests have.
    cargo build --profile dist --locked --package prima --package prima-node-agent "${targets[@]}"

    for architecture in "$@"; do
        mkdir -p "$folder/$architecture"
        for program in prima prima-node-agent; do
            "$(tool "$architecture" strip)" --strip-debug -o "$folder/$architecture/$program" \
                "${CARGO_TARGET_DIR:-target}/$(rust "$architecture")/dist/$program"
        done
        images/root.sh "$VERSION_CODENAME" "$architecture" "$folder/$architecture/root.tar"
        images/root.sh "$VERSION_CODENAME" "$architecture" "$folder/$architecture/root-gpu.tar" "$vulkan"
    done
}

# The names of a processor.
gnu() { case $1 in amd64) echo x86_64-linux-gnu ;; arm64) echo aarch64-linux-gnu ;; *) echo "no processor is called $1" >&2; exit 1 ;; esac; }
rust() { case $1 in amd64) echo x86_64-unknown-linux-gnu ;; arm64) echo aarch64-unknown-linux-gnu ;; esac; }

# tool ARCHITECTURE NAME: the compiler's name, which is the plain one for this processor.
tool() {
    [ "$1" = "$here" ] && echo "$2" || echo "$(gnu "$1")-$2"
}

# cross ARCHITECTURE: tells cargo, C and C++ how to compile and link for it, and libclang where its headers are.
cross() {
    [ "$1" != "$here" ] || return 0
    local name
    name=$(rust "$1" | tr - _)
    export "CC_$name=$(tool "$1" gcc)" "CXX_$name=$(tool "$1" g++)" "AR_$name=$(tool "$1" ar)"
    export "CARGO_TARGET_${name^^}_LINKER=$(tool "$1" gcc)"
    export "BINDGEN_EXTRA_CLANG_ARGS_$name=-I/usr/$(gnu "$1")/include"
}

main "$@"
