#!/bin/sh
# Runs a test, as nextest's runner, and notes the CPU time of its processes in a file of the folder PRIMA_TEST_COSTS (costs.py reads it): the
# test's program, and the two rows of the shell's `times`, of which the second is of what the shell waited for. Lists of tests are not noted.
[ "${NEXTEST_TEST_PHASE:-}" = run ] || exec "$@"
costs=$PRIMA_TEST_COSTS
unset PRIMA_TEST_COSTS
# Those that only compute, for minutes, leave the processors to those that measure how long things take.
case $CARGO_PKG_NAME:${1##*/} in
prima-engine:* | prima-kernels:* | prima-tests:parity_* | prima-tests:processors_kernels*) renice -n 10 -p $$ > /dev/null ;;
esac
# They compile every kernel and compute little, which takes half as long with the lavapipe that is installed (tests/gpu/lavapipe.sh).
[ "$CARGO_PKG_NAME" != prima-vulkan ] || unset VK_DRIVER_FILES
"$@"
status=$?
{ echo "$1"; times; } >> "$costs/$$"
# As the test ended: nextest names the signal.
[ "$status" -le 128 ] || kill -"$((status - 128))" $$
exit "$status"
