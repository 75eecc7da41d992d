#!/usr/bin/env bash
# make karpenter-check: Karpenter adds nodes for pods that wait for GPUs of Tessera, and removes
# them, under each fence. Karpenter and its kwok provider are built from their Go module
# (testing/karpenter), the control plane and tessera-controller are real, and
# tessera-karpenter-trial plays the driver and the kubelet of each node.
#
#   karpenter.sh [rule|taint]...     both, if none is given
#
# The control plane has no nodes (lib/control-plane-alone.sh). State is in $TESSERA_E2E_RUNDIR
# (default /tmp/tessera-karpenter); its logs/ contains the components' logs by fence.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR=${TESSERA_E2E_RUNDIR:-/tmp/tessera-karpenter}
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"
# shellcheck source=lib/control-plane-alone.sh
source "$here/lib/control-plane-alone.sh"

karpenter=$repository/testing/karpenter
trial=$cargo_output/tessera-karpenter-trial

# Builds Karpenter, and prints the directory of its module with the definitions of its objects.
build_karpenter() { # directory
  mkdir -p "$1"
  cd "$karpenter"
  CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$1/karpenter" .
  go list -m -f '{{.Dir}}' sigs.k8s.io/karpenter
}

# Applies Karpenter's definitions and a NodePool of the one instance type.
apply_karpenter() { # module directory
  local file
  for file in "$1"/pkg/apis/crds/*.yaml "$1"/kwok/apis/crds/*.yaml; do
    kubectl_admin apply --server-side --filename - <"$file"
  done
  kubectl_admin wait --for condition=Established crd --all --timeout 60s
  kubectl_admin apply --filename - <"$karpenter/nodepool.yaml"
}

start_karpenter() { # fence
  local directory=$rundir/$control_plane
  "$trial" slices --fence "$1" >"$directory/slices.json"
  echo "export KUBECONFIG='$kubeconfig' SYSTEM_NAMESPACE=default SLICES_FILE='$directory/slices.json'
exec '$rundir/bin/karpenter' --disable-leader-election=true --ignore-dra-requests=false \\
  --instance-types-file-path '$karpenter/instance-types.json' \\
  --batch-idle-duration 1s --metrics-port 18080 --health-probe-port 18081" \
    >"$directory/karpenter.sh"
  component_start "$control_plane" karpenter
}

round() { # fence, module directory
  local directory=$rundir/$control_plane
  logs=$rundir/logs/$1
  mkdir -p "$logs"
  start_machine
  control_plane_components_start
  apply_chart_parts "rbac admission-policies deviceclasses gpuquotas gpudefaults gpuresizes$(
    [ "$1" = taint ] || echo ' fence')" --set mode=managed --set "fence=$1" >"$logs/chart.log"
  start_controller --nominate-nodes never >>"$logs/chart.log"
  apply_karpenter "$2" >"$logs/karpenter-objects.log"
  start_karpenter "$1"
  machine_exec "$control_plane" env KUBECONFIG="$kubeconfig" "$trial" run --fence "$1"
  machine_stop "$control_plane"
  rm -rf "$directory" "$(machine_record "$control_plane")"
}

[ $# -gt 0 ] || set -- rule taint
for fence; do
  case $fence in
    rule | taint) ;;
    *) fail "invalid fence '$fence': expected rule or taint" ;;
  esac
done
check_preconditions
build_programs tessera-karpenter-trial
build_components
lock
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
{
  info "building Karpenter (minutes the first time)"
  module=$(build_karpenter "$rundir/bin")
  pki_create
  for fence; do
    info "fence: $fence"
    round "$fence" "$module"
  done
} 9>&-
