#!/usr/bin/env bash
# Starts the e2e cluster: a real Kubernetes control plane and two nodes with fake GPUs, on this machine, without Docker.
# Needs root and the binaries of build.sh. Prints the KUBECONFIG on stdout. If anything fails on the way, or on an
# interrupt, what was started is taken down again (keep it for a look with TESSERA_E2E_KEEP=1).
#
# State: $TESSERA_E2E_RUNDIR (default /tmp/tessera-e2e); its logs/ holds every component's log.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

check_preconditions() {
  [ "$(id -u)" -eq 0 ] || fail "the cluster needs root: it makes namespaces, a bridge and cgroups"
  case $rundir/ in
    /run/* | /var/run/* | /var/lib/* | /var/log/*) fail "TESSERA_E2E_RUNDIR must lie outside /run, /var/lib, /var/log: nodes have their own" ;;
  esac
  if [ -e "$rundir/machines" ]; then fail "$rundir holds a cluster already: run $here/down.sh first"; fi
  local tool
  for tool in ip openssl jq unshare nsenter gcc; do
    command -v "$tool" >/dev/null || fail "$tool is missing: run $here/install-deps.sh"
  done
}

abandon() {
  local status=$?
  trap - EXIT
  if [ "$status" -eq 0 ]; then return; fi
  if [ "${TESSERA_E2E_KEEP:-}" = 1 ]; then
    say "kept for a look: $rundir (end it with $here/down.sh)"
  else
    "$here/down.sh" || true
  fi
  exit "$status"
}

start() {
  local node started=$SECONDS
  rm -rf "$logs" # of the run before
  mkdir -p "$rundir/machines" "$logs"
  bin=${bin:-$("$here/build.sh")}
  echo "$bin" >"$rundir/bin"
  host_settings_save
  pki_create
  "$here/images.sh" pause
  bridge_start
  control_plane_start
  routes_add
  say "API server ready after $((SECONDS - started)) s (client limits of controller-manager and scheduler: $kube_api_qps/s)"
  for node in "${node_names[@]}"; do node_start "$node"; done
  for node in "${node_names[@]}"; do wait_for "node $node to be Ready" node_ready "$node"; done
  say "nodes ready after $((SECONDS - started)) s"
}

check_preconditions
trap abandon EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start
echo "$kubeconfig"
