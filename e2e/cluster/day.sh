#!/usr/bin/env bash
# make bench-day-cluster: a rolling day on a real control plane with hollow nodes. Pods and groups
# of three priorities arrive, run, are preempted and end; tessera-cluster-day plays their kubelets.
#
#   day.sh [OPTIONS]     day.sh --help lists them
#
# The control plane has no nodes (lib/control-plane-alone.sh). State is in $TESSERA_E2E_RUNDIR
# (default /tmp/tessera-cluster-day); its logs/ contains the components' logs. Programs are release
# builds ($TESSERA_E2E_PROFILE).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR=${TESSERA_E2E_RUNDIR:-/tmp/tessera-cluster-day}
export TESSERA_E2E_PROFILE=${TESSERA_E2E_PROFILE:-release}
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"
# shellcheck source=lib/control-plane-alone.sh
source "$here/lib/control-plane-alone.sh"

program=$cargo_output/tessera-cluster-day

day() { # options...
  local directory=$rundir/$control_plane
  # Without client limits, which would decide the result.
  kube_api_qps=5000
  pki_create
  mkdir -p "$logs"
  start_machine
  control_plane_components_start
  apply_chart_parts "rbac admission-policies deviceclasses gpuquotas gpudefaults gpuresizes" \
    --set mode=managed >"$logs/chart.log"
  start_controller --nominate-nodes auto >>"$logs/chart.log"
  machine_exec "$control_plane" env KUBECONFIG="$kubeconfig" "$program" run "$@" \
    --pids "$directory/pids"
}

build_programs tessera-cluster-day
checked=$("$program" check "$@")
if [ "$checked" != checked ]; then # --help
  echo "$checked"
  exit
fi
check_preconditions
lock
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
{
  build_components
  day "$@"
} 9>&-
