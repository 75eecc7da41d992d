#!/usr/bin/env bash
# Checks the images without a container engine: the Dockerfiles use the Rust release of
# rust-toolchain.toml, and cargo can load the workspace from the build context. The context
# contains no file of e2e, docs, examples or .github except e2e/Cargo.toml.
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
  # Includes the containers of CI jobs.
  while read -r named; do
    [[ $named == *"/rust:$release-"* ]] || fail "$named: rust-toolchain.toml has $release"
  done < <(grep -noE '[a-z./]*/rust:[^ ]+' deploy/images/*.Dockerfile .github/workflows/*.yml)
  for named in deploy/images/*.Dockerfile; do
    grep -q "/rust:$release-" "$named" || fail "$named: no stage from the image rust:$release"
  done
}

# Prints the files that an engine would send according to .dockerignore.
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
  # This command checks the files of every target without compiling.
  "$cargo" fetch --quiet --locked --target x86_64-unknown-linux-gnu \
    --manifest-path "$context/Cargo.toml" ||
    fail "cargo cannot load the workspace from the build context: see .dockerignore"
}

check_rust_release
check_context
