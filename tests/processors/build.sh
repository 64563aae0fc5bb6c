#!/usr/bin/env bash
# build.sh PACKAGE...: puts programs for QEMU to run as other processors would into target/processors:
#
#   prima-kernels     x86_64/ and aarch64/  kernels                                    its tests, as cargo built them for this machine, and for arm64
#   prima-engine      x86_64/ and aarch64/  families_at_every_level, streamed_weights  the same
#   prima             aarch64/              prima                                      the program
#   prima-node-agent  aarch64/              prima-node-agent                           the same
#                     aarch64/              libraries                                  what QEMU gives them as their root
#                     aarch64/              libraries/root.tar                         the root file system of images with them
#                                           built                                      where there is all that was asked for
#
# arm64 is compiled by Debian's cross compiler in a root of its own (once, 1.5 GB in the cache): the toolchain of this machine
# need not have that target, and the Rust of Debian's releases is too old. Takes root, mmdebstrap, what
# operator/halda/with-native-tools.sh sets, and that cargo fetched all dependencies. `build.sh root` makes only that root, and prints
# its folder.
set -euo pipefail
cd "$(dirname "$0")/../.."

cache=${PRIMA_CACHE:-$HOME/.cache/prima}/arm64
# A newer Rust may be asked for.
version=$(grep -h ^rust-version Cargo.toml | cat - tests/processors/build.sh images/root.sh | sha256sum | cut -c 1-16)
release=sid mirror=http://deb.debian.org/debian
target=aarch64-unknown-linux-gnu
folder=$PWD/target/processors

main() {
    mkdir -p "$cache" "$folder"/{x86_64,aarch64}
    if [ "$*" = root ]; then
        ensure_root
        echo "$cache/$version"
        return
    fi
    rm -f "$folder/built"
    local package tests=() programs=() built
    for package in "${@:?expected root, or packages}"; do
        case $package in
        prima-kernels) tests+=(kernels) ;;
        prima-engine) tests+=(families_at_every_level streamed_weights) ;;
        prima | prima-node-agent) programs+=("$package") ;;
        *) echo "expected prima-kernels, prima-engine, prima or prima-node-agent, found $package" >&2 && exit 1 ;;
        esac
    done
    ensure_root
    if [ ${#tests[@]} -gt 0 ]; then
        built=$(cargo build --workspace --bins --tests --locked --message-format=json)
        link x86_64 "${tests[@]}" <<< "$built"
    fi
    # All packages are named, whatever is built of them: so their features are always the same, and nothing is compiled twice.
    built=$(in_root cargo build --locked --offline --message-format=json --target "$target" -p prima-kernels -p prima-engine \
        -p prima -p prima-node-agent "${tests[@]/#/--test=}" "${programs[@]/#/--bin=}")
    link aarch64 "${tests[@]}" "${programs[@]}" <<< "$built"
    ln -sfn "$cache/$version" "$folder/aarch64/libraries"
    touch "$folder/built"
}

# Makes the root unless it is there. Until this script ends, others wait for it: whoever comes second finds the work done.
ensure_root() {
    exec 9> "$cache/lock"
    flock 9
    if [ ! -d "$cache/$version" ]; then
        echo "making a root with a compiler for arm64 (once)" >&2
        # Also what earlier versions of this script made.
        rm -rf "${cache:?}"/*/
        make_root "$cache/unfinished"
        mv "$cache/unfinished" "$cache/$version"
    fi
}

# make_root FOLDER: Debian's unstable release, whose Release file may be some days old on a mirror. In it is a root file system of the same release,
# for images of programs that are compiled there.
make_root() {
    mmdebstrap --quiet --variant=apt --architectures=amd64,arm64 --aptopt='Acquire::Check-Valid-Until "false"' \
        --include=rustc,cargo,gcc,libc6-dev,gcc-aarch64-linux-gnu,g++-aarch64-linux-gnu,libstd-rust-dev:arm64,cmake,make,libclang-dev \
        "$release" "$1" "$mirror"
    mkdir "$1"/{source,registry}
    images/root.sh "$release" arm64 "$1/root.tar" "" "deb [check-valid-until=no] $mirror $release main"
}

# link ARCHITECTURE NAME...: the one program of each name in cargo's messages.
link() {
    local architecture=$1 name executable
    shift
    python3 -c '
import json, sys
messages = [json.loads(line) for line in sys.stdin if line.startswith("{")]
for name in sys.argv[1:]:
    [one] = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == name]
    print(name, one)
' "$@" | while read -r name executable; do
        ln -sf "${executable/#\/source\//$PWD/}" "$folder/$architecture/$name"
    done
}

# in_root COMMAND...: with this tree and cargo's registry mounted, in a mount namespace that ends with the command. Only what computes
# is optimised (Cargo.toml), for how fast the rest is tells nothing here. Without checks of what never happens: this machine's programs have
# them in all but NEON's own code, and without them the compiler has half as much to do.
in_root() {
    local root=$cache/$version
    unshare --mount bash -ec '
        mount --bind "$1" "$0/source"
        mount --bind "$2" "$0/registry"
        shift 2
        exec chroot "$0" env -i PATH=/usr/bin:/bin HOME=/root CARGO_HOME=/root/cargo CARGO_TARGET_DIR=/source/target/arm64 \
            CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_CODEGEN_UNITS=16 CARGO_INCREMENTAL=0 \
            CARGO_PROFILE_DEV_DEBUG_ASSERTIONS=false CARGO_PROFILE_DEV_OVERFLOW_CHECKS=false \
            CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc \
            CXX_aarch64_unknown_linux_gnu=aarch64-linux-gnu-g++ \
            BINDGEN_EXTRA_CLANG_ARGS_aarch64_unknown_linux_gnu=-I/usr/aarch64-linux-gnu/include sh -c "
                mkdir -p /root/cargo && ln -sfn /registry /root/cargo/registry && cd /source && exec \"\$@\"" sh "$@"
    ' "$root" "$PWD" "${CARGO_HOME:-$HOME/.cargo}/registry" "$@"
}

main "$@"
