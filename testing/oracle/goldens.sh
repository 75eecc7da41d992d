#!/usr/bin/env bash
# Regenerates the golden files with Kubernetes' allocator: the cases of the conformance suite, with
# the number of each profile in testing/data/conformance/manifest.tsv, and the outcomes of
# selectors.
#
#   goldens.sh check ORACLE    fails if a regenerated file differs from the stored one by a byte (make goldens-check)
#   goldens.sh write ORACLE    writes the files (make goldens)
#
# Needs Python for the hand-made cases (traps.py).
set -euo pipefail

action=${1:?check or write}
oracle=${2:?path of the oracle}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
cases=$repository/testing/data/conformance
selectors=$repository/allocator/tests/golden/selectors.tsv

command -v python3 >/dev/null || {
  echo "python3 not found, which traps.py needs" >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/cases"

# The manifest must have exactly the profiles of the oracle and the hand-made cases.
diff --label "profiles of the oracle" --label "$cases/manifest.tsv" \
  <({ "$oracle" generate --profile list && echo traps; } | sort) <(cut -f 1 "$cases/manifest.tsv" | sort)
while IFS=$'\t' read -r profile count; do
  if [ "$profile" = traps ]; then
    python3 "$here/traps.py" | "$oracle" solve >"$work/cases/traps.jsonl"
  else
    "$oracle" generate --profile "$profile" --seed 1 --count "$count" >"$work/cases/$profile.jsonl"
  fi
done <"$cases/manifest.tsv"
"$oracle" selectors <"$selectors" >"$work/selectors.tsv"

case $action in
check)
  differing=0
  compare() { # regenerated, stored
    cmp "$1" "$2" || differing=$((differing + 1))
  }
  for file in "$work"/cases/*.jsonl; do compare "$file" "$cases/$(basename "$file")"; done
  compare "$work/selectors.tsv" "$selectors"
  for file in "$cases"/*.jsonl; do
    [ -e "$work/cases/$(basename "$file")" ] || {
      echo "$file is not in manifest.tsv" >&2
      differing=$((differing + 1))
    }
  done
  if [ "$differing" -gt 0 ]; then
    echo "$differing golden files differ from upstream's results; regenerate them with make goldens" >&2
    exit 1
  fi
  echo "$(cat "$work"/cases/*.jsonl | wc -l) golden cases and $(wc -l <"$selectors") selectors match upstream's results"
  ;;
write)
  cp "$work"/cases/*.jsonl "$cases/"
  cp "$work/selectors.tsv" "$selectors"
  ;;
*)
  echo "goldens.sh: invalid action \`$action\`: expected check or write" >&2
  exit 2
  ;;
esac
