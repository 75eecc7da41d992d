#!/usr/bin/env bash
# Runs the interceptor's tests with the glibc of several Debian releases, from apt, in their
# containers.
#
#   glibc.sh [SUITE...]     default: bullseye bookworm trixie forky
#
# All is linked with the first release's, which should be the oldest. Needs a Debian machine, its
# compiler and a network, so CI does not run it. Results: docs/reference/intercept-glibc.md.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")/glibc
# shellcheck source=debian.sh
source intercept/hook/tests/debian.sh
# Tests that depend on the loader.
tests=(bypasses calls executables limits modes nvml processes routes shape)

libraries_of() { echo "$target/$1/root/lib/x86_64-linux-gnu"; } # suite

# Fetches a suite's glibc to where a linker finds it. Links out of the directory are changed to
# links within it.
fetch() { # suite
  local place=$target/$1 link
  know "$1"
  (cd "$place/packages" && apt_of "$1" download libc6 libc6-dev linux-libc-dev libgcc-s1)
  unpack "$1"
  for link in lib lib64; do [ -e "$place/root/$link" ] || ln -s "usr/$link" "$place/root/$link"; done
  for link in "$place"/root/lib64/*.so.* "$place"/root/usr/lib/x86_64-linux-gnu/*.so; do
    if [[ -L $link && $(readlink "$link") = /* ]]; then ln -sfn "$place/root$(readlink "$link")" "$link"; fi
  done
}

# A compiler that links with a suite's glibc.
write_compiler() { # suite, file
  local root=$target/$1/root libraries
  libraries=$root/usr/lib/x86_64-linux-gnu
  cat >"$2" <<END
#!/bin/sh
exec cc --sysroot="$root" -B"$libraries" -L"$libraries" -L"$(libraries_of "$1")" "\$@"
END
  chmod +x "$2"
}

tools_run_with() { # suite
  local libraries
  libraries=$(libraries_of "$1")
  "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" /bin/true 2>/dev/null
}

suites=("$@")
if [ $# -eq 0 ]; then suites=(bullseye bookworm trixie forky); fi
for suite in "${suites[@]}"; do fetch "$suite"; done
write_compiler "${suites[0]}" "$target/cc"
export CC=$target/cc CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=$target/cc CARGO_TARGET_DIR=$target/built
for suite in "${suites[@]}"; do
  # A static program has no other glibc than its own.
  skipped=(static_program_runs)
  # The machine's own tools do not run with a glibc older than its own, and these tests start some.
  if ! tools_run_with "$suite"; then
    skipped+=(grant_applies_with_an_empty_environment programs_without_gpu_are_unaffected
      surviving_child_does_not_hold_its_parents_memory)
  fi
  for test in "${skipped[@]}"; do
    grep --quiet --recursive "fn $test()" intercept/hook/tests || { echo "no test is named $test" >&2; exit 2; }
  done
  echo "=== glibc of $suite: $(dpkg-deb --field "$target/$suite"/packages/libc6_*.deb Version)"
  TESSERA_GLIBC=$(libraries_of "$suite") cargo test --locked --no-fail-fast --package tessera-intercept-hook "${tests[@]/#/--test=}" -- "${skipped[@]/#/--skip=}"
done
