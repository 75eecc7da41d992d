#!/usr/bin/env bash
# Compares new random cases of upstream's allocator, of all profiles, with Tessera's until the time
# is up or a result differs.
#
#   fuzz.sh ORACLE CONFORMANCE   the two programs (make fuzz-allocator builds them)
#
# MINUTES: duration (default 10). SEED: first seed (default: from the clock); it is printed and
# reproduces a run. COUNT: cases of each profile and seed (default 60).
# Policies other than first fit are compared by outcome, and their allocations are replayed on
# upstream.
set -euo pipefail

oracle=${1:?path of the oracle}
conformance=${2:?path of the conformance program}
minutes=${MINUTES:-10}
seed=${SEED:-$(date +%s)}
count=${COUNT:-60}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

replay() {
  local golden=$1 policy=$2
  "$conformance" --policy "$policy" --write-answers "$work/answers.jsonl" "$golden" >"$work/log" || {
    cat "$work/log"
    return 1
  }
  "$oracle" compare --level L1 "$golden" "$work/answers.jsonl" >"$work/log" 2>&1 || {
    cat "$work/log"
    return 1
  }
}

differs() {
  local golden=$1 policy=$2 kept
  kept=${TMPDIR:-/tmp}/fuzz-allocator-$seed.jsonl
  cp "$golden" "$kept"
  echo "policy $policy differs from upstream: seed $seed; cases saved to $kept" >&2
  exit 1
}

mapfile -t profiles < <("$oracle" generate --profile list 2>&1 | awk 'NF { print $1 }')
end=$((SECONDS + minutes * 60))
cases=0
while [ "$SECONDS" -lt "$end" ]; do
  golden=$work/golden.jsonl
  : >"$golden"
  for profile in "${profiles[@]}"; do
    # The oracle skips a case if upstream contradicts itself: there is nothing to compare with.
    if "$oracle" generate --seed "$seed" --count "$count" --profile "$profile" >"$work/profile.jsonl" 2>"$work/log"; then
      cat "$work/profile.jsonl" >>"$golden"
    else
      echo "seed $seed, profile $profile skipped: $(tail -1 "$work/log")"
    fi
  done
  "$conformance" --policy first-fit "$golden" >"$work/log" || {
    cat "$work/log"
    differs "$golden" first-fit
  }
  for policy in binpack spread random least-fragmentation; do
    replay "$golden" "$policy" || differs "$golden" "$policy"
  done
  cases=$((cases + $(wc -l <"$golden")))
  echo "seed $seed: $(wc -l <"$golden") cases under 4 policies agree; $cases so far, $(((end - SECONDS) / 60)) min left"
  seed=$((seed + 1))
done
echo "$cases cases agree"
