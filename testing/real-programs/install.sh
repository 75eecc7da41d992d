#!/usr/bin/env bash
# Installs a stack of Python packages from its lock file and prints the directory of its virtual
# environment: install.sh STACK DIRECTORY. A stack that is installed already is not installed again.
#
# Exits with 3, after one line on stderr, if this machine cannot have the stack: no Python 3.11 or
# later, too little disk space, or a wheel that cannot be fetched.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
stack=${1:?stack} into=${2:?directory}
lock=$here/stacks/$stack.lock

# GiB that each stack needs while it is installed.
declare -A needs=([runtime]=1 [tools]=1 [arrays]=3 [torch]=14 [jax]=10 [onnx]=6 [tensorflow]=10 [vllm]=16)

cannot() {
  echo "stack $stack is not installed: $1" >&2
  exit 3
}

[ -f "$lock" ] || { echo "no such stack: $stack" >&2; exit 2; }
hash=$(sha256sum "$lock" | cut -c1-12)
directory=$into/$stack-$hash
mkdir -p "$into"
# Tests of one stack run at the same time.
exec 9>"$into/$stack.flock"
flock 9
if [ -f "$directory/installed" ]; then
  echo "$directory"
  exit
fi

python=
for candidate in python3.11 python3.12 python3.13 python3; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || cannot "it needs Python 3.11 or later with venv"
free=$(df --output=avail --block-size=1G "$into" | tail -1 | tr -d ' ')
[ "$free" -ge "${needs[$stack]}" ] || cannot "it needs ${needs[$stack]} GiB of disk space, and $free are free"

rm -rf "$directory"
"$python" -m venv "$directory"
echo "installing stack $stack into $directory" >&2
if ! "$directory/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir --only-binary :all: \
  --require-hashes --requirement "$lock" >&2; then
  rm -rf "$directory"
  cannot "pip failed, see above"
fi
touch "$directory/installed"
echo "$directory"
