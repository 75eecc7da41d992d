#!/usr/bin/env bash
# Builds the interceptor for aarch64 and runs its tests on an emulated processor, with the Rust and
# the compilers of Debian testing and the emulator of Debian 12 from apt. Installs nothing.
#
#   arm64.sh               the tests that take a few minutes
#   arm64.sh all           the tests of docs/reference/intercept-arm64.md; a quarter of an hour
#   arm64.sh TEST...       files of intercept/hook/tests
#
# Needs a Debian machine of x86-64 with Linux 6.7 or newer (for binfmt_misc in a user namespace), a
# network and 2.2 GB of disk; no root. Without the packages it prints `SKIPPED: arm64-packages:
# <reason>` and succeeds, without such namespaces `SKIPPED: arm64-namespaces: <reason>`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")/arm64
# shellcheck source=debian.sh
source intercept/hook/tests/debian.sh
# QEMU 11 refuses MADV_DONTFORK, and the library gives no memory without it. QEMU 7 ignores it.
readonly rust=forky emulator=bookworm machine=aarch64-unknown-linux-gnu
packages=(base-files bash binutils cargo coreutils dash findutils gcc gcc-aarch64-linux-gnu grep libc6-dev libc6-dev-arm64-cross mount procps sed
  util-linux)

fetch() {
  local options=(-o "APT::Architectures=amd64,arm64" -o Acquire::Check-Valid-Until=false -o Debug::NoLocking=true)
  know "$rust" "${options[@]}" && know "$emulator" &&
    apt_of "$rust" "${options[@]}" --download-only --yes --no-install-recommends install "${packages[@]}" &&
    (cd "$target/$rust/packages" && apt_of "$rust" "${options[@]}" download libstd-rust-dev:arm64) &&
    (cd "$target/$emulator/packages" && apt_of "$emulator" download qemu-user-static)
}

lay_out() {
  mv "$target/$rust"/cache/archives/*.deb "$target/$rust/packages/"
  unpack "$rust"
  unpack "$emulator"
  # The C library that is for cross compilers, where programs of aarch64 look for one.
  (cd "$target/$rust/root/usr/lib/aarch64-linux-gnu" && ln -s ../../aarch64-linux-gnu/lib/*.so* .)
  (cd "$target/$rust/root/usr/lib" && ln -s aarch64-linux-gnu/ld-linux-aarch64.so.1 .)
  mkdir -p "$target/$rust/root/usr/local/lib" # which no package has
  rm -rf "$target"/{"$rust","$emulator"}/{packages,state,cache}
}

skip() { # name, reason
  echo "SKIPPED: $1: $2"
  exit
}

# In namespaces of its own, so that all of it is gone with the last process.
in_namespaces() { unshare --user --map-root-user --mount "$@"; }

# With containers in them, which tests make.
can_emulate() {
  in_namespaces sh -c 'mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc && unshare --user --map-root-user --mount --pid --fork true'
}

# With Debian testing's /usr in place of the machine's, and programs of aarch64 run by the emulator.
emulated() { # command...
  # shellcheck disable=SC2016  # the shell within expands it
  in_namespaces bash -euc '
    root=$1 emulator=$2
    shift 2
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    # ELF, 64 bits, little-endian, a program or a library, of machine 183; the interpreter is open
    # already.
    magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
    echo ":aarch64:M::$magic:$mask:$emulator:F" >/proc/sys/fs/binfmt_misc/register
    mount --bind "$root/usr" /usr
    exec "$@"
  ' bash "$target/$rust/root" "$target/$emulator/root/usr/bin/qemu-aarch64-static" "$@"
}

case ${1-} in
"") tests=(limits modes routes shape) ;;
all) tests=(bypasses calls compute coverage faults executables hami host_pid known_limits limits modes mps nvml oversubscription processes retained_memory routes sequences shape) ;;
*) tests=("$@") ;;
esac
for test in "${tests[@]}"; do
  [ -f "intercept/hook/tests/$test.rs" ] || { echo "no file of tests is named $test" >&2; exit 2; }
done
can_emulate || skip arm64-namespaces "no binfmt_misc in a user namespace, which Linux 6.7 has, or no user namespaces"
what="$rust $emulator ${packages[*]}"
if [ "$(cat "$target/fetched" 2>/dev/null)" != "$what" ]; then
  echo "fetching Debian's Rust, compilers and emulator: 330 MB"
  rm -f "$target/fetched"
  fetch || skip arm64-packages "apt has not got the packages of $rust and $emulator from $mirror"
  lay_out
  echo "$what" >"$target/fetched"
fi
# Behind another /usr, what lies there is out of sight.
case $(realpath --canonicalize-missing "${CARGO_HOME:-$HOME/.cargo}") in /usr/*) export CARGO_HOME=$target/cargo ;; esac
cargo fetch --locked --quiet
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS # which .cargo/config.toml says
export PATH=/usr/bin:/usr/sbin CC=aarch64-linux-gnu-gcc CARGO_NET_OFFLINE=true
export CARGO_TARGET_DIR=$target/built CARGO_BUILD_TARGET=$machine
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$CC CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=gcc
emulated cargo test --locked --no-fail-fast --package tessera-intercept-abi --lib
# Tests that cannot pass in emulation. The shell and tools in containers are those of the machine,
# which report that they cannot load a library of another architecture. The emulator ignores
# MADV_DONTFORK, by which the death of a process with living children is detected, and answers for
# /proc/self itself.
skipped=(programs_without_gpu_are_unaffected surviving_child_does_not_hold_its_parents_memory
  memory_of_200_killed_processes_is_free_at_once process_without_proc_is_identified_by_host_pid)
for test in "${skipped[@]}"; do
  grep --quiet --recursive "fn $test()" intercept/hook/tests || { echo "no test is named $test" >&2; exit 2; }
done
# One at a time: a test starts programs, so the emulator forks while other tests run. A thread of
# theirs may hold a lock of the emulator, for which the child then waits without end.
emulated cargo test --locked --no-fail-fast --package tessera-intercept-hook "${tests[@]/#/--test=}" -- --test-threads=1 "${skipped[@]/#/--skip=}"
