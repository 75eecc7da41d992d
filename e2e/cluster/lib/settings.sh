# shellcheck shell=bash
# shellcheck disable=SC2034  # the sourcing scripts read these
#
# Settings of the e2e cluster: paths, machines and their addresses, and the fake GPUs of the nodes.

cluster_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repository=$(cd "$cluster_dir/../.." && pwd)

# Image files must be readable by other users, whatever the caller's umask.
umask 022

# Directory of all files that the cluster writes, except the cached binaries. One cluster per
# machine at a time.
rundir=${TESSERA_E2E_RUNDIR:-/tmp/tessera-e2e}
logs=$rundir/logs
pki=$rundir/pki
kubeconfig=$rundir/kubeconfig

# Copies of the test programs: cargo may overwrite its own output during the tests.
programs=$rundir/programs

# Directory of the binaries (printed by build.sh).
bin=${TESSERA_E2E_BIN:-}

# 198.18.0.0/15 is reserved for benchmarks (RFC 2544), so no real network uses it.
bridge=tess0
node_names=(node-a node-b)
control_plane=control-plane
declare -A address=([host]=198.18.0.1 [control-plane]=198.18.0.10 [node-a]=198.18.0.11 [node-b]=198.18.0.12)
declare -A pod_subnet=([node-a]=198.18.16.0/24 [node-b]=198.18.17.0/24)
service_subnet=198.18.8.0/24
service_address=198.18.8.1 # service default/kubernetes: first address of the subnet

# Fake GPUs of each node (testing/fake/world/worlds/NAME.yaml).
declare -A world=([node-a]=h100-8-nvswitch [node-b]=a100-4-pcie)

# NICs of each node's nic-driver, with the PCIe roots of GPUs.
declare -A nics=([node-a]='nic-0=pci0000:49 nic-1=pci0000:b8' [node-b]='nic-0=pci0000:c9')

# Paths in a node, as on a real machine: the NVIDIA driver root, and the sysfs that the driver
# reads.
node_driver_root=/run/nvidia/driver
node_sysfs_root=/run/tessera-fake/sys

# Cargo's output directory. TESSERA_E2E_PROFILE: cargo profile (default dev; images are stripped of
# debug information).
cargo_profile=${TESSERA_E2E_PROFILE:-dev}
case $cargo_profile in
  dev) cargo_output=${CARGO_TARGET_DIR:-$repository/target}/debug ;;
  *) cargo_output=${CARGO_TARGET_DIR:-$repository/target}/$cargo_profile ;;
esac

# Client limits of controller-manager and scheduler in requests per second, or `default` (20 and
# 50), with which figures would measure only the limits.
kube_api_qps=${TESSERA_E2E_KUBE_API_QPS:-5000}

# Time limit of a wait in seconds, also on a loaded machine. An action of node.sh has at most two
# waits; the time limit in e2e/src/operations.rs is longer.
wait_limit=180

# Prefix of all cgroups and network links of the cluster, by which the leak check finds them.
mark=tess

info() { echo "e2e: $*" >&2; }
fail() {
  info "$*"
  exit 1
}
