#!/bin/sh
# The compiler for whoever fuzzes (RUSTC_WORKSPACE_WRAPPER): what reads what strangers send says where it has been, in words that libFuzzer
# and a stable compiler understand. All else is compiled as for the tests (the kernels without optimisation), and what is not ours is not
# compiled again. No address sanitizer: these packages have next to no unsafe code.
name=
for argument; do
    [ "$before" = --crate-name ] && name=$argument
    before=$argument
done
case $name in
prima_gguf | prima_model | prima_node_agent | prima_text | prima_weights)
    exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
        -Cllvm-args=-sanitizer-coverage-trace-compares
    ;;
esac
exec "$@"
