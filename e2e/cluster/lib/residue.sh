#!/bin/sh
# Run on a node: prints one line for each file, mount and journal of claims. The driver's base CDI
# spec and its libraries are not listed: they exist while the driver runs. The journal is printed as
# JSON.
find /var/run/cdi -name 'k8s.gpu.tessera.dev-claim_*' 2>/dev/null | sed 's/^/CDI file /'
find /run/tessera/asked /run/tessera/grants /run/tessera/ledgers -mindepth 1 2>/dev/null | sed 's/^/state /'
grep -o ' /run/tessera/ledgers/[^ ]*' /proc/mounts | sed 's/^/mount/'
if [ -f /run/tessera/journal.json ]; then echo "journal $(tr -d '\n' </run/tessera/journal.json)"; fi
