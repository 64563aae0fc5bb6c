#!/usr/bin/env bash
# Makes sure that one cargo tool is there in exactly one version: tests/tool.sh cargo-nextest 0.9.114
# Builds it from crates.io if not (minutes, once).
set -euo pipefail

tool=$1 version=$2
if cargo install --list | grep -qx "$tool v$version:"; then
    exit 0
fi
echo "installing $tool $version (once, takes some minutes)" >&2
cargo install --locked "$tool@$version"
