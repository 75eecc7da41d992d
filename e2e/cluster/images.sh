#!/usr/bin/env bash
# Builds the images of the e2e cluster without a container engine, as OCI archives in $TESSERA_E2E_RUNDIR/images:
#
#   images.sh pause      the sandbox image
#   images.sh tessera    tessera-driver, tessera-controller and the tests' probe, from cargo's binaries
#   images.sh load       import what tessera built into both nodes
#
# The same content as deploy/images/*.Dockerfile: a C runtime, the binary, and for the driver the interceptor. The C
# runtime is this machine's own (Debian's or Ubuntu's libc6 and libgcc-s1), the one cargo has just linked against.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

images=$rundir/images
intercept_directory=/usr/local/lib/tessera

cargo_packages=(tessera-driver tessera-controller tessera-probe tessera-fake-world tessera-fake-nvml tessera-fake-cuda)

build_pause() {
  local layer=$work/pause
  mkdir -p "$layer"
  gcc -static -Os -Wall -o "$layer/pause" "$here/pause.c"
  strip "$layer/pause"
  oci_archive "$images/pause.tar" tessera/pause:e2e '{"Entrypoint": ["/pause"]}' "$layer"
}

# The C runtime and the few files a process without a shell expects, in the layout of a merged /usr.
build_base_layer() { # directory
  local layer=$1 file
  command -v dpkg >/dev/null || fail "images.sh takes the C runtime from Debian's packages; on another system use the Dockerfiles"
  mkdir -p "$layer"/{etc,tmp,dev,proc,sys,run,usr/lib,usr/lib64,usr/bin}
  chmod 1777 "$layer/tmp"
  for file in lib lib64 bin; do ln -s "usr/$file" "$layer/$file"; done
  dpkg -L libc6 libgcc-s1 | grep -E '^(/usr)?/lib' | while read -r file; do
    case $file in */gconv/* | */audit/*) continue ;; esac
    if [ -f "$file" ]; then
      mkdir -p "$layer/$(dirname "$file")"
      cp --no-dereference "$file" "$layer/$file"
    fi
  done
  echo 'root:x:0:0:root:/:/sbin/nologin' >"$layer/etc/passwd"
  echo 'nonroot:x:65532:65532:nonroot:/:/sbin/nologin' >>"$layer/etc/passwd"
  printf 'root:x:0:\nnonroot:x:65532:\n' >"$layer/etc/group"
}

build_tessera() {
  local base=$work/base layer
  (
    cd "$repository"
    cargo build --locked --profile "$cargo_profile" "${cargo_packages[@]/#/--package=}"
    # As it ships.
    cargo build --locked --profile intercept --package=tessera-intercept
  )
  build_base_layer "$base"

  layer=$work/driver
  install -D "$cargo_output/tessera-driver" "$layer/usr/local/bin/tessera-driver"
  install -D --mode 644 "$(dirname "$cargo_output")/intercept/libtessera_intercept.so" "$layer$intercept_directory/libtessera_intercept.so"
  strip --strip-debug "$layer/usr/local/bin/tessera-driver"
  strip --strip-unneeded "$layer$intercept_directory/libtessera_intercept.so"
  oci_archive "$images/driver.tar" tessera/driver:e2e '{"Entrypoint": ["/usr/local/bin/tessera-driver"]}' "$base" "$layer"

  layer=$work/controller
  install -D "$cargo_output/tessera-controller" "$layer/usr/local/bin/tessera-controller"
  strip --strip-debug "$layer/usr/local/bin/tessera-controller"
  oci_archive "$images/controller.tar" tessera/controller:e2e \
    '{"Entrypoint": ["/usr/local/bin/tessera-controller"], "User": "65532:65532"}' "$base" "$layer"

  layer=$work/probe
  install -D "$cargo_output/tessera-probe" "$layer/usr/local/bin/tessera-probe"
  strip --strip-debug "$layer/usr/local/bin/tessera-probe"
  oci_archive "$images/probe.tar" tessera/probe:e2e \
    '{"Entrypoint": ["/usr/local/bin/tessera-probe"], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}' "$base" "$layer"
}

load_tessera() {
  local node image
  bin=${bin:-$(cat "$rundir/bin")}
  for node in "${node_names[@]}"; do
    for image in driver controller probe; do node_import "$node" "$image"; done
  done
}

mkdir -p "$images"
work=$(mktemp -d "$images/.work.XXXXXX")
trap 'rm -rf "$work"' EXIT
case ${1:-} in
  pause) build_pause ;;
  tessera) build_tessera ;;
  load) load_tessera ;;
  *) fail "usage: images.sh pause|tessera|load" ;;
esac
