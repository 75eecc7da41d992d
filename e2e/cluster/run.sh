#!/usr/bin/env bash
# make e2e: runs Tessera on a real Kubernetes cluster on this machine. Builds missing components,
# starts the cluster, installs the chart with helm, runs the tests, stops the cluster, and checks
# for leftovers on the host, also after a failure or an interrupt.
#
#   run.sh [ARGUMENT...]     arguments of the test program, for example filters of test names
#
# TESSERA_E2E_KEEP=1 keeps the cluster after the tests (down.sh stops it).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

# Prints the end of each log and the state of the cluster, for CI systems that keep only this
# output. Requests have a time limit, because the API server may be down.
report_failure() {
  local log
  info "failed; state of the disk and the cluster:"
  df --human-readable "$rundir" || true
  kubectl_limited get nodes,pods,resourceclaims --all-namespaces --output wide || true
  kubectl_limited get events --all-namespaces --field-selector type=Warning --sort-by .lastTimestamp | tail -n 30 || true
  kubectl_limited get resourceslices || true
  for log in daemonset/tessera-driver deployment/tessera-controller; do
    info "log of $log:"
    kubectl_limited logs --namespace tessera-system "$log" --all-pods --tail 40 || true
  done
  for log in "$logs"/*.log; do
    if [ -s "$log" ]; then
      info "end of $log:"
      tail -n 8 "$log" | cut -c1-400
    fi
  done
}

kubectl_limited() { kubectl_admin --request-timeout=10s "$@"; }

finish() {
  local status=$?
  trap - EXIT
  trap '' INT TERM # the cleanup must not be interrupted
  if [ "$status" -ne 0 ] && [ -f "$kubeconfig" ]; then report_failure >&2; fi
  if [ "${TESSERA_E2E_KEEP:-}" = 1 ]; then
    info "cluster kept: export KUBECONFIG=$kubeconfig; stop it with $here/down.sh"
  elif ! "$here/down.sh"; then
    status=1
  else
    info "cluster stopped, no leftovers"
  fi
  exit "$status"
}

# Allows one run at a time, and stops the cluster of an earlier, killed run.
lock() {
  exec 9>"$rundir.lock"
  flock --nonblock 9 || fail "another run uses $rundir"
  if [ -e "$rundir/machines" ]; then
    info "stopping the cluster of an earlier run"
    "$here/down.sh" 9>&-
  fi
}

install_tessera() {
  local node
  "$here/images.sh" load
  for node in "${node_names[@]}"; do node_install_gpus "$node" "$programs"; done
  "$bin/helm" install tessera "$repository/deploy/chart/tessera" --namespace tessera-system --create-namespace \
    --values "$here/values.yaml" --wait --timeout "${wait_limit}s" >"$logs/helm.log"
  for node in "${node_names[@]}"; do wait_for "the GPUs of $node to be published" node_publishes "$node"; done
  info "tessera installed after $SECONDS s"
}

# Builds the test program and the programs that it expects in its directory.
build_tests() {
  local test
  cd "$repository"
  cargo build --locked --profile "$cargo_profile" --package tessera-cli
  test=$(cargo test --locked --profile "$cargo_profile" --package tessera-e2e --test cluster --no-run \
    --message-format json-render-diagnostics | jq --raw-output 'select(.executable and .target.name == "cluster").executable')
  rm -rf "$programs"
  install -D "$test" "$programs/deps/cluster"
  install --target-directory "$programs" "$cargo_output"/{kubectl-tessera,tessera-fake-world,fake-mps-control,libnvidia_ml.so,libcuda.so}
}

run_tests() {
  cd "$repository/e2e"
  PATH=$bin:$PATH TESSERA_E2E_HELM_VALUES=$here/values.yaml "$programs/deps/cluster" "$@"
}

lock
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
{
  "$here/leak-check-test.sh"
  "$here/component-test.sh"
  bin=$("$here/build.sh")
  "$here/images.sh" tessera
  build_tests
  # Reports a filter without a match before the cluster starts.
  "$programs/deps/cluster" --list "$@" >/dev/null
  info "built after $SECONDS s"
  export TESSERA_E2E_BIN=$bin TESSERA_E2E_RUNDIR=$rundir TESSERA_E2E_NODE=$here/node.sh KUBECONFIG=$kubeconfig
  "$here/up.sh"
  install_tessera
  run_tests "$@"
  info "passed after $SECONDS s"
} 9>&-
