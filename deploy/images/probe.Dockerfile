# Image of the test program tessera-probe, which reports the GPUs of its container and allocates
# memory until an allocation fails. Build it from the repository root:
#
#   docker build --file deploy/images/probe.Dockerfile --tag tessera/probe:e2e .
#
# e2e/cluster/images.sh builds the same image without a container engine.
FROM docker.io/library/rust:1.95.0-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --locked --release --package tessera-probe \
    && install -D target/release/tessera-probe /out/usr/local/bin/tessera-probe

# Only a C runtime, of the same Debian release as above, so the C library is the same.
FROM gcr.io/distroless/cc-debian12
COPY --from=build /out/ /
# In PATH, because the tests' pods set a command.
ENV PATH=/usr/local/bin:/usr/bin:/bin
ENTRYPOINT ["/usr/local/bin/tessera-probe"]
LABEL org.opencontainers.image.title="tessera-probe" \
      org.opencontainers.image.description="Test program: reports the GPUs that a container sees and allocates their memory." \
      org.opencontainers.image.source="https://github.com/tessera-gpu/tessera" \
      org.opencontainers.image.licenses="Apache-2.0"
