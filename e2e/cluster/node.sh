#!/usr/bin/env bash
# Does something to a machine of the running e2e cluster (node-a, node-b, control-plane), for tests and for a look.
#
#   node.sh exec MACHINE COMMAND...      run a command inside
#   node.sh root MACHINE                 print a path on the host that is the machine's file system
#   node.sh restart NODE COMPONENT       kubelet or containerd: SIGTERM, start again, wait until it answers
#   node.sh stop MACHINE COMPONENT       kubelet, etcd, kube-apiserver, ...: SIGTERM, wait until it is gone
#   node.sh kill MACHINE COMPONENT       the same with SIGKILL
#   node.sh start MACHINE COMPONENT      start again
#   node.sh usage MACHINE COMPONENT      print its CPU time, milliseconds, and the most memory it had, KiB
#   node.sh kill NODE driver, node.sh kill control-plane controller     SIGKILL to its containers, wherever they run
#   node.sh start NODE driver, node.sh start control-plane controller   wait until kubelet has started them again
#   node.sh freeze NODE CONTAINER        stop a container's process where it is (SIGSTOP), by the container's ID
#   node.sh thaw NODE CONTAINER          let it go on
#   node.sh restart-kubelet NODE, node.sh restart-containerd NODE   short for restart
#   node.sh scheduler-through control-plane URL   kube-scheduler speaks to the API server through a proxy; URL nobody: directly
#   node.sh gpu NODE HAPPENING...        a GPU falls off the bus, reports an XID, ...: see tessera-fake-world control --help
#   node.sh policies control-plane off|on   remove the chart's admission policies from force, put them back
#   node.sh import NODE IMAGE            load $TESSERA_E2E_RUNDIR/images/IMAGE.tar
#   node.sh residue NODE                 print what Tessera and the pods left: CDI files, grants, journal entries, mounts
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
    gpu) node_control_gpus "$machine" "$programs" "$@" ;;
    policies) policies_switch "$1" ;;
    import) node_import "$machine" "$1" ;;
    residue) machine_exec "$machine" sh "$cluster_dir/lib/residue.sh" | residue_report ;;
    *) usage ;;
  esac
}

main "$@"
