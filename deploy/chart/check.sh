#!/usr/bin/env bash
# Checks the chart without a cluster: lint, values that the schema must reject, the rendered
# manifests against golden/, and the recording rules with promtool. Set UPDATE=1 to rewrite the
# golden files.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
helm=${HELM:-helm}
promtool=${PROMTOOL:-promtool}
chart=$here/tessera

render() { # values file
  "$helm" template tessera "$chart" --namespace tessera-system --kube-version 1.37.0 --values "$1"
}

check_golden() { # name
  local golden=$here/golden/$1.yaml
  if [ "${UPDATE:-}" = 1 ]; then
    render "$here/golden/$1.values.yaml" >"$golden"
  elif ! diff --unified "$golden" <(render "$here/golden/$1.values.yaml"); then
    echo "the rendered chart differs from $golden; if this is intended, run UPDATE=1 $here/check.sh" >&2
    return 1
  fi
}

check_refused() { # what, helm arguments...
  local what=$1
  shift
  if "$helm" template tessera "$chart" --kube-version 1.37.0 "$@" >/dev/null 2>&1; then
    echo "the chart accepts $what" >&2
    return 1
  fi
}

# Evaluates the rules of all systems on the series of recording-rules-test.yaml.
check_rules() {
  local directory
  directory=$(mktemp -d)
  # promtool reads the content of `spec`.
  "$helm" template tessera "$chart" --kube-version 1.37.0 --show-only templates/recordingrules.yaml \
    --values "$here/golden/everything.values.yaml" |
    sed -n '/^spec:/,$p' | tail -n +2 | sed 's/^  //' >"$directory/rules.yaml"
  cp "$here/recording-rules-test.yaml" "$directory"
  "$promtool" check rules "$directory/rules.yaml"
  "$promtool" test rules "$directory/recording-rules-test.yaml"
  rm -r "$directory"
}

"$helm" lint --strict --quiet "$chart"
for values in "$here"/golden/*.values.yaml; do check_golden "$(basename "$values" .values.yaml)"; done
check_rules
check_refused "an unknown key" --set driver.nvidiaDriverRooot=/
check_refused "recording rules of an unknown system" --set 'metrics.recordingRules.systems={hammi}'
check_refused "another allocator's resource without a domain" --set 'driver.otherResources={gpu}'
check_refused "a relative driver root" --set driver.nvidiaDriverRoot=run/nvidia
check_refused "a GPU index instead of a UUID" --set 'driver.excludeGpus={0}'
check_refused "other drivers in mode stock" --set mode=stock --set 'managedDrivers={dra.net}'
check_refused "other drivers without a rule" --set fence=taint --set 'managedDrivers={dra.net}'
check_refused "a driver without a name" --set 'managedDrivers={dra/net}'
check_refused "an unknown mode" --set mode=both
check_refused "an unknown injection mode" --set driver.intercept=kernel
check_refused "an amount without a unit" --set-string driver.contextMemory=512
check_refused "less than 100 percent of the memory" --set driver.memoryPercent=99
check_refused "more than twice the cores" --set driver.coresPercent=201
check_refused "more shares than a GPU can have" --set driver.maxShares=129
check_refused "memory oversubscription in mode stock" --set mode=stock --set driver.memoryPercent=200
check_refused "an unknown fence" --set fence=none
check_refused "a fence of a rule without the policies" --set fence=rule --set admissionPolicies.enabled=false
check_refused "a fence of a rule before Kubernetes 1.37" --set fence=rule --kube-version 1.36.3
group='autoscaler.nodeGroups[0].name=a,autoscaler.nodeGroups[0].nodeSelector.pool=a,autoscaler.nodeGroups[0].maximum'
check_refused "groups of nodes with the fence of a rule" --set "fence=rule,$group=1"
check_refused "groups of nodes in mode stock" --set "mode=stock,$group=1"
check_refused "groups of nodes without the policies" --set "fence=taint,admissionPolicies.enabled=false,$group=1"
check_refused "more placeholder pods than a group can have" --set "fence=taint,$group=101"
check_refused "a group of all nodes" --set 'fence=taint,autoscaler.nodeGroups[0].name=a,autoscaler.nodeGroups[0].maximum=1'
check_refused "MPS in mode stock" --set mode=stock --set mps.enabled=true
check_refused "dialects in mode stock" --set mode=stock --set dialects.enabled=true --set 'dialects.default={hami}'
check_refused "enabled dialects without a dialect" --set dialects.enabled=true
check_refused "dialects without the webhook" --set webhook.enabled=false --set dialects.enabled=true --set 'dialects.default={hami}'
check_refused "an unknown dialect" --set dialects.enabled=true --set 'dialects.default={hammi}'
check_refused "an unknown handling of unconverted pods" --set dialects.unconverted=Audit
check_refused "hidden GPUs in all namespaces" --set unclaimedGpus.hide=true
check_refused "shared memory with an unknown unit" --set-string mps.shmSize=8GB
check_refused "an extended resource in mode managed" --set extendedResourceName=nvidia.com/gpu
check_refused "an extended resource without a domain" --set mode=stock --set extendedResourceName=gpu
check_refused "an unknown device order" --set driver.deviceOrder=random
check_refused "an unknown handling of other allocators" --set driver.otherAllocators=warn
check_refused "a class with two selectors" --set deviceClasses.h100.architecture=Hopper
check_refused "a class of the name that MIG has" --set driver.mig=true --set deviceClasses.mig.productName=H100
check_refused "a class without a selector" --set deviceClasses.other.config.topology=x
check_refused "a quote in a product name" --set-string "deviceClasses.h100.productName=H'100"
check_refused "an empty peer of the network policies" --set-json 'networkPolicy.scrapeFrom=[{}]'
check_refused "a cluster without resource.k8s.io/v1 by default" --kube-version 1.33.0
