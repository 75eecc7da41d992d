#!/usr/bin/env bash
# Tests that a component of a machine is started only once, and that it can be stopped immediately
# after its start. Starts a machine without a network, and no cluster; takes a second.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR
TESSERA_E2E_RUNDIR=$(mktemp -d)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

record=$rundir/test-machine/pids/sleeper

clean_up() {
  if [ -e "$(machine_record test-machine)" ]; then machine_stop test-machine; fi
  rm -rf "$rundir"
}

trap clean_up EXIT
mkdir -p "$rundir/machines"
machine_start test-machine
echo "exec sleep infinity" >"$rundir/test-machine/sleeper.sh"

component_start test-machine sleeper
component_running test-machine sleeper || fail "a started component is not reported as running"
first=$(cat "$record")

if output=$(component_start test-machine sleeper 2>&1); then fail "a running component was started again"; fi
[[ $output == *"is already running"* ]] || fail "unexpected error for a running component: $output"
[ "$(cat "$record")" = "$first" ] || fail "the record was changed by a refused start"

component_stop test-machine sleeper KILL
component_stopped test-machine sleeper || fail "a stopped component is reported as running"
component_start test-machine sleeper
component_stop test-machine sleeper TERM
component_start test-machine sleeper
[ "$(cat "$record")" != "$first" ] || fail "a restarted component is not recorded"

# Process IDs are reused; start times differ.
read -r pid _ <"$record"
echo "$pid 1" >"$record"
component_stopped test-machine sleeper || fail "another process is reported as the component"
info "component test passed"
