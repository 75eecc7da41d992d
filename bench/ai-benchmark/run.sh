#!/usr/bin/env bash
# Runs ai-benchmark on the current cluster once for each kind of share, one after the other, and
# compares the results: run.sh [KIND...], of whole, share, oversubscribed and mps (all).
#
# oversubscribed needs a node whose GPUs are oversubscribed (driver.memoryPercent), mps needs
# mps.enabled. NAMESPACE=..., TIMEOUT=... (seconds for each kind, 3600).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
namespace=${NAMESPACE:-default} timeout=${TIMEOUT:-3600}
kinds=("$@")
[ "$#" -gt 0 ] || kinds=(whole share oversubscribed mps)
for kind in "${kinds[@]}"; do
  [ -f "$here/$kind/kustomization.yaml" ] || { echo "no such kind: $kind" >&2; exit 2; }
done
command -v kubectl >/dev/null || { echo "kubectl is not installed" >&2; exit 2; }

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for kind in "${kinds[@]}"; do
  echo "$kind: running, up to $timeout s" >&2
  kubectl --namespace "$namespace" delete --ignore-not-found --wait --kustomize "$here/$kind" >&2
  kubectl --namespace "$namespace" apply --kustomize "$here/$kind" >&2
  if ! kubectl --namespace "$namespace" wait --for=condition=Complete --timeout="${timeout}s" \
    "job/ai-benchmark-$kind" >&2; then
    echo "$kind: not complete; its pod stays: kubectl --namespace $namespace describe pod --selector job-name=ai-benchmark-$kind" >&2
    continue
  fi
  kubectl --namespace "$namespace" logs "job/ai-benchmark-$kind" >"$logs/$kind"
  kubectl --namespace "$namespace" delete --wait=false --kustomize "$here/$kind" >&2
done
"$here/compare.py" "$logs"/*
