#!/bin/sh
# Runs a test, as nextest's runner, and notes the CPU time of its processes in the folder PRIMA_TEST_COSTS (costs.py reads it).
# Listing the tests of a suite is not noted.
[ -n "${NEXTEST_TEST_NAME:-}" ] || exec "$@"
"$@"
status=$?
# The shell's `times`: a row of its own, and one of what it waited for.
{ echo "$NEXTEST_BINARY_ID $NEXTEST_TEST_NAME"; times; } >> "$PRIMA_TEST_COSTS/$$"
exit $status
