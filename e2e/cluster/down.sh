#!/usr/bin/env bash
# Stops the e2e cluster: ends everything that up.sh recorded, then checks the host for leftovers. If
# it finds any, it prints a list and exits with status 1. Removes $TESSERA_E2E_RUNDIR except its
# logs/.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

cluster_stop
leftovers=$(cluster_leftovers)
if [ -n "$leftovers" ]; then
  info "left by the cluster of $rundir:"
  echo "$leftovers" >&2
  exit 1
fi
if [ -d "$rundir" ]; then find "$rundir" -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf {} +; fi
