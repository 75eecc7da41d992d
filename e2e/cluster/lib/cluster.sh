# shellcheck shell=bash
#
# Library of the cluster scripts, one file per topic. Sourcing it starts nothing.

# shellcheck source=lib/settings.sh
source "${BASH_SOURCE[0]%/*}/settings.sh"
# shellcheck source=lib/host.sh
source "$cluster_dir/lib/host.sh"
# shellcheck source=lib/cgroup.sh
source "$cluster_dir/lib/cgroup.sh"
# shellcheck source=lib/machine.sh
source "$cluster_dir/lib/machine.sh"
# shellcheck source=lib/pki.sh
source "$cluster_dir/lib/pki.sh"
# shellcheck source=lib/control-plane.sh
source "$cluster_dir/lib/control-plane.sh"
# shellcheck source=lib/node.sh
source "$cluster_dir/lib/node.sh"
# shellcheck source=lib/graceful-shutdown.sh
source "$cluster_dir/lib/graceful-shutdown.sh"
# shellcheck source=lib/teardown.sh
source "$cluster_dir/lib/teardown.sh"
# shellcheck source=lib/oci.sh
source "$cluster_dir/lib/oci.sh"
# shellcheck source=lib/executables.sh
source "$cluster_dir/lib/executables.sh"
