#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages that the real cluster needs, apart from Go and Rust themselves. Nothing else in
# this directory installs anything.
#
#   libseccomp-dev pkg-config gcc libc6-dev   building runc and the pause program
#   musl-tools libc6-dev-i386                 building programs of musl and of 32 bits, beside which the interceptor stands
#   iproute2 openssl jq                       the nodes' bridge and addresses, the PKI, reading manifests
#   util-linux                                unshare, nsenter, mountpoint
#   shell checker (shellcheck)                make lint
set -euo pipefail

packages=(libseccomp-dev pkg-config gcc libc6-dev musl-tools libc6-dev-i386 iproute2 openssl jq util-linux shellcheck)

as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
"${as_root[@]}" apt-get -o Acquire::Retries=3 update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install --yes --no-install-recommends "${packages[@]}"
