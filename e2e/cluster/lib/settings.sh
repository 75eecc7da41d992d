# shellcheck shell=bash
# shellcheck disable=SC2034  # the sourcing scripts read these
#
# What the e2e cluster is made of: where its state lies, its machines and their addresses, the fake GPUs of its nodes.

cluster_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repository=$(cd "$cluster_dir/../.." && pwd)

# What goes into images is for other users than root, too, whatever the caller's umask.
umask 022

# Everything the cluster writes lies here, except the binaries' cache. One cluster a machine at a time.
rundir=${TESSERA_E2E_RUNDIR:-/tmp/tessera-e2e}
logs=$rundir/logs
pki=$rundir/pki
kubeconfig=$rundir/kubeconfig

# What the tests run, as it was built for them: cargo may build others under the same names while they do.
programs=$rundir/programs

# Binaries, one directory (build.sh prints it).
bin=${TESSERA_E2E_BIN:-}

# 198.18.0.0/15 is set aside for benchmarks (RFC 2544): no real network routes it.
bridge=tess0
node_names=(node-a node-b)
control_plane=control-plane
declare -A address=([host]=198.18.0.1 [control-plane]=198.18.0.10 [node-a]=198.18.0.11 [node-b]=198.18.0.12)
declare -A pod_subnet=([node-a]=198.18.16.0/24 [node-b]=198.18.17.0/24)
service_subnet=198.18.8.0/24
service_address=198.18.8.1 # of the service default/kubernetes: the first of the subnet

# The fake GPUs of each node (testing/fake/world/worlds/NAME.yaml).
declare -A world=([node-a]=h100-8-nvswitch [node-b]=a100-4-pcie)

# Inside a node, as on a real machine: where the NVIDIA driver's files lie, and the sysfs the driver is to read.
node_driver_root=/run/nvidia/driver
node_sysfs_root=/run/tessera-fake/sys

# Where cargo puts what it builds. TESSERA_E2E_PROFILE: its profile (dev; the images are stripped of debug information).
cargo_profile=${TESSERA_E2E_PROFILE:-dev}
case $cargo_profile in
  dev) cargo_output=${CARGO_TARGET_DIR:-$repository/target}/debug ;;
  *) cargo_output=${CARGO_TARGET_DIR:-$repository/target}/$cargo_profile ;;
esac

# Client limits of controller-manager and scheduler, reported by up.sh, or `default`. Their defaults (20 and 50 a second)
# would make every figure one about the limits.
kube_api_qps=${TESSERA_E2E_KUBE_API_QPS:-5000}

# Seconds that a wait lasts at most, on a busy machine too. An action of node.sh has two waits at most; e2e/src/operations.rs gives it more
# time than that.
patience=180

# Prefix of every cgroup and network link the cluster makes: what the leak check looks for.
mark=tess

say() { echo "e2e: $*" >&2; }
fail() {
  say "$*"
  exit 1
}
