#!/usr/bin/env bash
# node.sh for a kind cluster: the same actions on a node (a container with systemd).
#
#   kind-node.sh exec|restart|stop|start|kill|freeze|thaw|gpu|residue NODE ...      (see node.sh)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

# Path in a kind node.
bin=/usr/local/bin
workers=("$TESSERA_KIND_CLUSTER-worker" "$TESSERA_KIND_CLUSTER-worker2")

# Replaces node.sh's function: a kind node is a container.
machine_exec() {
  local node=$1
  shift
  docker exec "$node" "$@"
}

main() {
  local action=${1:-} node=${2:-}
  if [ -z "$node" ]; then fail "usage: kind-node.sh exec|restart|stop|start|kill|freeze|thaw|gpu|residue NODE ..."; fi
  shift 2
  case $action in
    exec) machine_exec "$node" "$@" ;;
    kill)
      case $1 in
        driver) tessera_kill "$1" "$node" ;;
        controller) tessera_kill "$1" "${workers[@]}" ;;
        *) machine_exec "$node" systemctl kill --signal KILL "$1" ;;
      esac
      ;;
    start)
      case $1 in
        driver) tessera_wait "$1" "$node" ;;
        controller) tessera_wait "$1" "${workers[@]}" ;;
        *) machine_exec "$node" systemctl start "$1" ;;
      esac
      ;;
    restart | stop) machine_exec "$node" systemctl "$action" "$1" ;;
    restart-*) machine_exec "$node" systemctl restart "${action#restart-}" ;;
    freeze) machine_exec "$node" ctr --namespace k8s.io tasks kill --signal SIGSTOP "$1" ;;
    thaw) machine_exec "$node" ctr --namespace k8s.io tasks kill --signal SIGCONT "$1" ;;
    gpu) node_control_gpus "$node" /usr/local/bin "$@" ;;
    residue) docker exec --interactive "$node" sh <"$here/lib/residue.sh" | residue_report ;;
    *) fail "unknown action $action" ;;
  esac
}

main "$@"
