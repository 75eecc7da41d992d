# Image of tessera-controller. Build it from the repository root:
#
#   docker build --file deploy/images/controller.Dockerfile --tag ghcr.io/tessera-gpu/tessera-controller:0.1.0 .
#
# e2e/cluster/images.sh builds the same image without a container engine.
FROM docker.io/library/rust:1.95.0-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --locked --release --package tessera-controller \
    && install -D target/release/tessera-controller /out/usr/local/bin/tessera-controller

# Only a C runtime, of the same Debian release as above, so the C library is the same.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /out/ /
ENTRYPOINT ["/usr/local/bin/tessera-controller"]
LABEL org.opencontainers.image.title="tessera-controller" \
      org.opencontainers.image.description="Allocates ResourceClaims for fractional NVIDIA GPUs in Kubernetes." \
      org.opencontainers.image.source="https://github.com/tessera-gpu/tessera" \
      org.opencontainers.image.licenses="Apache-2.0"
