# shellcheck shell=bash
#
# Machines: the control plane and each node run in namespaces of their own (see machine-init.sh), joined by a bridge.
# A machine is one process on the host, recorded in $rundir/machines/NAME as "PID START_TIME PID_NAMESPACE".

machine_record() { echo "$rundir/machines/$1"; }

# Whether the process of the record is still the one that was recorded.
machine_alive() { # name
  local pid start stat
  [ -f "$(machine_record "$1")" ] || return 1
  read -r pid start _ <"$(machine_record "$1")"
  read -r -a stat 2>/dev/null <"/proc/$pid/stat" || return 1
  [ "${stat[21]}" = "$start" ]
}

machine_start() { # name
  local name=$1
  mkdir -p "$rundir/machines" "$rundir/$name/pids" "$logs"
  setsid unshare --mount --propagation private --net --pid --ipc --uts --fork --kill-child \
    "$cluster_dir/lib/machine-init.sh" "$name" "$rundir/$name" "$(machine_record "$name")" \
    </dev/null >"$logs/$name-init.log" 2>&1 &
  wait_for "machine $name" machine_alive "$name"
}

# Runs a command inside a machine.
machine_exec() { # name command...
  local name=$1 pid
  shift
  machine_alive "$name" || fail "machine $name is not running"
  read -r pid _ <"$(machine_record "$name")"
  nsenter --target "$pid" --mount --net --pid --ipc --uts -- "$@"
}

# The host's end of a machine's link, named after the mark so that a leak can be recognised. A link's name has 15 characters.
machine_link() { # name
  local link=$mark-$1
  echo "${link:0:15}"
}

# Joins a machine to the bridge.
machine_connect() { # name
  local name=$1 pid link
  link=$(machine_link "$name")
  read -r pid _ <"$(machine_record "$name")"
  ip link add "$link" type veth peer name eth0 netns "$pid"
  ip link set "$link" master "$bridge" up
  machine_exec "$name" ip address add "${address[$name]}/24" dev eth0
  machine_exec "$name" ip link set eth0 up
}

bridge_start() {
  if ip link show "$bridge" >/dev/null 2>&1; then
    fail "the link $bridge exists already: another e2e cluster? Run down.sh with its TESSERA_E2E_RUNDIR first"
  fi
  touch "$rundir/bridge"
  ip link add "$bridge" type bridge
  ip address add "${address[host]}/24" dev "$bridge"
  ip link set "$bridge" up
}

# Every machine, and the host, reaches the service address at the control plane and the pods of a node at that node:
# the cluster needs no kube-proxy, and no packet leaves the bridge.
routes_add() { # command prefix, for example: machine_exec node-a
  local node
  "$@" ip route replace "$service_address/32" via "${address[$control_plane]}"
  for node in "${node_names[@]}"; do
    if [ "${2:-}" = "$node" ]; then continue; fi
    "$@" ip route replace "${pod_subnet[$node]}" via "${address[$node]}"
  done
}

# A component is a process inside a machine, started by the script $rundir/MACHINE/COMPONENT.sh, which execs it. It is
# adopted by the machine's PID 1. $rundir/MACHINE/pids/COMPONENT has its number inside the machine and its start time (field
# 22 of /proc/PID/stat, the 20th after the name), which together name a process for good.
#
# Not beside one that runs: the second would end for want of the first one's locks and ports, and the first would go on, unknown.
component_start() { # machine component
  local machine=$1 component=$2
  component_exists "$machine" "$component"
  if component_alive "$machine" "$component"; then fail "$component of $machine runs already"; fi
  # Recorded before this returns, so that whoever stops it next finds it. setsid does not fork: $! leads no process group.
  # shellcheck disable=SC2016  # expanded by the inner shell
  machine_exec "$machine" bash -c '
    setsid bash "$2" </dev/null >>"$3" 2>&1 &
    stat=$(cat "/proc/$!/stat")
    read -r -a fields <<<"${stat##*) }"
    echo "$! ${fields[19]:-ended}" >"$1"
  ' _ "$rundir/$machine/pids/$component" "$rundir/$machine/$component.sh" "$logs/$machine-$component.log"
}

# Ends with an error otherwise: what does not exist has no process either, and would pass for stopped.
component_exists() { # machine component
  [ -f "$rundir/$1/$2.sh" ] || fail "$1 has no component $2"
}

component_alive() { # machine component
  local pid start stat
  read -r pid start 2>/dev/null <"$rundir/$1/pids/$2" || return 1
  # shellcheck disable=SC2016  # expanded by the inner shell
  stat=$(machine_exec "$1" sh -c 'cat "/proc/$1/stat" 2>/dev/null || true' _ "$pid") || exit
  read -r -a stat <<<"${stat##*) }"
  [ "${stat[19]:-}" = "$start" ]
}

component_gone() { ! component_alive "$@"; }

component_stop() { # machine component signal
  local pid
  component_exists "$1" "$2"
  component_alive "$1" "$2" || return 0
  read -r pid _ <"$rundir/$1/pids/$2"
  machine_exec "$1" kill "-$3" "$pid"
  wait_for "$2 of $1 to end" component_gone "$1" "$2"
}

# What a component has used: CPU time in milliseconds, and the most memory it had, in KiB. Nothing if it does not run.
component_usage() { # machine component
  local pid ticks peak stat
  component_alive "$1" "$2" || return 0
  read -r pid _ <"$rundir/$1/pids/$2"
  # After the name, which may hold anything: fields 14 and 15 of the whole are the times in user and kernel mode.
  stat=$(machine_exec "$1" cat "/proc/$pid/stat")
  read -r -a ticks <<<"${stat##*) }"
  # shellcheck disable=SC2016  # expanded by awk
  peak=$(machine_exec "$1" awk '$1 == "VmHWM:" { print $2 }' "/proc/$pid/status")
  echo "$(((ticks[11] + ticks[12]) * 1000 / $(getconf CLK_TCK))) $peak"
}

# Polls: the processes waited for here offer no other way.
wait_for() { # what command...
  local what=$1 deadline=$((SECONDS + patience))
  shift
  until "$@" >/dev/null 2>&1; do
    if [ "$SECONDS" -ge "$deadline" ]; then fail "gave up waiting for $what (logs in $logs)"; fi
    sleep 0.1
  done
}
