# shellcheck shell=bash
#
# Stops the cluster by its records, then checks for leftovers independently of the records.

cluster_stop() {
  local node
  machines_stop
  for node in "${node_names[@]}"; do cgroup_remove "$node"; done
  if [ -f "$rundir/bridge" ]; then
    link_delete "$bridge"
    rm "$rundir/bridge"
  fi
  host_settings_restore
}

# Stops all machines, including those that are not ready.
machines_stop() {
  local record
  for record in "$rundir"/machines/*; do
    if [ -f "$record" ]; then machine_stop "$(basename "$record")"; fi
  done
}

# Kills PID 1 of a machine. The kernel then ends all other processes of its PID namespace and
# removes the mounts. The network link is removed some time later, without a notification.
machine_stop() { # name
  local name=${1%.part} pid namespace
  read -r pid _ namespace <"$(machine_record "$1")"
  if machine_running "$1"; then
    kill -KILL "$pid"
    wait_for "the processes of $name to end" namespace_is_empty "$namespace"
    mkdir -p "$rundir/stopped"
    boot_ticks >"$rundir/stopped/$name"
  fi
  link_delete "$(machine_link "$name")"
}

# Prints the clock ticks since boot: the unit of field 22 of /proc/PID/stat.
boot_ticks() { awk -v ticks="$(getconf CLK_TCK)" '{ printf "%d\n", $1 * ticks }' /proc/uptime; }

# Deletes a link, unless it is already deleted or is deleted meanwhile.
link_delete() { # link
  ip link delete "$1" 2>/dev/null || ! ip link show "$1" >/dev/null 2>&1
}

namespace_is_empty() { [ -z "$(processes_of_namespace "$1")" ]; }

# Prints the host process IDs of all processes in a PID namespace (as printed by readlink:
# pid:[4026532207]).
processes_of_namespace() {
  local link
  for link in /proc/[0-9]*/ns/pid; do
    if [ "$(readlink "$link" 2>/dev/null)" = "$1" ]; then basename "${link%/ns/pid}"; fi
  done
}

# Prints one line for each leftover of the cluster on the host.
cluster_leftovers() {
  machine_leftovers
  ip -o link show | awk -F': ' -v mark="$mark" '$2 == mark "0" || index($2, mark "-") == 1 { print "network link " $2 }'
  ip netns list 2>/dev/null | awk -v mark="$mark" 'index($1, mark) == 1 { print "network namespace " $1 }'
  cgroup_leftovers | sed 's/^/cgroup /'
  host_settings_leftovers | sed 's/^/kernel setting /'
}

# Succeeds if a process began before a machine was stopped, or the machine was not. The kernel gives
# the number of a namespace that ended to a new one: in a machine that is stopped later, or in a
# container of another program.
began_before_stop() { # pid machine
  local stopped=$rundir/stopped/$2 stat
  [ -f "$stopped" ] || return 0
  read -r -a stat 2>/dev/null <"/proc/$1/stat" || return 1
  # The program's name, field 2, may have spaces: counted from the end, field 22 is the 31st of 52.
  [ "${stat[-31]}" -le "$(<"$stopped")" ]
}

# Prints the leftovers of machines.
machine_leftovers() {
  local record namespace pid
  for record in "$rundir"/machines/*; do
    [ -f "$record" ] || continue
    read -r _ _ namespace <"$record"
    for pid in $(processes_of_namespace "$namespace"); do
      began_before_stop "$pid" "$(basename "$record")" || continue
      echo "process $pid of $(basename "$record"): $(tr '\0' ' ' <"/proc/$pid/cmdline")"
    done
  done
  for pid in $(pgrep --full -- "^(unshare|nsenter) .*$rundir/" || true); do echo "process $pid holds a namespace"; done
  awk -v directory="$rundir/" 'index($2, directory) == 1 { print "mount " $2 }' /proc/mounts
}
