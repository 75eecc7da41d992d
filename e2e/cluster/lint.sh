#!/usr/bin/env bash
# Part of make lint: checks the shell scripts, the build context of images, and the chart. Needs the
# package shellcheck (install-deps.sh), Go to build helm once, and PROMTOOL or apt for promtool.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command -v shellcheck >/dev/null || {
  echo "shellcheck is missing: run $here/install-deps.sh" >&2
  exit 1
}
cd "$here"

# Prints the path of promtool. Debian's package would also start a server: only its file is taken.
promtool() { # directory
  local package
  if [ ! -x "$1/promtool" ]; then
    package=$(mktemp -d)
    (cd "$package" && apt-get -o Acquire::Retries=3 --quiet=2 download prometheus >&2)
    dpkg --extract "$package"/prometheus_*.deb "$package"
    install "$package/usr/bin/promtool" "$1/promtool"
    rm -r "$package"
  fi
  echo "$1/promtool"
}

shellcheck --external-sources --check-sourced --source-path .:SCRIPTDIR \
  ./*.sh lib/machine-init.sh lib/residue.sh \
  ../../deploy/chart/check.sh ../../deploy/images/check.sh \
  ../../testing/judge/fuzz.sh ../../testing/oracle/goldens.sh ../../testing/fuzz/run.sh \
  ../../.ci/run ../../.ci/install-cargo-deny \
  ../../intercept/hook/tests/glibc.sh ../../intercept/hook/tests/arm64.sh \
  ../../testing/real-programs/install.sh ../../bench/ai-benchmark/run.sh
"$here/../../deploy/images/check.sh"
bin=$("$here/build.sh" helm)
HELM=$bin/helm PROMTOOL=${PROMTOOL:-$(promtool "$bin")} "$here/../../deploy/chart/check.sh"
