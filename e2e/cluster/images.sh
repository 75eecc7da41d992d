#!/usr/bin/env bash
# Builds the images of the e2e cluster without a container engine, as OCI archives in
# $TESSERA_E2E_RUNDIR/images:
#
#   images.sh pause      build the sandbox image
#   images.sh tessera    build the images of driver, controller and test programs from cargo's
#                        binaries; driver and controller also with fault points
#   images.sh load       import the images built by `tessera` into both nodes
#
# The content equals that of deploy/images/*.Dockerfile: a C runtime, the program, and for the
# driver the interceptor and tessera-mps. The C runtime is from this machine's Debian or Ubuntu
# packages (libc6 and libgcc-s1), against which cargo has linked.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

images=$rundir/images
intercept_directory=/usr/local/lib/tessera

cargo_packages=(tessera-driver tessera-mps tessera-controller tessera-probe tessera-fake-world
  tessera-fake-nvml tessera-fake-cuda tessera-fake-mps-control)

build_pause() {
  local layer=$work/pause
  mkdir -p "$layer"
  gcc -static -Os -Wall -o "$layer/pause" "$here/pause.c"
  strip "$layer/pause"
  oci_archive "$images/pause.tar" tessera/pause:e2e '{"Entrypoint": ["/pause"]}' "$layer"
}

# Installs the C runtime and the files that a process expects in a container without a shell, in the
# layout of a merged /usr.
build_base_layer() { # directory
  local layer=$1 file
  command -v dpkg >/dev/null ||
    fail "dpkg is missing: the C runtime is taken from Debian packages; on other systems use the Dockerfiles"
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

# Writes the image of a program: the C runtime, the binary, and the other files of the layer.
program_image() { # archive, name with tag, configuration, binary, base layer, layer
  local layer=$6
  install -D "$4" "$layer/usr/local/bin/${4##*/}"
  strip --strip-debug "$layer/usr/local/bin/${4##*/}"
  oci_archive "$images/$1.tar" "$2" "$3" "$5" "$layer"
}

# Builds the programs with fault points. They have the same file names, so this is done before the
# build of the programs that ship.
build_with_fault_points() { # directory for the binaries
  (
    cd "$repository"
    cargo build --locked --profile "$cargo_profile" \
      --package=tessera-driver --package=tessera-controller \
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
    # With the profile that ships.
    cargo build --locked --profile intercept --package=tessera-intercept \
      --package=tessera-intercept-cuda --package=tessera-intercept-nvml
  )
  build_base_layer "$base"

  for program in tessera-driver tessera-controller; do
    if grep --quiet --text 'unknown fault point' "$cargo_output/$program"; then
      fail "$program has fault points"
    fi
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
  executables_image "$base" "$work/probe"
}

driver_images() { # base layer, layer with the interceptor
  local config='{"Entrypoint": ["/usr/local/bin/tessera-driver"]}'
  program_image driver tessera/driver:e2e "$config" "$cargo_output/tessera-driver" "$1" "$2"
  program_image driver-fault-points tessera/driver:fault-points "$config" \
    "$work/with-fault-points/tessera-driver" "$1" "$2"
}

controller_images() { # base layer, layer
  local config='{"Entrypoint": ["/usr/local/bin/tessera-controller"], "User": "65532:65532"}'
  program_image controller tessera/controller:e2e "$config" \
    "$cargo_output/tessera-controller" "$1" "$2"
  program_image controller-fault-points tessera/controller:fault-points "$config" \
    "$work/with-fault-points/tessera-controller" "$1" "$2"
}

# The probe in an image with a symbolic link to the grants' directory, which the runtime follows
# when it mounts volumes.
links_image() { # directories of the probe's layers
  local layer=$work/links
  mkdir -p "$layer/links/to/where/grants"
  ln -s /dev/tessera "$layer/links/to/where/grants/are"
  oci_archive "$images/links.tar" tessera/links:e2e \
    '{"Entrypoint": ["/usr/local/bin/tessera-probe"], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}' \
    "$@" "$layer"
}

# The probe with third-party programs of several kinds, and a copy of it that runs as root (setuid).
executables_image() { # directories of the probe's layers
  local layer=$work/executables
  executables_check_compilers
  executables_layer "$layer"
  install --mode 4755 "$2/usr/local/bin/tessera-probe" "$layer/executables/setuid-probe"
  shell_install "$layer"
  oci_archive "$images/executables.tar" tessera/executables:e2e \
    '{"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}' "$@" "$layer"
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
    for image in driver driver-fault-points controller controller-fault-points probe links executables; do
      node_import "$node" "$image"
    done
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
