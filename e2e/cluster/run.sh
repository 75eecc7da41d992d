#!/usr/bin/env bash
# make e2e: the whole of Tessera on a real Kubernetes cluster on this machine. Builds what is missing, starts the cluster,
# installs the chart with helm, runs the tests, takes everything down and checks that nothing is left on the host, also
# after a failure or an interrupt.
#
#   run.sh [ARGUMENT...]     arguments of the test program, such as parts of names of tests
#
# TESSERA_E2E_KEEP=1 leaves the cluster up after the tests (down.sh ends it).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

# The last lines of every log, and what the cluster says about its pods: enough to begin with where only this output is
# kept. Whoever ends this script does not wait for an API server that is gone.
report_failure() {
  local log
  say "failed; the disk and the cluster's state:"
  df --human-readable "$rundir" || true
  kubectl_in_time get nodes,pods,resourceclaims --all-namespaces --output wide || true
  kubectl_in_time get events --all-namespaces --field-selector type=Warning --sort-by .lastTimestamp | tail -n 30 || true
  kubectl_in_time get resourceslices || true
  for log in daemonset/tessera-driver deployment/tessera-controller; do
    say "log of $log:"
    kubectl_in_time logs --namespace tessera-system "$log" --all-pods --tail 40 || true
  done
  for log in "$logs"/*.log; do
    if [ -s "$log" ]; then
      say "end of $log:"
      tail -n 8 "$log" | cut -c1-400
    fi
  done
}

kubectl_in_time() { kubectl_admin --request-timeout=10s "$@"; }

finish() {
  local status=$?
  trap - EXIT
  trap '' INT TERM # the way down is not interrupted
  if [ "$status" -ne 0 ] && [ -f "$kubeconfig" ]; then report_failure >&2; fi
  if [ "${TESSERA_E2E_KEEP:-}" = 1 ]; then
    say "kept: export KUBECONFIG=$kubeconfig; end it with $here/down.sh"
  elif ! "$here/down.sh"; then
    status=1
  else
    say "the cluster is down and left nothing behind"
  fi
  exit "$status"
}

# One run at a time. Whoever holds the lock may clear away what a killed run left.
lock() {
  exec 9>"$rundir.lock"
  flock --nonblock 9 || fail "another run uses $rundir"
  if [ -e "$rundir/machines" ]; then
    say "clearing away a cluster that an earlier run left"
    "$here/down.sh" 9>&-
  fi
}

install_tessera() {
  local node
  "$here/images.sh" load
  for node in "${node_names[@]}"; do node_install_gpus "$node" "$programs"; done
  "$bin/helm" install tessera "$repository/deploy/chart/tessera" --namespace tessera-system --create-namespace \
    --values "$here/values.yaml" --wait --timeout "${patience}s" >"$logs/helm.log"
  for node in "${node_names[@]}"; do wait_for "the GPUs of $node to be published" node_publishes "$node"; done
  say "tessera installed after $SECONDS s"
}

# The tests' program, and what it looks for beside itself.
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
  # A filter that matches no test is told before anything starts.
  "$programs/deps/cluster" --list "$@" >/dev/null
  say "built after $SECONDS s"
  export TESSERA_E2E_BIN=$bin TESSERA_E2E_RUNDIR=$rundir TESSERA_E2E_NODE=$here/node.sh KUBECONFIG=$kubeconfig
  "$here/up.sh"
  install_tessera
  run_tests "$@"
  say "passed after $SECONDS s"
} 9>&-
