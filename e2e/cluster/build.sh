#!/usr/bin/env bash
# Builds the components of the e2e cluster from their pinned Go modules (modules/), and prints the
# directory of the binaries.
#
#   build.sh              build missing binaries; the last line on stdout is the directory
#   build.sh NAME...      build only these (make lint needs only helm)
#   build.sh --print-dir  print that directory without building
#
# K8S: the Kubernetes version, 1.37 (default) or 1.36.
#
# The directory is <cache>/<key>/bin. <cache> is $TESSERA_E2E_CACHE or
# ${XDG_CACHE_HOME:-~/.cache}/tessera-e2e, <key> is a hash of all inputs of the build. A binary is
# built under a temporary name and renamed, so an interrupted run leaves no partial binary. Existing
# binaries are skipped.
#
# TESSERA_E2E_GO_PARALLEL: number of packages that Go compiles in parallel (default: all cores).
# Needs Go >= 1.26 and, for runc, a C compiler, pkg-config and libseccomp-dev (see install-deps.sh).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
modules=$here/modules
parallel=${TESSERA_E2E_GO_PARALLEL:-$(nproc)}
current_kubernetes=1.37

# Prints the module directory of the Kubernetes version: `kubernetes` for the current version, with
# a version suffix for others.
kubernetes_module() {
  case ${K8S:-} in
    '' | "$current_kubernetes") echo kubernetes ;;
    *) echo "kubernetes-$K8S" ;;
  esac
}

check_version() {
  local supported
  supported=$(cd "$modules" && echo "$current_kubernetes" kubernetes-*)
  [ -d "$modules/$(kubernetes_module)" ] || {
    echo "K8S=$K8S is not supported: set it to one of: ${supported//kubernetes-/}" >&2
    exit 1
  }
}

# Prints the lines of components.txt for the selected version; the file contains the current
# version's module and release.
components() {
  local module release
  module=$(kubernetes_module)
  if [ "$module" = kubernetes ]; then
    grep -v '^#' "$modules/components.txt"
  else
    release=$(sed -nE 's/^(require)?[[:space:]]*k8s.io\/kubernetes (v[0-9.]+)( .*)?$/\2/p' \
      "$modules/$module/go.mod")
    grep -v '^#' "$modules/components.txt" |
      awk -v module="$module" -v release="$release" \
        '$2 == "kubernetes" { $2 = module; $NF = release } { print }'
  fi
}

# Includes only the selected Kubernetes module, so changes of others cause no rebuild.
cache_key() {
  local directories=() directory
  (
    cd "$modules"
    for directory in ./*/; do
      case $directory in
        ./kubernetes*/)
          if [ "$directory" = "./$(kubernetes_module)/" ]; then directories+=("${directory%/}"); fi
          ;;
        *) directories+=("${directory%/}") ;;
      esac
    done
    components && sha256sum "${directories[@]/%//go.mod}" "${directories[@]/%//go.sum}" &&
      sha256sum ./*/*.go && go env GOARCH
  ) | sha256sum | cut -c1-16
}

bin_dir() {
  local cache=${TESSERA_E2E_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tessera-e2e}
  echo "$cache/$(cache_key)/bin"
}

# Prints linker flags that set the version. Kubernetes reads it from two packages; without it the
# API server reports v0.0.0-master, and clients that check versions fail.
version_stamps() { # variable value
  local variable=$1 value=$2 major minor
  case $variable in
    -) ;;
    kubernetes)
      IFS=. read -r major minor _ <<<"${value#v}"
      for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        echo "-X $package.gitVersion=$value -X $package.gitMajor=$major -X $package.gitMinor=$minor"
      done
      ;;
    *) echo "-X $variable=$value" ;;
  esac
}

build_one() { # directory name module package cgo tags variable value
  local directory=$1 name=$2 module=$3 package=$4 cgo=$5 tags=$6 stamps started=$SECONDS
  if [ -x "$directory/$name" ]; then return; fi
  stamps=$(version_stamps "$7" "$8" | tr '\n' ' ')
  if [ "$tags" = - ]; then tags=; fi
  echo "building $name ($package)" >&2
  retry go_build
  mv "$directory/.$name.$$" "$directory/$name"
  echo "built $name in $((SECONDS - started)) s" >&2
}

# Uses the variables of build_one.
go_build() {
  (cd "$modules/$module" && CGO_ENABLED=$cgo go build -p "$parallel" -trimpath -buildvcs=false \
    -tags "$tags" -ldflags "-s -w $stamps" -o "$directory/.$name.$$" "$package")
}

# Go stops at the first module that it cannot download. A retry continues with the cached packages.
retry() { # command...
  local attempt
  for attempt in 1 2 3; do
    if "$@"; then return; fi
    echo "attempt $attempt of 3 failed" >&2
    sleep $((attempt * 5))
  done
  return 1
}

build_all() { # directory [names]
  local directory=$1 only=" ${*:2} " name module package cgo tags variable value
  mkdir -p "$directory"
  trap 'rm -f "$directory"/.*.$$' EXIT
  while read -r name module package cgo tags variable value; do
    if [ $# -gt 1 ] && [[ $only != *" $name "* ]]; then continue; fi
    build_one "$directory" "$name" "$module" "$package" "$cgo" "$tags" "$variable" "$value"
  done < <(components)
}

check_version
directory=$(bin_dir)
if [ "${1:-}" != --print-dir ]; then build_all "$directory" "$@"; fi
echo "$directory"
