#!/usr/bin/env bash
# Runs an action on a machine of the e2e cluster (node-a, node-b, control-plane).
#
#   node.sh exec MACHINE COMMAND...      run a command on the machine
#   node.sh root MACHINE                 print the path of the machine's file system on the host
#   node.sh restart NODE COMPONENT       kubelet or containerd: SIGTERM, start, wait for a response
#   node.sh stop MACHINE COMPONENT       kubelet, etcd, kube-apiserver, ...: SIGTERM, wait for the exit
#   node.sh kill MACHINE COMPONENT       as stop, with SIGKILL
#   node.sh start MACHINE COMPONENT      start the component
#   node.sh usage MACHINE COMPONENT      print its CPU time in ms and its peak memory in KiB
#   node.sh kill NODE driver             SIGKILL the driver's container on the node;
#   node.sh kill control-plane controller   the controller's containers on all nodes
#   node.sh start NODE driver            wait until the kubelet has restarted that container;
#   node.sh start control-plane controller  the controller's containers
#   node.sh freeze NODE CONTAINER        stop a container's process (SIGSTOP), by container ID
#   node.sh thaw NODE CONTAINER          resume it (SIGCONT)
#   node.sh reboot NODE                  end all of its processes, and start it without its /run
#   node.sh graceful-shutdown NODE on|off   restart the kubelet so that it delays a shutdown until
#                                        its pods have ended; off: from its next start on
#   node.sh shut-down NODE               announce a shutdown, and wait until that kubelet permits it
#   node.sh restart-kubelet NODE, node.sh restart-containerd NODE   same as restart
#   node.sh scheduler-through control-plane URL   connect kube-scheduler through a proxy;
#                                        URL none: directly
#   node.sh pod-groups control-plane on|off   restart the control plane with or without PodGroups
#   node.sh gpu NODE EVENT...            simulate a GPU event: see tessera-fake-world control --help
#   node.sh policies control-plane off|on   remove or restore the admission policies' bindings
#   node.sh import NODE IMAGE            load $TESSERA_E2E_RUNDIR/images/IMAGE.tar
#   node.sh residue NODE                 list files, mounts and journal entries of claims
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

main() {
  bin=${bin:-$(cat "$rundir/bin" 2>/dev/null)} || fail "no cluster in $rundir: run $here/up.sh"
  local action=${1:-} machine=${2:-}
  if [ -z "$machine" ]; then usage; fi
  shift 2
  case $action in
    exec) machine_exec "$machine" "$@" ;;
    root)
      read -r pid _ <"$(machine_record "$machine")"
      echo "/proc/$pid/root"
      ;;
    restart) node_restart "$machine" "$1" ;;
    reboot) node_reboot "$machine" "$programs" ;;
    graceful-shutdown) graceful_shutdown_switch "$machine" "$1" ;;
    shut-down) node_shut_down "$machine" ;;
    restart-*) node_restart "$machine" "${action#restart-}" ;;
    stop) component_stop "$machine" "$1" TERM ;;
    kill)
      case $1 in
        driver) tessera_kill "$1" "$machine" ;;
        controller) tessera_kill "$1" "${node_names[@]}" ;;
        *) component_stop "$machine" "$1" KILL ;;
      esac
      ;;
    start)
      case $1 in
        driver) tessera_wait "$1" "$machine" ;;
        controller) tessera_wait "$1" "${node_names[@]}" ;;
        *) component_start "$machine" "$1" ;;
      esac
      ;;
    freeze) machine_exec "$machine" "$bin/ctr" --namespace k8s.io tasks kill --signal SIGSTOP "$1" ;;
    thaw) machine_exec "$machine" "$bin/ctr" --namespace k8s.io tasks kill --signal SIGCONT "$1" ;;
    usage) component_usage "$machine" "$1" ;;
    scheduler-through) scheduler_through "$1" ;;
    pod-groups) pod_groups_switch "$1" ;;
    gpu) node_control_gpus "$machine" "$programs" "$@" ;;
    policies) policies_switch "$1" ;;
    import) node_import "$machine" "$1" ;;
    residue) machine_exec "$machine" sh "$cluster_dir/lib/residue.sh" | residue_report ;;
    *) usage ;;
  esac
}

main "$@"
