#!/usr/bin/env bash
# Builds the real components of the e2e cluster from their pinned Go modules (modules/) and prints the directory that
# holds the binaries.
#
#   build.sh              build what is missing; the last line on stdout is the directory
#   build.sh NAME...      only these (make lint needs nothing but helm)
#   build.sh --print-dir  print that directory without building
#
# The directory is <cache>/<key>/bin, <cache> being $TESSERA_E2E_CACHE or ${XDG_CACHE_HOME:-~/.cache}/tessera-e2e and
# <key> a hash of everything that decides what is built. A binary is built beside its place and renamed into it, so an
# interrupted run leaves no half a binary, and one that is there already is skipped.
#
# TESSERA_E2E_GO_PARALLEL: how many packages Go compiles at once (default: all cores).
# Needs Go >= 1.26 and, for runc, a C compiler, pkg-config and libseccomp-dev (see install-deps.sh).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
modules=$here/modules
parallel=${TESSERA_E2E_GO_PARALLEL:-$(nproc)}

cache_key() {
  (cd "$modules" && grep -v '^#' components.txt && sha256sum ./*/go.mod ./*/go.sum && go env GOARCH) | sha256sum | cut -c1-16
}

bin_dir() {
  local cache=${TESSERA_E2E_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tessera-e2e}
  echo "$cache/$(cache_key)/bin"
}

# The linker's version stamps. Kubernetes reads its own from two packages; without them the API server reports
# v0.0.0-master and clients that look at versions misbehave.
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
  (cd "$modules/$module" && CGO_ENABLED=$cgo go build -p "$parallel" -trimpath -buildvcs=false -tags "$tags" \
    -ldflags "-s -w $stamps" -o "$directory/.$name.$$" "$package")
  mv "$directory/.$name.$$" "$directory/$name"
  echo "built $name in $((SECONDS - started)) s" >&2
}

build_all() { # directory [names]
  local directory=$1 only=" ${*:2} " name module package cgo tags variable value
  mkdir -p "$directory"
  trap 'rm -f "$directory"/.*.$$' EXIT
  while read -r name module package cgo tags variable value; do
    if [ -z "$name" ] || [ "${name:0:1}" = "#" ]; then continue; fi
    if [ $# -gt 1 ] && [[ $only != *" $name "* ]]; then continue; fi
    build_one "$directory" "$name" "$module" "$package" "$cgo" "$tags" "$variable" "$value"
  done <"$modules/components.txt"
}

directory=$(bin_dir)
if [ "${1:-}" != --print-dir ]; then build_all "$directory" "$@"; fi
echo "$directory"
