// Command nic-driver is the DRA test driver of Kubernetes with NICs: devices that have a PCIe root.
// The trials use it as the driver of another vendor. It runs until SIGTERM.
//
//	nic-driver --kubeconfig FILE --node NODE NAME=PCIE_ROOT...
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/kubernetes/test/e2e/dra/test-driver/app"
)

const (
	driverName = "nic.example.com"
	pcieRoot   = "resource.kubernetes.io/pcieRoot"
	cdiDir     = "/var/run/cdi"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "credentials of the node's kubelet")
	node := flag.String("node", "", "name of the node, and of the pool")
	flag.Parse()
	if err := run(*kubeconfig, *node, flag.Args()); err != nil {
		log.Fatal(err)
	}
}

func run(kubeconfig, node string, names []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	devices, err := nics(names)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	sockets := filepath.Join(kubeletplugin.KubeletPluginsDir, driverName)
	for _, directory := range []string{sockets, cdiDir} {
		if err := os.MkdirAll(directory, 0o750); err != nil {
			return err
		}
	}
	published := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		node: {Slices: []resourceslice.Slice{{Devices: devices}}},
	}}
	plugin, err := app.StartPlugin(ctx, cdiDir, driverName, client, node,
		app.FileOperations{DriverResources: &published}, kubeletplugin.PluginDataDirectoryPath(sockets))
	if err != nil {
		return err
	}
	<-ctx.Done()
	plugin.Stop()
	return nil
}

// nics returns a device for each NAME=PCIE_ROOT.
func nics(names []string) ([]resourceapi.Device, error) {
	devices := make([]resourceapi.Device, 0, len(names))
	for _, text := range names {
		name, root, found := strings.Cut(text, "=")
		if !found {
			return nil, fmt.Errorf("%q is not NAME=PCIE_ROOT", text)
		}
		devices = append(devices, resourceapi.Device{
			Name: name,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				pcieRoot: {StringValue: &root},
			},
		})
	}
	return devices, nil
}
