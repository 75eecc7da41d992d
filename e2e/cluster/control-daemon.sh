#!/usr/bin/env bash
# Puts the stand-in for NVIDIA's MPS control daemon where a driver root has the real one, with the libraries that it needs there: whoever
# runs it makes the driver root its root.
#
#   control-daemon.sh PROGRAM DRIVER_ROOT
set -euo pipefail

program=$1
root=$2
mkdir -p "$root/dev/shm" "$root/tmp"
install -D "$program" "$root/usr/bin/nvidia-cuda-mps-control"
# As in a merged /usr: the loader is found by /lib64, whatever the program says.
ldd "$program" | grep --only-matching '/[^ ]*' | while read -r library; do
  install -D --mode 755 "$library" "$root$library"
done
