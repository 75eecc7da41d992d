#!/usr/bin/env bash
# PID 1 of a machine of the e2e cluster, in mount, pid, network, ipc and uts namespaces of its own.
#
#   machine-init.sh NAME STATE_DIR RECORD
#
# Gives the machine its own /proc, /dev, /run, /var/lib and /var/log, so that the paths which software has on a real node
# (/var/lib/kubelet, /run/containerd, /var/run/cdi, /run/tessera, ...) are the machine's own and nothing is written at
# those paths of the host. Mount propagation is shared inside the machine (kubelet's Bidirectional mounts need it) and
# private towards the host. When this process dies, the kernel ends every process of the machine and all its mounts.
set -euo pipefail

name=$1 state=$2 record=$3

# A /dev with the host's device nodes in which new ones are the machine's own: the kernel has one devtmpfs for all.
own_dev() {
  local dev entry
  dev=$(mktemp -d)
  mount -t tmpfs -o mode=755 tmpfs "$dev"
  for entry in /dev/*; do
    if [ ! -d "$entry" ] || [ -L "$entry" ]; then cp --archive "$entry" "$dev/"; fi
  done
  mkdir "$dev"/{pts,shm,mqueue}
  mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$dev/pts"
  mount -t tmpfs -o mode=1777 tmpfs "$dev/shm"
  mount -t mqueue mqueue "$dev/mqueue"
  mount --move "$dev" /dev
  rmdir "$dev"
}

# /proc is still the host's here: its `self` is this process as the host numbers it. Field 22 is the start time, which
# together with the number names a process for good.
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

# The record appears under its name only when the machine is ready.
mv "$record.part" "$record"

# bash reaps the orphans that init inherits (containers' processes and shims) while it waits.
trap 'exit 0' TERM
while true; do
  sleep 3600 &
  wait $! || true
done
