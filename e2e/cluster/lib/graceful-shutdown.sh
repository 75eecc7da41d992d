# shellcheck shell=bash
#
# Graceful node shutdown of a kubelet. A machine has no systemd: its system bus has a fake of
# systemd-logind (modules/fake-logind).

# Restarts the kubelet so that it delays a shutdown for its pods, or has it do so no more from its
# next start on.
graceful_shutdown_switch() { # node on|off
  local node=$1 directory=$rundir/$1
  case $2 in
    on)
      shutdown_periods=$'shutdownGracePeriod: 30s\nshutdownGracePeriodCriticalPods: 10s'
      kubelet_config "$node" "$directory"
      system_bus_start "$node" "$directory"
      node_restart "$node" kubelet
      wait_for "an inhibitor of the kubelet of $node" machine_exec "$node" "$bin/fake-logind" inhibited
      ;;
    off) kubelet_config "$node" "$directory" ;;
    *) fail "invalid state of the graceful shutdown '$2': expected on or off" ;;
  esac
}

# Everything may be sent to everything on this bus, which has two clients.
system_bus_start() { # node directory
  cat >"$2/system-bus.conf" <<END
<busconfig>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*"/>
    <allow receive_sender="*"/>
  </policy>
</busconfig>
END
  cat >"$2/system-bus.sh" <<END
exec dbus-daemon --config-file "$2/system-bus.conf" --nofork --nopidfile
END
  echo "exec $bin/fake-logind serve" >"$2/fake-logind.sh"
  machine_exec "$1" mkdir -p /run/dbus
  component_start "$1" system-bus
  wait_for "the system bus of $1" machine_exec "$1" test -S /run/dbus/system_bus_socket
  component_start "$1" fake-logind
}

# Announces a shutdown of the node, and waits until its kubelet does not delay it any more.
node_shut_down() { # node
  machine_exec "$1" "$bin/fake-logind" shut-down
}
