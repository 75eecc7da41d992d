# shellcheck shell=bash
#
# Machines: the control plane and each node run in their own namespaces (see machine-init.sh),
# connected by a bridge. A machine is one process on the host, recorded in $rundir/machines/NAME as
# "PID START_TIME PID_NAMESPACE".

machine_record() { echo "$rundir/machines/$1"; }

# Succeeds if the recorded process still runs.
machine_running() { # name
  local pid start stat
  [ -f "$(machine_record "$1")" ] || return 1
  read -r pid start _ <"$(machine_record "$1")"
  read -r -a stat 2>/dev/null <"/proc/$pid/stat" || return 1
  [ "${stat[21]}" = "$start" ]
}

machine_start() { # name
  local name=$1
  rm -f "$rundir/stopped/$name"
  mkdir -p "$rundir/machines" "$rundir/$name/pids" "$logs"
  setsid unshare --mount --propagation private --net --pid --ipc --uts --fork --kill-child \
    "$cluster_dir/lib/machine-init.sh" "$name" "$rundir/$name" "$(machine_record "$name")" \
    </dev/null >"$logs/$name-init.log" 2>&1 &
  wait_for "machine $name" machine_running "$name"
}

# Runs a command in a machine.
machine_exec() { # name command...
  local name=$1 pid
  shift
  machine_running "$name" || fail "machine $name is not running"
  read -r pid _ <"$(machine_record "$name")"
  nsenter --target "$pid" --mount --net --pid --ipc --uts -- "$@"
}

# Prints the name of the host's end of a machine's link. The prefix identifies leaks; the limit is
# 15 characters.
machine_link() { # name
  local link=$mark-$1
  echo "${link:0:15}"
}

# Connects a machine to the bridge.
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
    fail "the link $bridge exists, possibly of another e2e cluster: run down.sh with its TESSERA_E2E_RUNDIR first"
  fi
  touch "$rundir/bridge"
  ip link add "$bridge" type bridge
  ip address add "${address[host]}/24" dev "$bridge"
  ip link set "$bridge" up
}

# Adds routes to the service address at the control plane and to the pods at their nodes, so the
# cluster needs no kube-proxy, and no packet leaves the bridge.
routes_add() { # command prefix, for example: machine_exec node-a
  local node
  "$@" ip route replace "$service_address/32" via "${address[$control_plane]}"
  for node in "${node_names[@]}"; do
    if [ "${2:-}" = "$node" ]; then continue; fi
    "$@" ip route replace "${pod_subnet[$node]}" via "${address[$node]}"
  done
}

# A component is a process in a machine. It is started by the script $rundir/MACHINE/COMPONENT.sh,
# which execs it, and adopted by the machine's PID 1. $rundir/MACHINE/pids/COMPONENT contains its
# process ID in the machine and its start time (field 22 of /proc/PID/stat, the 20th after the
# name), which identify a process uniquely.
#
# Refuses to start a second process: it would fail for lack of locks and ports, and replace the
# record of the first.
component_start() { # machine component
  local machine=$1 component=$2
  component_exists "$machine" "$component"
  if component_running "$machine" "$component"; then fail "$component of $machine is already running"; fi
  # Recorded before this function returns, so that the component can be stopped immediately. setsid
  # does not fork, because $! is not a process group leader.
  # shellcheck disable=SC2016  # expanded by the inner shell
  machine_exec "$machine" bash -c '
    setsid bash "$2" </dev/null >>"$3" 2>&1 &
    stat=$(cat "/proc/$!/stat")
    read -r -a fields <<<"${stat##*) }"
    echo "$! ${fields[19]:-ended}" >"$1"
  ' _ "$rundir/$machine/pids/$component" "$rundir/$machine/$component.sh" "$logs/$machine-$component.log"
}

# Fails for an unknown component, which would otherwise be reported as stopped.
component_exists() { # machine component
  [ -f "$rundir/$1/$2.sh" ] || fail "$1 has no component $2"
}

component_running() { # machine component
  local pid start stat
  read -r pid start 2>/dev/null <"$rundir/$1/pids/$2" || return 1
  # shellcheck disable=SC2016  # expanded by the inner shell
  stat=$(machine_exec "$1" sh -c 'cat "/proc/$1/stat" 2>/dev/null || true' _ "$pid") || exit
  read -r -a stat <<<"${stat##*) }"
  [ "${stat[19]:-}" = "$start" ]
}

component_stopped() { ! component_running "$@"; }

component_stop() { # machine component signal
  local pid
  component_exists "$1" "$2"
  component_running "$1" "$2" || return 0
  read -r pid _ <"$rundir/$1/pids/$2"
  machine_exec "$1" kill "-$3" "$pid"
  wait_for "$2 of $1 to exit" component_stopped "$1" "$2"
}

# Prints CPU time in milliseconds and peak memory in KiB of a component; nothing if it does not run.
component_usage() { # machine component
  local pid ticks peak stat
  component_running "$1" "$2" || return 0
  read -r pid _ <"$rundir/$1/pids/$2"
  # Counted after the name, which may contain any character: fields 14 and 15 of the line are user
  # and system time.
  stat=$(machine_exec "$1" cat "/proc/$pid/stat")
  read -r -a ticks <<<"${stat##*) }"
  # shellcheck disable=SC2016  # expanded by awk
  peak=$(machine_exec "$1" awk '$1 == "VmHWM:" { print $2 }' "/proc/$pid/status")
  echo "$(((ticks[11] + ticks[12]) * 1000 / $(getconf CLK_TCK))) $peak"
}

# Polls, because these processes send no notification.
wait_for() { # what command...
  local what=$1 deadline=$((SECONDS + wait_limit))
  shift
  until "$@" >/dev/null 2>&1; do
    if [ "$SECONDS" -ge "$deadline" ]; then fail "timed out waiting for $what (logs in $logs)"; fi
    sleep 0.1
  done
}
