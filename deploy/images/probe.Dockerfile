# The image of the tests' probe, which says what a container sees of its GPUs and takes memory until refused. Build it
# from the repository's root:
#
#   docker build --file deploy/images/probe.Dockerfile --tag tessera/probe:e2e .
#
# e2e/cluster/images.sh makes the same image without a container engine.
FROM docker.io/library/rust:1.95.0-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --locked --release --package tessera-probe \
    && install -D target/release/tessera-probe /out/usr/local/bin/tessera-probe

# A C runtime and nothing else; the same Debian release as above, so the same C library.
FROM gcr.io/distroless/cc-debian12
COPY --from=build /out/ /
# By name too: the tests' pods give a command.
ENV PATH=/usr/local/bin:/usr/bin:/bin
ENTRYPOINT ["/usr/local/bin/tessera-probe"]
LABEL org.opencontainers.image.title="tessera-probe" \
      org.opencontainers.image.description="Test program: reports the GPUs that a container sees and allocates their memory." \
      org.opencontainers.image.source="https://github.com/tessera-gpu/tessera" \
      org.opencontainers.image.licenses="Apache-2.0"
