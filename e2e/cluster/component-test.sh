#!/usr/bin/env bash
# Shows that a component of a machine is started once, and found by whoever stops it, however soon. Starts a machine without a
# network and no cluster; takes a second.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR
TESSERA_E2E_RUNDIR=$(mktemp -d)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

record=$rundir/alone/pids/sleeper

clean_up() {
  if [ -e "$(machine_record alone)" ]; then machine_stop alone; fi
  rm -rf "$rundir"
}

trap clean_up EXIT
mkdir -p "$rundir/machines"
machine_start alone
echo "exec sleep infinity" >"$rundir/alone/sleeper.sh"

component_start alone sleeper
component_alive alone sleeper || fail "a component that was started does not pass for alive"
first=$(cat "$record")

if said=$(component_start alone sleeper 2>&1); then fail "a component was started beside itself"; fi
[[ $said == *"runs already"* ]] || fail "a component that runs is not started again for another reason: $said"
[ "$(cat "$record")" = "$first" ] || fail "a component that was refused is recorded"

component_stop alone sleeper KILL
component_gone alone sleeper || fail "a component that was stopped passes for alive"
component_start alone sleeper
component_stop alone sleeper TERM
component_start alone sleeper
[ "$(cat "$record")" != "$first" ] || fail "a component that was started again is not recorded"

# Numbers come again, and start times do not.
read -r pid _ <"$record"
echo "$pid 1" >"$record"
component_gone alone sleeper || fail "another process passes for the component"
say "components are started once"
