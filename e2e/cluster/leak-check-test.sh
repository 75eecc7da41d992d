#!/usr/bin/env bash
# Shows that down.sh fails, and names the thing, when something of the cluster is left on the host: one leftover of each
# kind is planted in turn. Starts no cluster and takes a second.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR
TESSERA_E2E_RUNDIR=$(mktemp -d)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

clean_up() {
  umount "$rundir/mounted" 2>/dev/null || true
  link_delete "$mark-leak"
  link_delete "$(machine_link stray)"
  rmdir "$hierarchy/$mark-e2e-leak" 2>/dev/null || true
  if [ -n "${inner:-}" ]; then kill -KILL "$inner" 2>/dev/null || true; fi
  rm -rf "$rundir"
}

expect_found() { # kind
  local output
  if output=$("$here/down.sh" 2>&1); then fail "down.sh did not notice a leftover $1"; fi
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

# A record whose process is not the recorded one (its start time differs) is not killed, but what still lives in the
# recorded PID namespace is reported.
unshare --pid --fork --kill-child sleep 1000 2>/dev/null &
pid=$!
wait_for "a process in a namespace of its own" pgrep --parent "$pid"
inner=$(pgrep --parent "$pid")
mkdir -p "$rundir/machines"
echo "$inner 1 $(readlink "/proc/$inner/ns/pid")" >"$rundir/machines/stray"
expect_found "process $inner of stray"
kill -KILL "$inner"
wait "$pid" 2>/dev/null || true
wait_for "the process to end" namespace_is_empty "$(cut -d' ' -f3 "$rundir/machines/stray")"

# A machine that was killed a moment ago: its link may be there for longer than its processes.
echo "0 1 pid:[0]" >"$rundir/machines/stray"
ip link add "$(machine_link stray)" type bridge
"$here/down.sh" || fail "down.sh leaves the link of a machine that has ended"

"$here/down.sh" || fail "down.sh fails although nothing is left"
say "the leak check finds what it should"
