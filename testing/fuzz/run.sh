#!/usr/bin/env bash
# Fuzzes each target for the given minutes: testing/fuzz/run.sh 5. The corpus is stored in
# testing/fuzz/corpus. An input that crashes a target is stored in testing/fuzz/artifacts, and the
# target ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly minutes=${1:?minutes per target}

if ! cargo +nightly --version >/dev/null 2>&1 || ! cargo fuzz --version >/dev/null 2>&1; then
  echo "fuzzing needs nightly Rust and cargo-fuzz: rustup toolchain install nightly && cargo install cargo-fuzz --locked" >&2
  exit 1
fi

for target in grant ledger hami; do
  options=(-max_total_time=$((minutes * 60)) -print_final_stats=1)
  [[ ! -f testing/fuzz/$target.dict ]] || options+=(-dict="testing/fuzz/$target.dict")
  cargo +nightly fuzz run --fuzz-dir testing/fuzz "$target" -- "${options[@]}"
done
