#!/usr/bin/env bash
# Builds the images of the e2e cluster without a container engine, as OCI archives in $TESSERA_E2E_RUNDIR/images:
#
#   images.sh pause      the sandbox image
#   images.sh tessera    tessera-driver, tessera-controller and the tests' probe, from cargo's binaries; the first two once
#                        more with fault points, as tessera/driver:fault-points and tessera/controller:fault-points
#   images.sh load       import what tessera built into both nodes
#
# The same content as deploy/images/*.Dockerfile: a C runtime, the binary, and for the driver the interceptor and tessera-mps. The C
# runtime is this machine's own (Debian's or Ubuntu's libc6 and libgcc-s1), the one cargo has just linked against.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

images=$rundir/images
intercept_directory=/usr/local/lib/tessera

cargo_packages=(tessera-driver tessera-mps tessera-controller tessera-probe tessera-fake-world tessera-fake-nvml tessera-fake-cuda
  tessera-fake-mps-control)

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

# Writes an image of a program of ours: the C runtime, the binary, and what else lies in the layer.
program_image() { # archive, name with tag, configuration, binary, base layer, layer
  local layer=$6
  install -D "$4" "$layer/usr/local/bin/${4##*/}"
  strip --strip-debug "$layer/usr/local/bin/${4##*/}"
  oci_archive "$images/$1.tar" "$2" "$3" "$5" "$layer"
}

# With fault points the programs have the same names, so they are built first: what lies under those names afterwards is
# what ships.
build_with_fault_points() { # directory for the binaries
  (
    cd "$repository"
    cargo build --locked --profile "$cargo_profile" --package=tessera-driver --package=tessera-controller \
      --features tessera-driver/fault-points,tessera-controller/fault-points
  )
  mkdir -p "$1"
  cp "$cargo_output/tessera-driver" "$cargo_output/tessera-controller" "$1"
}

build_tessera() {
  local base=$work/base layer program
  build_with_fault_points "$work/with-fault-points"
  (
    cd "$repository"
    cargo build --locked --profile "$cargo_profile" "${cargo_packages[@]/#/--package=}"
    # As it ships.
    cargo build --locked --profile intercept --package=tessera-intercept --package=tessera-intercept-cuda --package=tessera-intercept-nvml
  )
  build_base_layer "$base"

  for program in tessera-driver tessera-controller; do
    if grep --quiet --text 'unknown fault point' "$cargo_output/$program"; then fail "$program has fault points"; fi
  done

  layer=$work/driver
  install -D --mode 644 --target-directory "$layer$intercept_directory" \
    "$(dirname "$cargo_output")/intercept/"libtessera_intercept{,_cuda,_nvml}.so
  strip --strip-unneeded "$layer$intercept_directory/"libtessera_intercept{,_cuda,_nvml}.so
  install -D "$cargo_output/tessera-mps" "$layer/usr/local/bin/tessera-mps"
  strip --strip-debug "$layer/usr/local/bin/tessera-mps"
  driver_images "$base" "$layer"
  controller_images "$base" "$work/controller"
  program_image probe tessera/probe:e2e \
    '{"Entrypoint": ["/usr/local/bin/tessera-probe"], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}' \
    "$cargo_output/tessera-probe" "$base" "$work/probe"
  links_image "$base" "$work/probe"
  guests_image "$base" "$work/probe"
}

driver_images() { # base layer, layer with the interceptor
  local config='{"Entrypoint": ["/usr/local/bin/tessera-driver"]}'
  program_image driver tessera/driver:e2e "$config" "$cargo_output/tessera-driver" "$1" "$2"
  program_image driver-fault-points tessera/driver:fault-points "$config" "$work/with-fault-points/tessera-driver" "$1" "$2"
}

controller_images() { # base layer, layer
  local config='{"Entrypoint": ["/usr/local/bin/tessera-controller"], "User": "65532:65532"}'
  program_image controller tessera/controller:e2e "$config" "$cargo_output/tessera-controller" "$1" "$2"
  program_image controller-fault-points tessera/controller:fault-points "$config" \
    "$work/with-fault-points/tessera-controller" "$1" "$2"
}

# The probe in an image with a link that leads to where grants are: the runtime follows it when it mounts volumes.
links_image() { # directories of the probe's layers
  local layer=$work/links
  mkdir -p "$layer/links/to/where/grants"
  ln -s /dev/tessera "$layer/links/to/where/grants/are"
  oci_archive "$images/links.tar" tessera/links:e2e \
    '{"Entrypoint": ["/usr/local/bin/tessera-probe"], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}' "$@" "$layer"
}

# The probe among programs of every kind, and once more as one that runs as root whoever starts it.
guests_image() { # directories of the probe's layers
  local layer=$work/guests
  guests_check_compilers
  guests_layer "$layer"
  install --mode 4755 "$2/usr/local/bin/tessera-probe" "$layer/guests/setuid-probe"
  shell_install "$layer"
  oci_archive "$images/guests.tar" tessera/guests:e2e '{"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}' "$@" "$layer"
}

shell_install() { # layer
  local library
  install -D --target-directory "$1/usr/bin" /bin/bash
  ldd /bin/bash | awk '/libtinfo/ { print $3 }' | while read -r library; do
    install -D --mode 644 "$library" "$1/usr/lib/x86_64-linux-gnu/${library##*/}"
  done
}

load_tessera() {
  local node image
  bin=${bin:-$(cat "$rundir/bin")}
  for node in "${node_names[@]}"; do
    for image in driver driver-fault-points controller controller-fault-points probe links guests; do node_import "$node" "$image"; done
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
