#!/usr/bin/env bash
# Fuzzes each target for so many minutes: testing/fuzz/run.sh 5. What is found stays in testing/fuzz/corpus for the next time; an input that breaks
# something is kept in testing/fuzz/artifacts, and its target ends there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly minutes=${1:?how many minutes for each target}

if ! cargo +nightly --version >/dev/null 2>&1 || ! cargo fuzz --version >/dev/null 2>&1; then
  echo "fuzzing needs nightly Rust and cargo-fuzz: rustup toolchain install nightly && cargo install cargo-fuzz --locked" >&2
  exit 1
fi

for target in grant ledger hami; do
  options=(-max_total_time=$((minutes * 60)) -print_final_stats=1)
  [[ ! -f testing/fuzz/$target.dict ]] || options+=(-dict="testing/fuzz/$target.dict")
  cargo +nightly fuzz run --fuzz-dir testing/fuzz "$target" -- "${options[@]}"
done
