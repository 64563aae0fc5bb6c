# The disks of a machine, in its own mount namespace, for as long as this process lives: `data` for its agent, which is small, and `models`, a
# file system in a file (`image/disk`), so that it can fail. All machines have the same paths.
# $1: their folder.
set -eu
cd "$1"
mount -t tmpfs -o size=96m tmpfs data
mount -t tmpfs tmpfs image
truncate -s 256M image/disk
mkfs.ext4 -q -O ^has_journal -m 0 image/disk
mount -o loop,noatime image/disk models
echo ready
exec sleep infinity
