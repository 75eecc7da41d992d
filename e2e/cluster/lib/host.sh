# shellcheck shell=bash
#
# Kernel settings without a namespace that the kubelet changes permanently. They are saved before
# and restored afterwards.

host_settings=(vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys
  kernel/keys/root_maxbytes)

host_settings_save() {
  local setting
  for setting in "${host_settings[@]}"; do
    if [ -r "/proc/sys/$setting" ]; then echo "$setting $(cat "/proc/sys/$setting")"; fi
  done >"$rundir/host-settings"
}

host_settings_restore() {
  local setting value
  [ -f "$rundir/host-settings" ] || return 0
  while read -r setting value; do
    if [ "$(cat "/proc/sys/$setting")" != "$value" ]; then echo "$value" >"/proc/sys/$setting"; fi
  done <"$rundir/host-settings"
}

host_settings_leftovers() {
  local setting value
  [ -f "$rundir/host-settings" ] || return 0
  while read -r setting value; do
    if [ "$(cat "/proc/sys/$setting")" != "$value" ]; then echo "/proc/sys/$setting"; fi
  done <"$rundir/host-settings"
}
