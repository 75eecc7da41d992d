// A fake of systemd-logind, for the kubelet's graceful node shutdown.
module github.com/tessera-gpu/tessera/e2e/cluster/modules/fake-logind

go 1.26.0

require github.com/godbus/dbus/v5 v5.2.2

require golang.org/x/sys v0.41.0 // indirect
