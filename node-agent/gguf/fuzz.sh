#!/bin/sh
# Fuzzes the GGUF parser for the seconds given (default 60), starting from the committed corpus; needs a stable Rust and a C++ compiler.
# New inputs land in fuzz/target/found and a crashing one in fuzz/artifacts, neither of which is committed.
set -eu
cd "$(dirname "$0")/fuzz"
mkdir -p target/found artifacts
exec cargo run --quiet --release -- target/found corpus/parse -artifact_prefix=artifacts/ -max_len=4096 \
    -rss_limit_mb=512 -max_total_time="${1:-60}" -print_final_stats=1
