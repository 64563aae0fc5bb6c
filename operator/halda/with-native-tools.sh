#!/usr/bin/env bash
# Runs a command with what building HiGHS (C++) takes beside a compiler: cmake, and libclang for its bindings. What the
# machine lacks comes from PyPI, by exact version, into a virtual environment in the cache; no root is needed.
set -euo pipefail

tools="${PRIMA_CACHE:-$HOME/.cache/prima}/native-tools-1"

fetched() {
    if [ ! -e "$tools/complete" ]; then
        echo "fetching cmake and libclang from PyPI, which building HiGHS needs (once)" >&2
        "${PYTHON:-python3}" -m venv --clear "$tools"
        "$tools/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: \
            cmake==3.31.6 libclang==18.1.1
        touch "$tools/complete"
    fi
}

# Where bindgen looks by itself; libclang-cpp is another library.
has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] || [ "$(uname)" = Darwin ] && return
    local folder name
    for folder in /usr/lib /usr/lib64 /usr/lib/*-linux-gnu /usr/lib/llvm*/lib; do
        for name in 'libclang.so*' 'libclang-[0-9]*.so*'; do
            compgen -G "$folder/$name" > /dev/null && return
        done
    done
    return 1
}

if ! command -v cmake > /dev/null; then
    fetched
    PATH="$PATH:$tools/bin"
fi
if ! has_libclang; then
    fetched
    LIBCLANG_PATH=$(echo "$tools"/lib/python*/site-packages/clang/native)
    export LIBCLANG_PATH
fi
exec "$@"
