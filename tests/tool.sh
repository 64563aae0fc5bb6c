#!/usr/bin/env bash
# Makes sure that one cargo tool is there in exactly one version, and prints the folder that it is in:
#
#   tests/tool.sh cargo-nextest 0.9.114 [OPTION OF CARGO INSTALL...]
#
# It is built from crates.io, in the cache, once: without optimisation, as it mostly waits for what it starts.
set -euo pipefail

tool=$1 version=$2
root=${PRIMA_CACHE:-$HOME/.cache/prima}/tools/$tool-$version
if [ ! -x "$root/bin/$tool" ]; then
    echo "building $tool $version (once, takes a minute or two)" >&2
    CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_INCREMENTAL=false \
        cargo install --locked --debug --no-track --root "$root" "$tool@$version" "${@:3}" >&2
fi
echo "$root/bin"
