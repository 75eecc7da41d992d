#!/usr/bin/env bash
# Installs the fake MPS control daemon at the path of NVIDIA's in a driver root, with the libraries
# that it needs there: the driver root is the root directory of its process.
#
#   control-daemon.sh PROGRAM DRIVER_ROOT
set -euo pipefail

program=$1
root=$2
mkdir -p "$root/dev/shm" "$root/tmp"
install -D "$program" "$root/usr/bin/nvidia-cuda-mps-control"
# As in a merged /usr: the program's interpreter is in /lib64.
ldd "$program" | grep --only-matching '/[^ ]*' | while read -r library; do
  install -D --mode 755 "$library" "$root$library"
done
