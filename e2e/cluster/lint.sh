#!/usr/bin/env bash
# Part of make lint: checks the shell scripts, the build context of images, and the chart. Needs the
# package shellcheck (install-deps.sh), and Go to build helm once.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v shellcheck >/dev/null || {
  echo "shellcheck is missing: run $here/install-deps.sh" >&2
  exit 1
}
cd "$here"
shellcheck --external-sources --check-sourced --source-path .:SCRIPTDIR \
  ./*.sh lib/machine-init.sh lib/residue.sh \
  ../../deploy/chart/check.sh ../../deploy/images/check.sh \
  ../../testing/judge/fuzz.sh ../../testing/oracle/goldens.sh ../../testing/fuzz/run.sh \
  ../../.ci/run ../../.ci/install-cargo-deny \
  ../../intercept/hook/tests/glibc.sh ../../intercept/hook/tests/arm64.sh \
  ../../testing/real-programs/install.sh ../../bench/ai-benchmark/run.sh
"$here/../../deploy/images/check.sh"
HELM=$("$here/build.sh" helm)/helm "$here/../../deploy/chart/check.sh"
