# Image of tessera-driver: node agent, interceptor library, and the supervisor of MPS control
# daemons. Build it from the repository root:
#
#   docker build --file deploy/images/driver.Dockerfile --tag ghcr.io/tessera-gpu/tessera-driver:0.1.0 .
#
# e2e/cluster/images.sh builds the same image without a container engine.
FROM docker.io/library/rust:1.95.0-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --locked --release --package tessera-driver --package tessera-mps \
    && cargo build --locked --profile intercept --package tessera-intercept --package tessera-intercept-cuda --package tessera-intercept-nvml \
    && install -D --target-directory /out/usr/local/bin target/release/tessera-driver target/release/tessera-mps \
    && install -D --mode 644 --target-directory /out/usr/local/lib/tessera target/intercept/libtessera_intercept.so \
        target/intercept/libtessera_intercept_cuda.so target/intercept/libtessera_intercept_nvml.so

# Only a C runtime, of the same Debian release as above, so the C library is the same.
FROM gcr.io/distroless/cc-debian12
COPY --from=build /out/ /
# root: the driver mounts file systems and writes to the kubelet's directories.
ENTRYPOINT ["/usr/local/bin/tessera-driver"]
LABEL org.opencontainers.image.title="tessera-driver" \
      org.opencontainers.image.description="DRA kubelet plugin for fractional NVIDIA GPUs, with the interceptor library and the supervisor of MPS daemons." \
      org.opencontainers.image.source="https://github.com/tessera-gpu/tessera" \
      org.opencontainers.image.licenses="Apache-2.0"
