#!/usr/bin/env bash
# make bench-cluster: measures the pods per second that a real control plane binds on hollow nodes,
# with Tessera and with kube-scheduler as allocator. Each round has a new control plane.
#
#   bench.sh [OPTIONS]     bench.sh --help lists them
#
# The control plane runs in a machine without a network (lib/machine.sh), so it may run beside the
# cluster of up.sh, and all its processes end with the machine's first process. State is in
# $TESSERA_E2E_RUNDIR (default /tmp/tessera-bench-cluster); its logs/ contains the components' logs
# by round. Programs are release builds ($TESSERA_E2E_PROFILE). $TESSERA_NOMINATE_NODES (auto,
# always, never) is passed to the controller.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR=${TESSERA_E2E_RUNDIR:-/tmp/tessera-bench-cluster}
export TESSERA_E2E_PROFILE=${TESSERA_E2E_PROFILE:-release}
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

program=$cargo_output/tessera-cluster-bench
namespace=tessera-system
rounds=$rundir/rounds.jsonl
# Each pod of e2e/src/throughput/load.rs selects its dialect by a label.
dialects='{"4paradigm": {}, "vgpu-manager": {}, "volcano": {}, "elastic": {}, "gpushare": {}}'

check_preconditions() {
  local tool
  [ "$(id -u)" -eq 0 ] || fail "the control plane needs root to create namespaces"
  case $rundir/ in
    /run/* | /var/run/* | /var/lib/* | /var/log/*)
      fail "TESSERA_E2E_RUNDIR must be outside /run, /var/lib and /var/log, which machines mount" ;;
  esac
  for tool in ip openssl unshare nsenter; do
    command -v "$tool" >/dev/null || fail "$tool is missing: run $here/install-deps.sh"
  done
}

finish() {
  local status=$? leftovers
  trap - EXIT
  trap '' INT TERM # the cleanup must not be interrupted
  machines_stop
  leftovers=$(machine_leftovers)
  if [ -n "$leftovers" ]; then
    info "left by $rundir:"
    echo "$leftovers" >&2
    status=1
  elif [ "$status" -ne 0 ]; then
    info "the logs are in $logs"
  fi
  clear_state
  exit "$status"
}

# Removes all state except the logs.
clear_state() {
  [ -d "$rundir" ] || return 0
  find "$rundir" -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf {} +
}

# Removes the state of an earlier, killed run. Only the holder of the lock may do this.
lock() {
  exec 9>"$rundir.lock"
  flock --nonblock 9 || fail "another run uses $rundir"
  machines_stop
  clear_state
  rm -rf "$logs"
  mkdir -p "$rundir"
}

# The API server is reachable only from within the machine.
kubectl_admin() { machine_exec "$control_plane" "$bin/kubectl" --kubeconfig "$kubeconfig" "$@"; }

start_machine() {
  local at
  machine_start "$control_plane"
  for at in "${address[$control_plane]}" "$service_address"; do
    machine_exec "$control_plane" ip address add "$at/32" dev lo
  done
}

# Applies the chart's classes, RBAC and admission policies, without its pods.
apply_chart() { # allocator
  local options=(--set mode=managed) parts=(rbac admission-policies deviceclasses gpuquotas gpudefaults gpuresizes) part
  case $1 in
    stock) options=(--set mode=stock) parts=(rbac admission-policies deviceclasses) ;;
    dialects)
      options+=(--set dialects.enabled=true --set-json "dialects.settings=$dialects")
      parts+=(webhook dialects) ;;
  esac
  for part in "${parts[@]}"; do options+=(--show-only "templates/$part.yaml"); done
  kubectl_admin create namespace "$namespace"
  "$bin/helm" template tessera "$repository/deploy/chart/tessera" --namespace "$namespace" "${options[@]}" |
    kubectl_admin apply --filename -
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

# Starts the controller under its service account, as the chart's Deployment does.
start_controller() { # flags...
  local directory=$rundir/$control_plane account=tessera-controller token
  kubectl_admin create serviceaccount "$account" --namespace "$namespace"
  token=$(kubectl_admin create token "$account" --namespace "$namespace" --duration 2h)
  cat >"$directory/$account.kubeconfig" <<END
apiVersion: v1
kind: Config
clusters:
- name: e2e
  cluster: {server: "https://${address[$control_plane]}:443", certificate-authority: "$pki/ca.crt"}
users: [{name: $account, user: {token: $token}}]
contexts: [{name: e2e, context: {cluster: e2e, user: $account}}]
current-context: e2e
END
  echo "exec '$cargo_output/$account' --kubeconfig '$directory/$account.kubeconfig'" \
    "--namespace $namespace --identity bench --metrics-address 127.0.0.1:9401" \
    "--nominate-nodes ${TESSERA_NOMINATE_NODES:-auto} $*" >"$directory/$account.sh"
  component_start "$control_plane" "$account"
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
    tessera | converted) start_controller >>"$logs/chart.log" ;;
    dialects)
      serve_webhook >>"$logs/chart.log"
      start_controller --dialects "$directory/dialects.yaml" --webhook-address 0.0.0.0:9443 >>"$logs/chart.log" ;;
  esac
  machine_exec "$control_plane" env KUBECONFIG="$kubeconfig" "$program" round "$@" \
    --allocator "$allocator" --limit "$kube_api_qps" --pids "$directory/pids" >>"$rounds"
  machine_stop "$control_plane"
  rm -rf "$directory" "$(machine_record "$control_plane")"
}

build() {
  (
    cd "$repository"
    cargo build --locked --profile "$cargo_profile" \
      --package=tessera-e2e --bin=tessera-cluster-bench
    # A separate build: in one command the packages would share the features of their dependencies.
    cargo build --locked --profile "$cargo_profile" --package=tessera-controller
  )
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

build
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
  bin=$("$here/build.sh" etcd kube-apiserver kube-controller-manager kube-scheduler kubectl helm)
  all_rounds "$plan" "$@"
  "$program" report "$@" <"$rounds"
} 9>&-
