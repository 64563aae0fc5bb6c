#!/usr/bin/env bash
# Runs a command with what building HiGHS takes: a C++ compiler (Debian's, where root can install it), cmake, and libclang
# for its bindings. Where the machine lacks the latter two they come from PyPI, by exact version, into a virtual environment
# in the cache, which needs no root.
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

if ! command -v c++ > /dev/null && ! command -v g++ > /dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        echo "building HiGHS takes a C++ compiler: install g++ or clang" >&2
        exit 1
    fi
    echo "installing Debian's g++, which building HiGHS needs" >&2
    apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ > /dev/null
fi
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
