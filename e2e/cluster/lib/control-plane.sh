# shellcheck shell=bash
#
# The control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler on one machine.

# Flags for Kubernetes' PodGroups (KEP-4671).
workload_gates=
workload_api=

control_plane_start() {
  machine_start "$control_plane"
  machine_connect "$control_plane"
  # The service address is on this machine and the API server listens on port 443, so pods need no
  # kube-proxy.
  machine_exec "$control_plane" ip address add "$service_address/32" dev lo
  routes_add machine_exec "$control_plane"
  control_plane_components_start
}

# Starts the components on a machine whose addresses are set.
control_plane_components_start() {
  local directory=$rundir/$control_plane component
  for component in controller-manager scheduler; do
    pki_kubeconfig "$component" "$directory/$component.kubeconfig"
  done
  pki_kubeconfig admin "$kubeconfig"
  etcd_script "$directory"
  apiserver_script "$directory"
  controller_manager_script "$directory"
  scheduler_script "$directory" "$directory/scheduler.kubeconfig"

  component_start "$control_plane" etcd
  component_start "$control_plane" kube-apiserver
  wait_for "the API server" kubectl_admin get --raw /readyz
  component_start "$control_plane" kube-controller-manager
  component_start "$control_plane" kube-scheduler
  wait_for "the default service account" kubectl_admin get serviceaccount default
}

kubectl_admin() { "$bin/kubectl" --kubeconfig "$kubeconfig" "$@"; }

etcd_script() { # directory
  # No data outlives the run, so fsync is not needed.
  cat >"$1/etcd.sh" <<END
exec "$bin/etcd" --data-dir "$1/etcd" --unsafe-no-fsync --log-level warn \\
  --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \\
  --listen-peer-urls http://127.0.0.1:2380
END
}

apiserver_script() { # directory
  # InternalIP first: the node names cannot be resolved without DNS. Aggregator routing connects to
  # the pods of a webhook's Service, since there is no kube-proxy. Without a grace period for
  # watches, SIGTERM waits one minute for open watches (the default time-out).
  cat >"$1/kube-apiserver.sh" <<END
exec "$bin/kube-apiserver" --etcd-servers http://127.0.0.1:2379 \\
  --bind-address 0.0.0.0 --secure-port 443 --advertise-address ${address[$control_plane]} \\
  --service-cluster-ip-range $service_subnet \\
  --service-account-issuer https://kubernetes.default.svc \\
  --service-account-key-file "$pki/service-account.pub" \\
  --service-account-signing-key-file "$pki/service-account.key" \\
  --client-ca-file "$pki/ca.crt" --tls-cert-file "$pki/apiserver.crt" \\
  --tls-private-key-file "$pki/apiserver.key" \\
  --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction \\
  --allow-privileged=true --kubelet-client-certificate "$pki/apiserver-kubelet.crt" \\
  --kubelet-client-key "$pki/apiserver-kubelet.key" \\
  --kubelet-certificate-authority "$pki/ca.crt" --kubelet-preferred-address-types InternalIP \\
  --enable-aggregator-routing=true \\
  --max-requests-inflight 3000 --max-mutating-requests-inflight 1500 \\
  --shutdown-watch-termination-grace-period 5s $workload_gates $workload_api
END
}

controller_manager_script() { # directory
  local limits=
  if [ "$kube_api_qps" != default ]; then
    limits="--kube-api-qps $kube_api_qps --kube-api-burst $kube_api_qps"
  fi
  cat >"$1/kube-controller-manager.sh" <<END
exec "$bin/kube-controller-manager" --kubeconfig "$1/controller-manager.kubeconfig" \\
  --leader-elect=false --service-account-private-key-file "$pki/service-account.key" \\
  --root-ca-file "$pki/ca.crt" --use-service-account-credentials --bind-address 127.0.0.1 \\
  --cert-dir "$1/kube-controller-manager" $limits $workload_gates
END
}

scheduler_script() { # directory kubeconfig
  local limits=
  if [ "$kube_api_qps" != default ]; then limits=", qps: $kube_api_qps, burst: $kube_api_qps"; fi
  cat >"$1/scheduler.yaml" <<END
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: "$2"$limits}
leaderElection: {leaderElect: false}
END
  cat >"$1/kube-scheduler.sh" <<END
exec "$bin/kube-scheduler" --config "$1/scheduler.yaml" --bind-address 127.0.0.1 \\
  --cert-dir "$1/kube-scheduler" --authorization-always-allow-paths /healthz,/readyz,/livez,/metrics \\
  $workload_gates
END
}

# Restarts the control plane and the kubelets with Kubernetes' PodGroups and their claims, which are
# off by default, or without them.
pod_groups_switch() { # on|off
  local directory=$rundir/$control_plane component node
  case $1 in
    on)
      workload_gates='--feature-gates GenericWorkload=true,DRAWorkloadResourceClaims=true'
      workload_api='--runtime-config scheduling.k8s.io/v1beta1=true'
      ;;
    off) ;;
    *) fail "invalid state of PodGroups '$1': expected on or off" ;;
  esac
  apiserver_script "$directory"
  controller_manager_script "$directory"
  scheduler_script "$directory" "$directory/scheduler.kubeconfig"
  for component in kube-scheduler kube-controller-manager kube-apiserver; do
    component_stop "$control_plane" "$component" TERM
  done
  component_start "$control_plane" kube-apiserver
  wait_for "the API server" kubectl_admin get --raw /readyz
  component_start "$control_plane" kube-controller-manager
  component_start "$control_plane" kube-scheduler
  for node in "${node_names[@]}"; do
    kubelet_config "$node" "$rundir/$node"
    component_stop "$node" kubelet TERM
    component_start "$node" kubelet
  done
}

# Deletes the bindings of the chart's admission policies, which disables them, or restores them.
# They are changed in the order of their names, which the trials require.
policies_switch() { # off|on
  local saved=$rundir/policy-bindings.json kind=validatingadmissionpolicybindings
  case $1 in
    off)
      kubectl_admin get "$kind" --selector app.kubernetes.io/part-of=tessera --output json |
        jq '.items |= map(.metadata |= del(.resourceVersion, .uid, .creationTimestamp))' >"$saved"
      kubectl_admin delete "$kind" --selector app.kubernetes.io/part-of=tessera
      ;;
    on) kubectl_admin apply --filename "$saved" ;;
    *) fail "invalid state of the policies '$1': expected on or off" ;;
  esac
}

# Connects kube-scheduler to the API server through a proxy at that URL, which adds credentials;
# with `none`, directly.
scheduler_through() { # url
  local directory=$rundir/$control_plane kubeconfig=$rundir/$control_plane/scheduler.kubeconfig
  if [ "$1" != none ]; then
    kubeconfig=$directory/scheduler-through.kubeconfig
    cat >"$kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: e2e, cluster: {server: "$1"}}]
contexts: [{name: e2e, context: {cluster: e2e}}]
current-context: e2e
END
  fi
  scheduler_script "$directory" "$kubeconfig"
  node_restart "$control_plane" kube-scheduler
}
