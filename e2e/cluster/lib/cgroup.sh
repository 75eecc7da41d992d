# shellcheck shell=bash
#
# Each kubelet has its own root cgroup, $mark-e2e-NODE: two kubelets with one root would remove each
# other's pods. Supports cgroup v1, hybrid and v2.

cgroup_name() { echo "$mark-e2e-$1"; }

# Prints the mount points of all hierarchies: one in v2, one per controller in v1.
cgroup_hierarchies() { awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/mounts; }

cgroup_create() { # node
  local hierarchy directory file
  while read -r hierarchy; do
    directory=$hierarchy/$(cgroup_name "$1")
    cgroup_delegate "$hierarchy"
    mkdir -p "$directory"
    # v1: a new cpuset is empty, and accepts processes only after CPUs and memory nodes are set.
    for file in cpuset.cpus cpuset.mems; do
      if [ -f "$hierarchy/$file" ] && [ -f "$hierarchy/tasks" ]; then cat "$hierarchy/$file" >"$directory/$file"; fi
    done
  done < <(cgroup_hierarchies)
}

# v2: children have only the controllers that the parent delegates.
cgroup_delegate() { # hierarchy
  local controller controllers
  [ -s "$1/cgroup.controllers" ] || return 0
  read -r -a controllers <"$1/cgroup.controllers"
  for controller in "${controllers[@]}"; do
    echo "+$controller" >"$1/cgroup.subtree_control" || info "cgroup controller $controller is not available"
  done
}

cgroup_remove() { # node
  local hierarchy directory
  while read -r hierarchy; do
    directory=$hierarchy/$(cgroup_name "$1")
    if [ -d "$directory" ]; then find "$directory" -depth -type d -exec rmdir {} +; fi
  done < <(cgroup_hierarchies)
}

cgroup_leftovers() {
  local hierarchy
  while read -r hierarchy; do
    find "$hierarchy" -maxdepth 1 -name "$mark-e2e-*"
  done < <(cgroup_hierarchies)
}
