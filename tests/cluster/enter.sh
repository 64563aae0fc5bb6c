#!/bin/sh
# enter.sh GROUP PROCESS COMMAND...: runs a command on the host with these cgroups that the process is on, see host.sh.
set -eu

group=$1 process=$2
shift 2
# Version 2 has the first, version 1 the others.
for joined in "/sys/fs/cgroup/$group/host" /sys/fs/cgroup/*/"$group"; do
    [ ! -d "$joined" ] || echo $$ > "$joined/cgroup.procs"
done
exec nsenter --target "$process" --mount --uts --ipc --net --pid --cgroup -- "$@"
