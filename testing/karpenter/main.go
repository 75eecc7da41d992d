// Karpenter with its kwok provider, whose instance types have the devices of ResourceSlices that a
// Tessera driver would publish. The provider itself creates Node objects only.
//
// The environment variable SLICES_FILE names a file with a JSON list of ResourceSlices, as the API
// server stores them. All other settings are Karpenter's own flags.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"unique"

	resourcev1 "k8s.io/api/resource/v1"
	kwok "sigs.k8s.io/karpenter/kwok/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/cloudprovider/overlay"
	"sigs.k8s.io/karpenter/pkg/controllers"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/operator"
)

func main() {
	templates, err := readTemplates(os.Getenv("SLICES_FILE"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "reading SLICES_FILE:", err)
		os.Exit(1)
	}
	ctx, op := operator.NewOperator()
	instanceTypes, err := kwok.ConstructInstanceTypes(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "reading instance types:", err)
		os.Exit(1)
	}
	for _, instanceType := range instanceTypes {
		instanceType.DynamicResources.ResourceSliceTemplates = templates
	}
	undecorated := kwok.NewCloudProvider(ctx, op.GetClient(), instanceTypes)
	provider := overlay.Decorate(undecorated, op.GetClient(), op.InstanceTypeStore)
	cluster := state.NewCluster(op.Clock, op.GetClient(), provider)
	op.WithControllers(ctx, controllers.NewControllers(
		ctx, op.Manager, op.Clock, op.GetClient(), op.EventRecorder,
		provider, undecorated, cluster, op.InstanceTypeStore,
	)...).Start(ctx)
}

// readTemplates returns the slices of a new node. Karpenter's templates have no taints of devices.
func readTemplates(path string) ([]*cloudprovider.ResourceSliceTemplate, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var slices []resourcev1.ResourceSlice
	if err := json.Unmarshal(content, &slices); err != nil {
		return nil, err
	}
	var templates []*cloudprovider.ResourceSliceTemplate
	for _, slice := range slices {
		template := &cloudprovider.ResourceSliceTemplate{
			Driver:         unique.Make(slice.Spec.Driver),
			Pool:           cloudprovider.ResourcePool{Name: unique.Make(slice.Spec.Pool.Name)},
			SharedCounters: slice.Spec.SharedCounters,
		}
		for _, device := range slice.Spec.Devices {
			template.Devices = append(template.Devices, cloudprovider.Device{
				Name:                     unique.Make(device.Name),
				Attributes:               device.Attributes,
				Capacity:                 device.Capacity,
				AllowMultipleAllocations: device.AllowMultipleAllocations != nil && *device.AllowMultipleAllocations,
				ConsumesCounters:         device.ConsumesCounters,
			})
		}
		templates = append(templates, template)
	}
	return templates, nil
}
