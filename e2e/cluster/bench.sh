#!/usr/bin/env bash
# make bench-cluster: how many pods a real control plane binds per second on nodes without kubelets, with Tessera and with
# kube-scheduler allocating. Each round has a control plane of its own, so that none finds what another has left.
#
#   bench.sh [OPTIONS]     bench.sh --help lists them
#
# The control plane is a machine that no network reaches (lib/machine.sh): it may run beside the cluster of up.sh, and all of its
# processes end with its first. State: $TESSERA_E2E_RUNDIR (default /tmp/tessera-bench-cluster); its logs/ holds every
# component's log, by round. The programs are release builds ($TESSERA_E2E_PROFILE).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TESSERA_E2E_RUNDIR=${TESSERA_E2E_RUNDIR:-/tmp/tessera-bench-cluster}
export TESSERA_E2E_PROFILE=${TESSERA_E2E_PROFILE:-release}
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

program=$cargo_output/tessera-cluster-bench
namespace=tessera-system
rounds=$rundir/rounds.jsonl

check_preconditions() {
  local tool
  [ "$(id -u)" -eq 0 ] || fail "the control plane needs root: it runs in namespaces of its own"
  case $rundir/ in
    /run/* | /var/run/* | /var/lib/* | /var/log/*) fail "TESSERA_E2E_RUNDIR must lie outside /run, /var/lib, /var/log: machines have their own" ;;
  esac
  for tool in ip openssl unshare nsenter; do
    command -v "$tool" >/dev/null || fail "$tool is missing: run $here/install-deps.sh"
  done
}

finish() {
  local status=$? leftovers
  trap - EXIT
  trap '' INT TERM # the way down is not interrupted
  machines_stop
  leftovers=$(machine_leftovers)
  if [ -n "$leftovers" ]; then
    say "left behind by $rundir:"
    echo "$leftovers" >&2
    status=1
  elif [ "$status" -ne 0 ]; then
    say "the logs are in $logs"
  fi
  clear_state
  exit "$status"
}

# Everything but the logs.
clear_state() {
  if [ -d "$rundir" ]; then find "$rundir" -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf {} +; fi
}

# Whoever holds the lock may clear away what a killed run left.
lock() {
  exec 9>"$rundir.lock"
  flock --nonblock 9 || fail "another run uses $rundir"
  machines_stop
  clear_state
  rm -rf "$logs"
  mkdir -p "$rundir"
}

# The API server is reached from within the machine only.
kubectl_admin() { machine_exec "$control_plane" "$bin/kubectl" --kubeconfig "$kubeconfig" "$@"; }

machine_up() {
  local at
  machine_start "$control_plane"
  for at in "${address[$control_plane]}" "$service_address"; do
    machine_exec "$control_plane" ip address add "$at/32" dev lo
  done
}

# Classes, rights and admission policies of the chart, without its pods.
chart_apply() { # allocator
  local mode=managed
  if [ "$1" = stock ]; then mode=stock; fi
  kubectl_admin create namespace "$namespace"
  "$bin/helm" template tessera "$repository/deploy/chart/tessera" --namespace "$namespace" --set "mode=$mode" \
    --show-only templates/rbac.yaml --show-only templates/admission-policies.yaml --show-only templates/deviceclasses.yaml |
    kubectl_admin apply --filename -
}

# As the Deployment of the chart runs it, under the same service account.
controller_start() {
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
  echo "exec '$cargo_output/$account' --kubeconfig '$directory/$account.kubeconfig' --namespace $namespace" \
    "--identity bench --metrics-address 127.0.0.1:9401" >"$directory/$account.sh"
  component_start "$control_plane" "$account"
}

round() { # number, allocator, limits, options...
  local number=$1 allocator=$2 directory=$rundir/$control_plane
  kube_api_qps=$3
  shift 3
  logs=$rundir/logs/$number-$allocator-$kube_api_qps
  mkdir -p "$logs"
  machine_up
  control_plane_components_start
  chart_apply "$allocator" >"$logs/chart.log"
  if [ "$allocator" = tessera ]; then controller_start >>"$logs/chart.log"; fi
  machine_exec "$control_plane" env KUBECONFIG="$kubeconfig" "$program" round "$@" \
    --allocator "$allocator" --limit "$kube_api_qps" --pids "$directory/pids" >>"$rounds"
  machine_stop "$control_plane"
  rm -rf "$directory" "$(machine_record "$control_plane")"
}

build() {
  (
    cd "$repository"
    cargo build --locked --profile "$cargo_profile" --package=tessera-e2e --bin=tessera-cluster-bench
    # By itself: together they would share the features of what they depend on.
    cargo build --locked --profile "$cargo_profile" --package=tessera-controller
  )
}

all_rounds() { # plan, options...
  local plan=$1 number=0 allocator limits
  shift
  pki_create
  while read -r allocator limits <&3; do
    number=$((number + 1))
    say "round $number of $(wc -l <<<"$plan"): $allocator, client limits $limits"
    round "$number" "$allocator" "$limits" "$@"
  done 3<<<"$plan"
}

build
plan=$("$program" plan "$@")
if [[ ! $plan =~ ^(stock|tessera)\  ]]; then # --help
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
