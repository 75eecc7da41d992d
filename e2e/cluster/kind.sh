#!/usr/bin/env bash
# make e2e-kind: runs the tests on a kind cluster, for machines with Docker. Builds the images from
# deploy/images, creates a cluster with one control plane and two workers, installs a fake NVIDIA
# driver on the workers, installs the chart, runs the tests, and deletes the cluster.
#
# Needs Docker and Rust, and Go unless kind, kubectl and helm are installed. KIND_IMAGE: node image
# (default: that of the kind release; Kubernetes >= 1.36). TESSERA_E2E_KEEP=1 keeps the cluster
# after the tests.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/cluster.sh
source "$here/lib/cluster.sh"

export TESSERA_KIND_CLUSTER=tessera-e2e
workers=("$TESSERA_KIND_CLUSTER-worker" "$TESSERA_KIND_CLUSTER-worker2")
kind_version=v0.33.0
kubeconfig=$(mktemp)

kind() {
  if command -v kind >/dev/null; then
    command kind "$@"
  else
    go run "sigs.k8s.io/kind@$kind_version" "$@"
  fi
}

cluster_configuration() {
  local node
  echo "kind: Cluster"
  echo "apiVersion: kind.x-k8s.io/v1alpha4"
  # As in lib/node.sh: crash tests kill a container often.
  echo "kubeadmConfigPatches:"
  echo "- '{apiVersion: kubelet.config.k8s.io/v1beta1, kind: KubeletConfiguration," \
    "crashLoopBackOff: {maxContainerRestartPeriod: 1s}}'"
  echo "nodes:"
  echo "- role: control-plane"
  for node in "${node_names[@]}"; do
    echo "- {role: worker, labels: {e2e.tessera.dev/world: ${world[$node]}}}"
  done
}

build_images() {
  local image
  for image in driver controller probe; do
    docker build --file "$repository/deploy/images/$image.Dockerfile" \
      --tag "tessera/$image:e2e" "$repository"
    kind load docker-image --name "$TESSERA_KIND_CLUSTER" "tessera/$image:e2e"
  done
  build_links_image
  build_executables_image
}

# As links_image in images.sh.
build_links_image() {
  local context
  context=$(mktemp -d)
  mkdir -p "$context/links/to/where/grants"
  ln -s /dev/tessera "$context/links/to/where/grants/are"
  printf 'FROM tessera/probe:e2e\nCOPY links /links\n' >"$context/Dockerfile"
  docker build --tag tessera/links:e2e "$context"
  rm -r "$context"
  kind load docker-image --name "$TESSERA_KIND_CLUSTER" tessera/links:e2e
}

# As executables_image in images.sh, in an image with a shell.
build_executables_image() {
  local context
  context=$(mktemp -d)
  executables_check_compilers
  executables_layer "$context/layer"
  cat >"$context/Dockerfile" <<'END'
FROM docker.io/library/debian:bookworm-slim
COPY layer /
COPY --from=tessera/probe:e2e /usr/local/bin/tessera-probe /usr/local/bin/tessera-probe
COPY --from=tessera/probe:e2e --chmod=4755 /usr/local/bin/tessera-probe /executables/setuid-probe
END
  docker build --tag tessera/executables:e2e "$context"
  rm -r "$context"
  kind load docker-image --name "$TESSERA_KIND_CLUSTER" tessera/executables:e2e
}

# Installs the fake driver's files as node_install_gpus does. docker cp cannot write to /run, which
# is a tmpfs in a kind node, so the files are piped through tar.
install_gpus() { # worker, world
  local description=$repository/testing/fake/world/worlds/$2.yaml files
  files=$(mktemp -d)
  "$cargo_output/tessera-fake-world" driver-root "$description" \
    "$cargo_output/libnvidia_ml.so" "$cargo_output/libcuda.so" "$files$node_driver_root"
  "$here/control-daemon.sh" "$cargo_output/fake-mps-control" "$files$node_driver_root"
  "$cargo_output/tessera-fake-world" sysfs "$description" "$files$node_sysfs_root"
  tar --create --directory "$files" . | docker exec --interactive "$1" tar --extract --directory /
  docker cp "$cargo_output/tessera-fake-world" "$1:/usr/local/bin/tessera-fake-world"
  rm -r "$files"
}

kubectl_admin() { kubectl --kubeconfig "$kubeconfig" "$@"; }

finish() {
  local status=$?
  trap - EXIT
  if [ "$status" -ne 0 ]; then
    kubectl --kubeconfig "$kubeconfig" --request-timeout=10s get pods,resourceclaims \
      --all-namespaces --output wide >&2 || true
  fi
  if [ "${TESSERA_E2E_KEEP:-}" = 1 ]; then
    info "cluster kept: export KUBECONFIG=$kubeconfig;" \
      "delete it with: kind delete cluster --name $TESSERA_KIND_CLUSTER"
  else
    kind delete cluster --name "$TESSERA_KIND_CLUSTER"
    rm -f "$kubeconfig"
  fi
  exit "$status"
}

main() {
  local index
  command -v docker >/dev/null ||
    fail "docker is missing: install it, or run make e2e, which does not need it"
  command -v helm >/dev/null && command -v kubectl >/dev/null || PATH=$("$here/build.sh"):$PATH
  (cd "$repository" && cargo build --locked --profile "$cargo_profile" \
    --package tessera-fake-world --package tessera-fake-nvml --package tessera-fake-cuda \
    --package tessera-fake-mps-control --package tessera-cli)
  trap finish EXIT
  cluster_configuration | kind create cluster --name "$TESSERA_KIND_CLUSTER" \
    --kubeconfig "$kubeconfig" --config - ${KIND_IMAGE:+--image "$KIND_IMAGE"}
  build_images
  for index in 0 1; do install_gpus "${workers[$index]}" "${world[${node_names[$index]}]}"; done
  export KUBECONFIG=$kubeconfig TESSERA_E2E_NODE=$here/kind-node.sh
  export TESSERA_E2E_HELM_VALUES=$here/values.yaml
  helm install tessera "$repository/deploy/chart/tessera" --namespace tessera-system \
    --create-namespace --values "$here/values.yaml" --wait --timeout "${wait_limit}s"
  for index in 0 1; do
    wait_for "the GPUs of ${workers[$index]} to be published" node_publishes "${workers[$index]}"
  done
  cd "$repository"
  cargo test --locked --profile "$cargo_profile" --package tessera-e2e --test cluster \
    -- --test-threads=1 "$@"
}

main "$@"
