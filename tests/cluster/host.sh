#!/bin/sh
# A host of a cluster: host.sh GROUP NAME FOLDER
#
# Its own network, processes, mounts, name and cgroups on this machine, and a disk of its own: FOLDER is its /var. It lives as
# long as standard input is open, so that it ends with its test however that ends; then all of its processes are killed at
# once, as when a machine loses power, and its cgroups go. What was written to /var stays.
#
# Prints the id of a process in its namespaces when it is up.
set -eu

group=$1 name=$2 folder=$3
hierarchies=$(find /sys/fs/cgroup -mindepth 1 -maxdepth 1 -type d)

outside() {
    for hierarchy in $hierarchies; do
        mkdir "$hierarchy/$group"
        # A node that gets no time counts as lost, and all its programs together count as one: this one is worth sixteen.
        [ ! -e "$hierarchy/$group/cpu.shares" ] || echo 16384 > "$hierarchy/$group/cpu.shares"
        # A cpuset starts without any processor or memory.
        for set in cpuset.cpus cpuset.mems; do
            [ ! -e "$hierarchy/$set" ] || cat "$hierarchy/$set" > "$hierarchy/$group/$set"
        done
    done
    mkdir -p "$folder/lib" "$folder/log" "$folder/tmp"
    ln -sfn /run "$folder/run"

    # Not this shell's own input: one in the background has none unless it is told.
    exec 3<&0
    sh -c 'for joined in /sys/fs/cgroup/*/$0/cgroup.procs; do echo $$ > "$joined"; done
           exec unshare --mount --uts --ipc --net --pid --cgroup --fork --kill-child "$@"' \
        "$group" sh "$0" "$group" "$name" "$folder" inside <&3 3<&- &
    namespaces=$!
    exec 3<&-
    wait "$namespaces" || true
    find /sys/fs/cgroup/*/"$group" -depth -type d -exec rmdir {} +
}

inside() {
    mount --make-rshared /
    for hierarchy in $hierarchies; do
        mount --bind "$hierarchy/$group" "$hierarchy"
    done
    mount --bind "$folder" /var
    mount -t tmpfs tmpfs /run
    # As the machine knows it, while its /proc is there.
    read -r process _ < /proc/self/stat
    mount -t proc proc /proc
    hostname "$name"
    ip link set lo up
    echo 1 > /proc/sys/net/ipv4/ip_forward
    echo "$process"
    # As a first process does, the shell takes leave of every orphan that ends while it waits.
    exec 3<&0
    cat <&3 > /dev/null &
    wait $!
}

"${4:-outside}"
