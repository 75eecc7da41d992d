# shellcheck shell=bash
#
# OCI images without a container engine: an archive is a tar of oci-layout, index.json, and blobs
# named by digest. Layers are tars with fixed times and owners, so equal content gives equal images.

# Moves a file into an image's blobs, and prints its descriptor.
oci_blob() { # image directory, media type, file
  local digest size
  digest=$(sha256sum "$3" | cut -d' ' -f1)
  size=$(stat --format %s "$3")
  mv "$3" "$1/blobs/sha256/$digest"
  jq -cn --arg type "$2" --arg digest "sha256:$digest" --argjson size "$size" \
    '{mediaType: $type, digest: $digest, size: $size}'
}

# Writes an image archive. Layers are directories, the lowest first. The configuration is the
# `config` object of the OCI image specification (Entrypoint, User, Env, ...).
oci_archive() { # archive, name with tag, configuration, layer directories...
  local archive=$1 name=$2 config=$3 image layer layers=[] diff_ids=[] descriptor manifest
  shift 3
  image=$(mktemp -d "$archive.XXXXXX")
  mkdir -p "$image/blobs/sha256"
  for layer in "$@"; do
    tar --create --file "$image/layer" --directory "$layer" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner .
    descriptor=$(oci_blob "$image" application/vnd.oci.image.layer.v1.tar "$image/layer")
    layers=$(jq -c --argjson layer "$descriptor" '. + [$layer]' <<<"$layers")
    diff_ids=$(jq -c --argjson layer "$descriptor" '. + [$layer.digest]' <<<"$diff_ids")
  done
  jq -cn --argjson config "$config" --argjson ids "$diff_ids" \
    '{architecture: "amd64", os: "linux", config: $config, rootfs: {type: "layers", diff_ids: $ids}}' >"$image/config"
  descriptor=$(oci_blob "$image" application/vnd.oci.image.config.v1+json "$image/config")
  jq -cn --argjson config "$descriptor" --argjson layers "$layers" \
    '{schemaVersion: 2, mediaType: "application/vnd.oci.image.manifest.v1+json", config: $config, layers: $layers}' \
    >"$image/manifest"
  manifest=$(oci_blob "$image" application/vnd.oci.image.manifest.v1+json "$image/manifest")
  jq -cn --argjson manifest "$manifest" --arg name "docker.io/$name" \
    '{schemaVersion: 2, manifests: [$manifest + {annotations: {"io.containerd.image.name": $name,
      "org.opencontainers.image.ref.name": ($name | split(":")[1])}}]}' >"$image/index.json"
  echo '{"imageLayoutVersion":"1.0.0"}' >"$image/oci-layout"
  tar --create --file "$archive.part" --directory "$image" oci-layout index.json blobs
  mv "$archive.part" "$archive"
  rm -r "$image"
}
