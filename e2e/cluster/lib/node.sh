# shellcheck shell=bash
#
# A node: containerd and kubelet in one machine, with a fake NVIDIA driver at the paths of the real
# one.

# Lines of the kubelet's configuration for a graceful shutdown (graceful-shutdown.sh).
shutdown_periods=

node_start() { # node
  local node=$1 directory=$rundir/$1
  node_boot "$node"
  pki_kubeconfig "$node" "$directory/kubelet.kubeconfig"
  containerd_config "$node" "$directory"
  kubelet_config "$node" "$directory"
  nic_driver_config "$node" "$directory"

  component_start "$node" containerd
  wait_for "containerd of $node" machine_exec "$node" "$bin/ctr" version
  node_import "$node" pause
  component_start "$node" kubelet
}

# Starts the machine of a node without its components.
node_boot() { # node
  cgroup_create "$1"
  machine_start "$1"
  machine_connect "$1"
  routes_add machine_exec "$1"
}

# Ends all processes of a node at once, and starts it with the files of its disks only: /run, with
# the sockets, the CDI specs and Tessera's state, and the cgroups are new. The boot ID is the host's
# and stays.
node_reboot() { # node, directory of the fake driver's programs
  machine_stop "$1"
  cgroup_remove "$1"
  node_boot "$1"
  node_install_gpus "$1" "$2"
  component_start "$1" containerd
  wait_for "containerd of $1" machine_exec "$1" "$bin/ctr" version
  component_start "$1" kubelet
}

containerd_config() { # node directory
  local directory=$2
  mkdir -p "$directory/cni"
  # restrict_oom_score_adj: without CAP_SYS_RESOURCE (containers, some virtual machines) runc cannot
  # lower the value. disable_apparmor: the profile would stay in the host's kernel. The opt plugin
  # would create /opt/containerd on the host.
  cat >"$directory/containerd.toml" <<END
version = 3
[plugins.'io.containerd.internal.v1.opt']
path = '/var/lib/containerd-opt'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = 'docker.io/tessera/pause:e2e'
[plugins.'io.containerd.cri.v1.runtime']
enable_cdi = true
cdi_spec_dirs = ['/var/run/cdi']
disable_apparmor = true
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['$bin']
conf_dir = '$directory/cni'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
BinaryName = '$bin/runc'
END
  cat >"$directory/cni/10-ptp.conflist" <<END
{"cniVersion": "1.0.0", "name": "e2e", "plugins": [{"type": "ptp",
  "ipam": {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": "${pod_subnet[$1]}"}]],
           "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
  cat >"$directory/containerd.sh" <<END
export PATH="$bin:\$PATH"
exec "$bin/containerd" --config "$directory/containerd.toml" --log-level info
END
}

kubelet_config() { # node directory
  local node=$1 directory=$2
  # The cluster has no DNS. A server address is required (each pod gets a warning event without one)
  # and not reachable; an empty file keeps the host's servers out of the pods.
  : >"$directory/resolv.conf"
  # Thresholds: independent of the host's free disk and memory. failCgroupV1: the host may have
  # cgroup v1. crashLoopBackOff: crash tests kill a container a dozen times, and would wait for
  # minutes.
  cat >"$directory/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: "$pki/ca.crt"}}
authorization: {mode: Webhook}
tlsCertFile: "$pki/$node.crt"
tlsPrivateKeyFile: "$pki/$node.key"
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
resolvConf: "$directory/resolv.conf"
clusterDNS: ["${service_address%.*}.10"]
cgroupDriver: cgroupfs
cgroupRoot: /$(cgroup_name "$node")
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: 10Mi, nodefs.available: 1%, imagefs.available: 1%}
kubeAPIQPS: 200
kubeAPIBurst: 400
syncFrequency: 5s
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
$shutdown_periods
END
  cat >"$directory/kubelet.sh" <<END
export PATH="$bin:\$PATH"
exec "$bin/kubelet" --config "$directory/kubelet.yaml" --kubeconfig "$directory/kubelet.kubeconfig" \\
  --hostname-override $node --node-ip ${address[$node]} --node-labels e2e.tessera.dev/world=${world[$node]} $workload_gates
END
}

# A DRA driver of another vendor, which trials start. Its NICs are on PCIe roots of GPUs.
nic_driver_config() { # node directory
  cat >"$2/nic-driver.sh" <<END
exec "$bin/nic-driver" --kubeconfig "$2/kubelet.kubeconfig" --node $1 ${nics[$1]}
END
}

# Installs the fake NVIDIA driver and the PCI devices of the node's GPUs at the paths of the real
# ones.
node_install_gpus() { # node, directory of the fake driver's programs
  local node=$1 built=$2 description
  description=$repository/testing/fake/world/worlds/${world[$node]}.yaml
  machine_exec "$node" "$built/tessera-fake-world" driver-root "$description" "$built/libnvidia_ml.so" "$built/libcuda.so" \
    "$node_driver_root"
  # The driver's container has the driver root read-only. The state directory it can write.
  machine_exec "$node" ln -sfn /run/tessera/fake-mig "$node_driver_root/usr/share/nvidia/tessera-fake/mig"
  machine_exec "$node" "$here/control-daemon.sh" "$built/fake-mps-control" "$node_driver_root"
  machine_exec "$node" "$built/tessera-fake-world" sysfs "$description" "$node_sysfs_root"
  node_make_device_nodes "$node"
}

# Device nodes of GPUs, more than any fake node has GPUs. They have the device number of /dev/null,
# because the fake driver checks only that they exist. They are also in the node's /dev: for a
# container with a user namespace, runc bind-mounts the node's device from the path in the
# container.
node_make_device_nodes() { # node
  local name
  machine_exec "$1" mkdir -p "$node_driver_root/dev"
  for name in nvidiactl nvidia-uvm nvidia{0..15}; do
    machine_exec "$1" mknod --mode=666 "$node_driver_root/dev/$name" c 1 3
    machine_exec "$1" mknod --mode=666 "/dev/$name" c 1 3
  done
}

# Simulates an event of a node's GPUs; the arguments are those of `tessera-fake-world control
# WORLD`.
node_control_gpus() { # node, directory of the fake driver's programs, event...
  local node=$1 built=$2
  shift 2
  machine_exec "$node" "$built/tessera-fake-world" control "$node_driver_root/usr/share/nvidia/tessera-fake/world.yaml" "$@"
}

node_ready() { # node
  [ "$(kubectl_admin get node "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')" = True ]
}

node_publishes() { # node
  [ -n "$(kubectl_admin get resourceslices --field-selector "spec.nodeName=$1" --output name)" ]
}

# Imports an image archive ($rundir/images/NAME.tar, built by images.sh) into a node's containerd.
node_import() { # node image
  machine_exec "$1" "$bin/ctr" --namespace k8s.io images import --local "$rundir/images/$2.tar" >>"$logs/$1-import.log" 2>&1
}

# Restarts a component as systemd does: SIGTERM, then the same command again.
node_restart() { # node component
  component_stop "$1" "$2" TERM
  component_start "$1" "$2"
  case $2 in
    containerd) wait_for "containerd of $1" machine_exec "$1" "$bin/ctr" version ;;
    kubelet) wait_for "kubelet of $1" machine_exec "$1" "$bin/kubectl" get --raw /healthz --server http://127.0.0.1:10248 ;;
  esac
}

# Reads residue.sh's output, and prints one line per journal entry; a journal without claims is no
# residue.
residue_report() {
  local line
  while read -r line; do
    case $line in
      journal\ *) jq -r '.. | objects | .claims? // empty | keys[] | "journal entry \(.)"' <<<"${line#journal }" ;;
      *) echo "$line" ;;
    esac
  done
}

# Prints the IDs of the running containers with that name on a node, of Tessera's pods.
tessera_containers() { # driver|controller, node
  local running
  running=$(machine_exec "$2" "$bin/ctr" --namespace k8s.io tasks list | awk '$3 == "RUNNING" { print $1 }')
  # The list includes exited containers.
  machine_exec "$2" "$bin/ctr" --namespace k8s.io containers list --quiet \
    "labels.\"io.kubernetes.container.name\"==$1,labels.\"io.kubernetes.pod.namespace\"==tessera-system" |
    grep --fixed-strings --line-regexp "$running" || true
}

tessera_running() { # driver|controller, nodes...
  local container=$1 node
  shift
  for node in "$@"; do
    if [ -n "$(tessera_containers "$container" "$node")" ]; then return 0; fi
  done
  return 1
}

# The kubelet restarts an exited container; see crashLoopBackOff above.
tessera_wait() { # driver|controller, nodes...
  wait_for "a container $1 to run" tessera_running "$@"
}

# Kills containers of Tessera with SIGKILL. By ID, because the machines run the same programs.
tessera_kill() { # driver|controller, nodes...
  local container=$1 node id
  tessera_wait "$@"
  shift
  for node in "$@"; do
    for id in $(tessera_containers "$container" "$node"); do
      machine_exec "$node" "$bin/ctr" --namespace k8s.io tasks kill --signal SIGKILL "$id"
    done
  done
}
