#!/usr/bin/env bash
# PID 1 of a machine of the e2e cluster, in mount, pid, network, ipc and uts namespaces of its own.
#
#   machine-init.sh NAME STATE_DIR RECORD
#
# Gives the machine its own /proc, /run, /var/lib and /var/log, so that the paths which software has on a real node
# (/var/lib/kubelet, /run/containerd, /var/run/cdi, /run/tessera, ...) are the machine's own and nothing is written at
# those paths of the host. Mount propagation is shared inside the machine (kubelet's Bidirectional mounts need it) and
# private towards the host. When this process dies, the kernel ends every process of the machine and all its mounts.
set -euo pipefail

name=$1 state=$2 record=$3

# /proc is still the host's here: its `self` is this process as the host numbers it. Field 22 is the start time, which
# together with the number names a process for good.
read -r -a self </proc/self/stat
echo "${self[0]} ${self[21]} $(readlink /proc/self/ns/pid)" >"$record.part"

mount -t proc proc /proc
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
