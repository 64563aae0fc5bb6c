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
# Cgroups of version 2 are one hierarchy, those of version 1 one for each controller.
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    version=2 hierarchies=/sys/fs/cgroup
else
    version=1 hierarchies=$(find /sys/fs/cgroup -mindepth 1 -maxdepth 1 -type d)
fi

outside() {
    if [ $version = 2 ]; then
        hand_on_controllers /sys/fs/cgroup
    fi
    for hierarchy in $hierarchies; do
        mkdir "$hierarchy/$group"
        # A node that gets no time counts as lost, and all its programs together count as one: this one is worth sixteen.
        [ ! -e "$hierarchy/$group/cpu.shares" ] || echo 16384 > "$hierarchy/$group/cpu.shares"
        [ ! -e "$hierarchy/$group/cpu.weight" ] || echo 1600 > "$hierarchy/$group/cpu.weight"
        # In version 1, a cpuset starts without any processor or memory.
        for set in cpuset.cpus cpuset.mems; do
            [ ! -e "$hierarchy/$set" ] || cat "$hierarchy/$set" > "$hierarchy/$group/$set"
        done
    done
    mkdir -p "$folder/lib" "$folder/log" "$folder/tmp"
    ln -sfn /run "$folder/run"

    # Not this shell's own input: one in the background has none unless it is told.
    exec 3<&0
    sh "$0" "$group" "$name" "$folder" in_group <&3 3<&- &
    namespaces=$!
    exec 3<&-
    wait "$namespaces" || true
    for hierarchy in $hierarchies; do
        remove "$hierarchy/$group"
    done
}

# Who entered the host from outside ends a moment after the host.
remove() {
    for _ in 1 2 3 4 5; do
        find "$1" -depth -type d -exec rmdir {} + && return
        sleep 0.2
    done
}

# Lets the groups below this one have its controllers. Some cannot be handed on.
hand_on_controllers() {
    for controller in $(cat "$1/cgroup.controllers"); do
        echo "+$controller" > "$1/cgroup.subtree_control" || true
    done 2> /dev/null
}

join() {
    for hierarchy in $hierarchies; do
        echo $$ > "$hierarchy/$1/cgroup.procs"
    done
}

in_group() {
    join "$group"
    # From here on, this group is the topmost.
    exec unshare --cgroup sh "$0" "$group" "$name" "$folder" at_top
}

at_top() {
    # In version 2, a group with processes of its own hands nothing on to others, and the groups of pods are below the topmost one.
    if [ $version = 2 ]; then
        mkdir "/sys/fs/cgroup/$group/host"
        join "$group/host"
        hand_on_controllers "/sys/fs/cgroup/$group"
    fi
    exec unshare --mount --uts --ipc --net --pid --fork --kill-child sh "$0" "$group" "$name" "$folder" inside
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
