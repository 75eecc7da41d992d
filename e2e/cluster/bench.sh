#!/usr/bin/env bash
# make bench-cluster: measures the pods per second that a real control plane binds on hollow nodes,
# with Tessera and with kube-scheduler as allocator. Each round has a new control plane.
#
#   bench.sh [OPTIONS]     bench.sh --help lists them
#
# The control plane has no nodes (lib/control-plane-alone.sh). State is in $TESSERA_E2E_RUNDIR
# (default /tmp/tessera-bench-cluster); its logs/ contains the components' logs by round. Programs
# are release builds ($TESSERA_E2E_PROFILE). $TESSERA_NOMINATE_NODES (auto, always, never) is passed
# to the controller.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR=${TESSERA_E2E_RUNDIR:-/tmp/tessera-bench-cluster}
export TESSERA_E2E_PROFILE=${TESSERA_E2E_PROFILE:-release}
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"
# shellcheck source=lib/control-plane-alone.sh
source "$here/lib/control-plane-alone.sh"

program=$cargo_output/tessera-cluster-bench
rounds=$rundir/rounds.jsonl
nominate=(--nominate-nodes "${TESSERA_NOMINATE_NODES:-auto}")
# Each pod of e2e/src/throughput/load.rs selects its dialect by a label.
dialects='{"4paradigm": {}, "vgpu-manager": {}, "volcano": {}, "elastic": {}, "gpushare": {}}'

# Applies the chart's classes, RBAC and admission policies, without its pods.
apply_chart() { # allocator
  local options=(--set mode=managed)
  local parts="rbac admission-policies deviceclasses gpuquotas gpudefaults gpuresizes"
  case $1 in
    stock)
      options=(--set mode=stock)
      parts="rbac admission-policies deviceclasses" ;;
    dialects)
      options+=(--set dialects.enabled=true --set-json "dialects.settings=$dialects")
      parts+=" webhook dialects" ;;
  esac
  apply_chart_parts "$parts" "${options[@]}"
}

# Has the API server reach the webhook of the controller, which is no pod here.
serve_webhook() {
  kubectl_admin apply --filename - <<END
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: tessera-webhook-bench
  namespace: $namespace
  labels: {kubernetes.io/service-name: tessera-webhook}
addressType: IPv4
ports: [{name: webhook, port: 9443, protocol: TCP}]
endpoints: [{addresses: ["${address[$control_plane]}"], conditions: {ready: true}}]
END
  kubectl_admin get configmap tessera-dialects --namespace "$namespace" \
    --output 'jsonpath={.data.settings\.yaml}' >"$rundir/$control_plane/dialects.yaml"
}

round() { # number, allocator, limits, options...
  local number=$1 allocator=$2 directory=$rundir/$control_plane
  kube_api_qps=$3
  shift 3
  logs=$rundir/logs/$number-$allocator-$kube_api_qps
  mkdir -p "$logs"
  start_machine
  control_plane_components_start
  apply_chart "$allocator" >"$logs/chart.log"
  case $allocator in
    tessera | converted) start_controller "${nominate[@]}" >>"$logs/chart.log" ;;
    dialects)
      serve_webhook >>"$logs/chart.log"
      start_controller "${nominate[@]}" --dialects "$directory/dialects.yaml" --webhook-address 0.0.0.0:9443 >>"$logs/chart.log" ;;
  esac
  machine_exec "$control_plane" env KUBECONFIG="$kubeconfig" "$program" round "$@" \
    --allocator "$allocator" --limit "$kube_api_qps" --pids "$directory/pids" >>"$rounds"
  machine_stop "$control_plane"
  rm -rf "$directory" "$(machine_record "$control_plane")"
}

all_rounds() { # plan, options...
  local plan=$1 number=0 allocator limits
  shift
  pki_create
  while read -r allocator limits <&3; do
    number=$((number + 1))
    info "round $number of $(wc -l <<<"$plan"): $allocator, client limits $limits"
    round "$number" "$allocator" "$limits" "$@"
  done 3<<<"$plan"
}

build_programs tessera-cluster-bench
plan=$("$program" plan "$@")
if [[ ! $plan =~ ^(stock|tessera|dialects|converted)\  ]]; then # --help
  echo "$plan"
  exit
fi
check_preconditions
lock
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
{
  build_components
  all_rounds "$plan" "$@"
  "$program" report "$@" <"$rounds"
} 9>&-
