#!/usr/bin/env bash
# Takes the e2e cluster down: ends exactly what up.sh recorded, and then looks for anything that is left on the host.
# Exit status 1, and a list, if something is. Logs stay in $TESSERA_E2E_RUNDIR/logs; the rest of it is removed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

cluster_stop
leftovers=$(cluster_leftovers)
if [ -n "$leftovers" ]; then
  say "left behind by the cluster of $rundir:"
  echo "$leftovers" >&2
  exit 1
fi
if [ -d "$rundir" ]; then find "$rundir" -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf {} +; fi
