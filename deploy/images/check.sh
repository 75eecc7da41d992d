#!/usr/bin/env bash
# Checks the images without a container engine: the Dockerfiles name the Rust release of
# rust-toolchain.toml, and .dockerignore leaves a build context from which cargo can build and which
# has no file of e2e, docs, examples or .github but the manifest of e2e.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
cargo=${CARGO:-cargo}
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT

fail() {
  echo "deploy/images/check.sh: $*" >&2
  exit 1
}

check_rust_release() {
  local release minimum named
  release=$(sed -nE 's/^channel = "(.*)"$/\1/p' rust-toolchain.toml)
  minimum=$(sed -nE 's/^rust-version = "(.*)"$/\1/p' Cargo.toml)
  [ -n "$release" ] || fail "rust-toolchain.toml: no channel"
  [[ $release. == "$minimum".* ]] || fail "Cargo.toml: $minimum; rust-toolchain.toml has $release"
  # Also of the containers in which jobs of CI run.
  while read -r named; do
    [[ $named == *"/rust:$release-"* ]] || fail "$named: rust-toolchain.toml has $release"
  done < <(grep -noE '[a-z./]*/rust:[^ ]+' deploy/images/*.Dockerfile .github/workflows/*.yml)
  for named in deploy/images/*.Dockerfile; do
    grep -q "/rust:$release-" "$named" || fail "$named: no stage from the image rust:$release"
  done
}

# The files that an engine would send, by the rules of .dockerignore.
context_files() {
  local files
  files=$(git ls-files --cached --others --exclude-standard | sort)
  comm -23 <(echo "$files") \
    <(git -c core.excludesFile="$PWD/.dockerignore" check-ignore --no-index --stdin <<<"$files" | sort)
}

check_context() {
  local unneeded
  unneeded=$(context_files | grep -E '^(e2e|docs|examples|\.github)/' | grep -vx e2e/Cargo.toml) || true
  [ -z "$unneeded" ] || fail "unneeded in the build context: $unneeded"
  context_files | tar --create --files-from=- | tar --extract --directory "$context"
  # Of what cargo does without compiling, this looks at the files of every target.
  "$cargo" fetch --quiet --locked --target x86_64-unknown-linux-gnu \
    --manifest-path "$context/Cargo.toml" ||
    fail "cargo cannot load the workspace from the build context: see .dockerignore"
}

check_rust_release
check_context
