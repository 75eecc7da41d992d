# shellcheck shell=bash
#
# A control plane without nodes, in a machine without a network (machine.sh). So it may run beside
# the cluster of up.sh, and all its processes end with the machine's first process.

namespace=tessera-system
# The machine has no link, and that of the cluster's control plane is not deleted with it.
# shellcheck disable=SC2034
mark=tessera-alone

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

# Builds the controller and a program of the package tessera-e2e.
build_programs() { # name of the program
  (
    cd "$repository"
    cargo build --locked --profile "$cargo_profile" --package=tessera-e2e --bin="$1"
    # A separate build: in one command the packages would share the features of their dependencies.
    cargo build --locked --profile "$cargo_profile" --package=tessera-controller
  )
}

# Builds the components of Kubernetes, and sets the directory of their programs.
build_components() {
  bin=$("$here/build.sh" etcd kube-apiserver kube-controller-manager kube-scheduler kubectl helm)
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

# Creates the namespace of the chart and its parts for a control plane without pods.
apply_chart_parts() { # parts, helm options...
  local options=("${@:2}") part
  for part in $1; do options+=(--show-only "templates/$part.yaml"); done
  kubectl_admin create namespace "$namespace"
  "$bin/helm" template tessera "$repository/deploy/chart/tessera" --namespace "$namespace" "${options[@]}" |
    kubectl_admin apply --filename -
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
    "--namespace $namespace --identity bench --metrics-address 127.0.0.1:9401 $*" >"$directory/$account.sh"
  component_start "$control_plane" "$account"
}
