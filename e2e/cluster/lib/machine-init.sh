#!/usr/bin/env bash
# PID 1 of a machine of the e2e cluster, in its own mount, PID, network, IPC and UTS namespaces.
#
#   machine-init.sh NAME STATE_DIR RECORD
#
# Mounts the machine's own /proc, /dev, /run, /var/lib and /var/log, so that the usual paths
# (/var/lib/kubelet, /run/containerd, /var/run/cdi, /run/tessera, ...) are private to the machine
# and the host's are not changed. Mount propagation is shared within the machine, as the kubelet's
# Bidirectional mounts require, and private towards the host. When this process exits, the kernel
# ends all processes of the machine and removes its mounts.
set -euo pipefail

name=$1 state=$2 record=$3

# Mounts a /dev with copies of the host's device nodes, except those of GPUs: a machine gets fake
# ones. New nodes are private; the kernel has only one devtmpfs.
own_dev() {
  local dev entry
  dev=$(mktemp -d)
  mount -t tmpfs -o mode=755 tmpfs "$dev"
  for entry in /dev/*; do
    if [[ $entry == /dev/nvidia* ]]; then continue; fi
    if [ ! -d "$entry" ] || [ -L "$entry" ]; then cp --archive "$entry" "$dev/"; fi
  done
  mkdir "$dev"/{pts,shm,mqueue}
  mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$dev/pts"
  mount -t tmpfs -o mode=1777 tmpfs "$dev/shm"
  mount -t mqueue mqueue "$dev/mqueue"
  mount --move "$dev" /dev
  rmdir "$dev"
}

# /proc is still the host's, so /proc/self has the host's process ID. Field 22 is the start time;
# together they identify a process uniquely.
read -r -a self </proc/self/stat
echo "${self[0]} ${self[21]} $(readlink /proc/self/ns/pid)" >"$record.part"

mount -t proc proc /proc
own_dev
mount -t tmpfs -o mode=755 tmpfs /run
for directory in lib log; do
  mkdir -p "$state/var/$directory"
  mount --bind "$state/var/$directory" "/var/$directory"
done
if [ "$(readlink -f /var/run)" != /run ]; then mount --bind /run /var/run; fi
hostname "$name"
ip link set lo up
mount --make-rshared /

# The record gets its final name when the machine is ready.
mv "$record.part" "$record"

# While it waits, bash reaps orphaned processes (containers and shims).
trap 'exit 0' TERM
while true; do
  sleep 3600 &
  wait $! || true
done
