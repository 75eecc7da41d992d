#!/usr/bin/env bash
# Starts the e2e cluster on this machine, without Docker: a real Kubernetes control plane and two
# nodes with fake GPUs. Needs root and the binaries of build.sh. Prints the path of the kubeconfig
# on stdout. If the start fails or is interrupted, the cluster is stopped again (TESSERA_E2E_KEEP=1
# keeps it).
#
# State is in $TESSERA_E2E_RUNDIR (default /tmp/tessera-e2e); its logs/ contains the components'
# logs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

check_preconditions() {
  [ "$(id -u)" -eq 0 ] || fail "the cluster needs root to create namespaces, a bridge and cgroups"
  case $rundir/ in
    /run/* | /var/run/* | /var/lib/* | /var/log/*) fail "TESSERA_E2E_RUNDIR must be outside /run, /var/lib and /var/log, which nodes mount themselves" ;;
  esac
  if [ -e "$rundir/machines" ]; then fail "a cluster exists in $rundir: run $here/down.sh first"; fi
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
    info "cluster kept in $rundir (stop it with $here/down.sh)"
  else
    "$here/down.sh" || true
  fi
  exit "$status"
}

start() {
  local node started=$SECONDS
  rm -rf "$logs" # of the previous run
  mkdir -p "$rundir/machines" "$logs"
  bin=${bin:-$("$here/build.sh")}
  echo "$bin" >"$rundir/bin"
  host_settings_save
  pki_create
  "$here/images.sh" pause
  bridge_start
  control_plane_start
  routes_add
  info "API server ready after $((SECONDS - started)) s (client limits of controller-manager and scheduler: $kube_api_qps/s)"
  for node in "${node_names[@]}"; do node_start "$node"; done
  for node in "${node_names[@]}"; do wait_for "node $node to be Ready" node_ready "$node"; done
  info "nodes ready after $((SECONDS - started)) s"
}

check_preconditions
trap abandon EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start
echo "$kubeconfig"
