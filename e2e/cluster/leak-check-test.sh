#!/usr/bin/env bash
# Tests that down.sh fails and names the object if something of the cluster is left on the host:
# creates one leftover of each kind in turn. Starts no cluster; takes a second.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR
TESSERA_E2E_RUNDIR=$(mktemp -d)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

clean_up() {
  umount "$rundir/mounted" 2>/dev/null || true
  link_delete "$mark-leak"
  link_delete "$(machine_link leaked-machine)"
  rmdir "$hierarchy/$mark-e2e-leak" 2>/dev/null || true
  if [ -n "${inner:-}" ]; then kill -KILL "$inner" 2>/dev/null || true; fi
  rm -rf "$rundir"
}

expect_found() { # kind
  local output
  if output=$("$here/down.sh" 2>&1); then fail "down.sh did not report a leftover $1"; fi
  [[ $output == *"$1"* ]] || fail "down.sh failed without naming the $1: $output"
}

read -r hierarchy < <(cgroup_hierarchies)
trap clean_up EXIT
"$here/down.sh" || fail "down.sh fails on a clean host"

mkdir "$rundir/mounted"
mount -t tmpfs tmpfs "$rundir/mounted"
expect_found "mount $rundir/mounted"
umount "$rundir/mounted"

ip link add "$mark-leak" type bridge
expect_found "network link $mark-leak"
ip link delete "$mark-leak"

mkdir "$hierarchy/$mark-e2e-leak"
expect_found "cgroup $hierarchy/$mark-e2e-leak"
rmdir "$hierarchy/$mark-e2e-leak"

# A process with another start time than the recorded one is not killed, but processes in the
# recorded PID namespace are reported.
unshare --pid --fork --kill-child sleep 1000 2>/dev/null &
pid=$!
wait_for "a process in its own namespace" pgrep --parent "$pid"
inner=$(pgrep --parent "$pid")
mkdir -p "$rundir/machines"
echo "$inner 1 $(readlink "/proc/$inner/ns/pid")" >"$rundir/machines/leaked-machine"
expect_found "process $inner of leaked-machine"
mkdir "$rundir/stopped"
boot_ticks >"$rundir/stopped/leaked-machine"
expect_found "process $inner of leaked-machine"
echo 0 >"$rundir/stopped/leaked-machine"
"$here/down.sh" || fail "down.sh reports a process that began after its machine ended"
mkdir -p "$rundir/machines"
echo "$inner 1 $(readlink "/proc/$inner/ns/pid")" >"$rundir/machines/leaked-machine"
kill -KILL "$inner"
wait "$pid" 2>/dev/null || true
wait_for "the process to end" namespace_is_empty "$(cut -d' ' -f3 "$rundir/machines/leaked-machine")"

# The network link of a killed machine may exist longer than its processes.
echo "0 1 pid:[0]" >"$rundir/machines/leaked-machine"
ip link add "$(machine_link leaked-machine)" type bridge
"$here/down.sh" || fail "down.sh does not delete the link of a stopped machine"

"$here/down.sh" || fail "down.sh fails although nothing is left"
info "leak check test passed"
