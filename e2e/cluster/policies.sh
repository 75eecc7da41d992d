#!/usr/bin/env bash
# Tries the chart's admission policies and RBAC on a cluster on which it is installed (any KUBECONFIG of an
# administrator): each refusal by its message, and next to each the nearest thing that must be allowed.
set -euo pipefail

namespace=tessera-policies
controller=system:serviceaccount:tessera-system:tessera-controller
driver=system:serviceaccount:tessera-system:tessera-driver
scheduler=system:kube-scheduler
node=$(kubectl get nodes -o 'jsonpath={.items[0].metadata.name}')
failures=0

clean_up() {
  kubectl delete namespace "$namespace" --wait=false >/dev/null 2>&1 || true
  kubectl delete clusterrole,clusterrolebinding "$namespace" >/dev/null 2>&1 || true
}

# kubectl reads a status before it patches it, which Tessera's components do not: the right to do so is this test's.
prepare() {
  clean_up
  kubectl wait --for delete "namespace/$namespace" --timeout 60s >/dev/null
  kubectl create namespace "$namespace" >/dev/null
  kubectl create serviceaccount default --namespace "$namespace" >/dev/null 2>&1 || true
  kubectl create clusterrole "$namespace" --verb get --resource resourceclaims/status >/dev/null
  kubectl create clusterrolebinding "$namespace" --clusterrole "$namespace" --user "$controller" --user "$driver" >/dev/null
}

allowed() { # what, command...
  local what=$1 output
  shift
  if output=$("$@" 2>&1); then
    echo "ok: $what is allowed"
  else
    echo "FAILED: $what should be allowed: $output"
    failures=$((failures + 1))
  fi
}

refused() { # what, part of the message, command...
  local what=$1 message=$2 output
  shift 2
  if output=$("$@" 2>&1); then
    echo "FAILED: $what should be refused"
    failures=$((failures + 1))
  elif [[ $output != *"$message"* ]]; then
    echo "FAILED: $what should be refused with \"$message\": $output"
    failures=$((failures + 1))
  else
    echo "ok: $what is refused"
  fi
}

# Creates, on trial, the object on stdin's place: the last argument.
try() { # kubectl arguments..., object
  kubectl create --namespace "$namespace" --dry-run=server --filename - "${@:1:$#-1}" <<<"${*: -1}"
}

claim() { # name, rest of `exactly`
  echo '{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "'"$1"'"}, "spec":
    {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"'"$2"'}}]}}}'
}

template() { # rest of `exactly`
  echo '{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "try"}, "spec": {"spec":
    {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"'"$1"'}}]}}}}'
}

slice() { # driver node
  echo '{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "try"}, "spec": {"driver": "'"$1"'",
    "nodeName": "'"$2"'", "pool": {"name": "'"$2"'", "generation": 1, "resourceSliceCount": 1}, "devices": []}}'
}

pod() { # field of the container, path field, path, claims
  echo '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try"}, "spec": {"resourceClaims": '"$4"',
    "volumes": [{"name": "v", "'"$([ "$1" = volumeMounts ] && echo emptyDir || echo persistentVolumeClaim)"'":
      '"$([ "$1" = volumeMounts ] && echo '{}' || echo '{"claimName": "c"}')"'}],
    "containers": [{"name": "c", "image": "x", "'"$1"'": [{"name": "v", "'"$2"'": "'"$3"'"}]}]}}'
}

# Reserved for a consumer of a kind that nobody knows: tessera-controller would release an allocation that nobody has
# reserved, and kube-controller-manager one whose pod does not exist.
allocation='{"status": {"reservedFor": [{"apiGroup": "example.com", "resource": "tests", "name": "x", "uid": "x"}],
  "allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results":
  [{"request": "gpu", "driver": "gpu.tessera.dev", "pool": "p", "device": "gpu-1"}]}}}}'
other_allocation=${allocation//gpu.tessera.dev/gpu.example.com}
no_allocation='{"status": {"allocation": null, "reservedFor": null}}'
finalizer='{"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}}'
no_finalizer='{"metadata": {"finalizers": null}}'

patch_status() { kubectl patch resourceclaim held --namespace "$namespace" --subresource status --type merge --patch "$@"; }
patch() { kubectl patch resourceclaim held --namespace "$namespace" --type merge --patch "$@"; }

check_allocation() {
  kubectl create --namespace "$namespace" --filename - <<<"$(claim held '')" >/dev/null
  allowed "setting the finalizer, by the controller" patch "$finalizer" --as "$controller"
  refused "an allocation by kube-scheduler" "only tessera-controller allocates" patch_status "$allocation" --as "$scheduler"
  refused "an allocation by an administrator" "only tessera-controller allocates" patch_status "$allocation"
  refused "an allocation by the driver" "cannot patch" patch_status "$allocation" --as "$driver"
  allowed "another driver's allocation by kube-scheduler" patch_status "$other_allocation" --as "$scheduler" --dry-run=server
  allowed "an allocation by the controller" patch_status "$allocation" --as "$controller"
  refused "stripping the finalizer of an allocated claim" "stays while" patch "$no_finalizer"
  allowed "a label on an allocated claim" patch '{"metadata": {"labels": {"a": "b"}}}'
  refused "ending the allocation by an administrator" "may not end" patch_status "$no_allocation"
  allowed "ending the allocation by the controller" patch_status "$no_allocation" --as "$controller" --dry-run=server
  allowed "ending the allocation by kube-scheduler" patch_status "$no_allocation" --as "$scheduler"
  allowed "removing the finalizer after that" patch "$no_finalizer"
}

check_fence() {
  local fence='{"key": "gpu.tessera.dev/managed", "operator": "Exists"' keyless='{"operator": "Exists"}' first
  refused "a claim that tolerates the fence" "must not tolerate" try "$(claim try ", \"tolerations\": [$fence}]")"
  refused "a template that tolerates the fence" "must not tolerate" try "$(template ", \"tolerations\": [$fence, \"effect\": \"NoSchedule\"}]")"
  first=$(claim try ", \"tolerations\": [$fence}]" | jq '.spec.devices.requests[0] |= {name, firstAvailable: [.exactly + {name: "a"}]}')
  refused "an alternative that tolerates the fence" "must not tolerate" try "$first"
  allowed "a toleration without a key" try "$(claim try ", \"tolerations\": [$keyless]")"
  allowed "a toleration of the fence's other effect" try "$(claim try ", \"tolerations\": [$fence, \"effect\": \"NoExecute\"}]")"
}

check_slices() {
  local as_driver=(--as "$driver" --as-user-extra "authentication.kubernetes.io/node-name=$node")
  allowed "a slice of the driver's own node" try "${as_driver[@]}" "$(slice gpu.tessera.dev "$node")"
  refused "a slice of another node" "its own node" try "${as_driver[@]}" "$(slice gpu.tessera.dev elsewhere)"
  refused "a slice of another driver, by ours" "its own node" try "${as_driver[@]}" "$(slice gpu.example.com "$node")"
  refused "a slice by a driver whose token names no node" "its own node" try --as "$driver" "$(slice gpu.tessera.dev "$node")"
  refused "a slice of ours, by an administrator" "only tessera-driver" try "$(slice gpu.tessera.dev "$node")"
  allowed "a slice of another driver" try "$(slice gpu.example.com "$node")"
}

check_mounts() {
  local path claims='[{"name": "gpu", "resourceClaimName": "held"}]'
  for path in /dev/tessera /dev/tessera/ /dev/tessera/x/grant /dev /dev/ / //dev/./tessera dev/tessera; do
    refused "a volume at $path" "/dev/tessera" try "$(pod volumeMounts mountPath "$path" "$claims")"
  done
  refused "a volume at /tmp/../dev" "must not use .." try "$(pod volumeMounts mountPath /tmp/../dev "$claims")"
  refused "a block device at /dev/tessera/x" "/dev/tessera" try "$(pod volumeDevices devicePath /dev/tessera/x "$claims")"
  allowed "a volume at /dev/shm" try "$(pod volumeMounts mountPath /dev/shm "$claims")"
  allowed "a volume at /dev/tessera2" try "$(pod volumeMounts mountPath /dev/tessera2 "$claims")"
  allowed "a block device at /dev/xvda" try "$(pod volumeDevices devicePath /dev/xvda "$claims")"
  allowed "a volume at /dev in a pod without claims" try "$(pod volumeMounts mountPath /dev '[]')"
}

trap clean_up EXIT
prepare
check_allocation
check_fence
check_slices
check_mounts
if [ "$failures" -gt 0 ]; then
  echo "$failures checks failed"
  exit 1
fi
