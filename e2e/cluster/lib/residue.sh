#!/bin/sh
# Run on a node: one line for each thing that belongs to a claim. The driver's base CDI spec and its library are not
# residue: they are there as long as the driver is. Journal entries are printed as the journal itself, for jq elsewhere.
find /var/run/cdi -name 'k8s.gpu.tessera.dev-claim_*' 2>/dev/null | sed 's/^/CDI file /'
find /run/tessera/asked /run/tessera/grants /run/tessera/ledgers -mindepth 1 2>/dev/null | sed 's/^/state /'
grep -o ' /run/tessera/ledgers/[^ ]*' /proc/mounts | sed 's/^/mount/'
if [ -f /run/tessera/journal.json ]; then echo "journal $(tr -d '\n' </run/tessera/journal.json)"; fi
