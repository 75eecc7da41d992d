#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that the cluster needs, except Go and Rust. No other script
# in this directory installs packages.
#
#   libseccomp-dev pkg-config gcc libc6-dev   building runc and the pause program
#   musl-tools libc6-dev-i386                 building musl and 32-bit programs (trial `executables`)
#   iproute2 openssl jq                       bridge and addresses of the nodes, PKI, JSON
#   util-linux                                unshare, nsenter, mountpoint
#   dbus                                      bus of the kubelet's graceful node shutdown
#   shell checker (shellcheck)                make lint
set -euo pipefail

packages=(libseccomp-dev pkg-config gcc libc6-dev musl-tools libc6-dev-i386 iproute2 openssl jq
  util-linux dbus shellcheck)

as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
"${as_root[@]}" apt-get -o Acquire::Retries=3 update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 \
  install --yes --no-install-recommends "${packages[@]}"
