use serde_json::{Value, json};
use tessera_api::gpu::{ComputeCapability, CudaVersion, Health};

use super::*;

const GPU: &str = "GPU-00000000-0000-0000-0000-00000000000a";

fn gpu() -> Gpu {
    Gpu {
        uuid: GpuUuid::new(GPU).expect("a UUID"),
        index: 0,
        minor: 0,
        product_name: "NVIDIA T4".into(),
        architecture: "Turing".into(),
        memory_bytes: 16 << 30,
        cuda_compute_capability: ComputeCapability { major: 7, minor: 5 },
        driver_version: "580.95.05".into(),
        cuda_driver_version: CudaVersion { major: 13, minor: 0 },
        pci_bus_id: "0000:19:00.0".parse().expect("an address"),
        pcie_root: None,
        numa_node: None,
        mig: None,
        health: Health::Healthy,
    }
}

fn node(status: Value) -> OtherAllocators {
    let node: Node = serde_json::from_value(json!({"metadata": {"name": "n"}, "status": status}))
        .expect("a Node");
    let named = BTreeSet::from([ExtendedResourceName::new("example.com/a100").expect("a name")]);
    OtherAllocators::new(resources(&node, &named), [])
}

fn slice(attributes: Value) -> OtherAllocators {
    let slice: ResourceSlice = serde_json::from_value(json!({
        "metadata": {"name": "s"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "n",
            "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": attributes}],
        },
    }))
    .expect("a slice");
    OtherAllocators::new([], devices(&slice))
}

fn reason(others: &OtherAllocators) -> Option<String> {
    others.reason(&gpu()).map(|reason| reason.to_string())
}

#[test]
fn device_plugin_resources_withhold_all_gpus() {
    for name in [
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.10gb",
        "nvidia.com/vgpu-number",
        "k8s.amazonaws.com/vgpu",
        "elasticgpu.io/gpu-memory",
        "elasticgpu.com/gpu-core",
        "gpushare.provisioner.elasticgpu.io/gpu-core",
        "tke.cloud.tencent.com/qgpu-core",
        "tencent.com/vcuda-core",
        "aliyun.com/gpu-mem",
        "aliyun.com/gpu-core.percentage",
        "volcano.sh/vgpu-number",
        "volcano.sh/gpu-mem.128Mi",
        "example.com/a100",
    ] {
        let found = reason(&node(json!({"capacity": {name: "8", "cpu": "4"}}))).expect(name);
        assert!(found.contains(name) && found.contains("--other-allocators"), "{found}");
    }
}

#[test]
fn other_resources_withhold_no_gpu() {
    for name in [
        "cpu",
        "amd.com/gpu",
        "nvidia.com/hostdev",
        "tke.cloud.tencent.com/eip",
        "volcano.sh/npu",
        "example.com/gpu",
    ] {
        assert_eq!(reason(&node(json!({"capacity": {name: "8"}}))), None, "{name}");
    }
    assert_eq!(
        reason(&node(
            json!({"capacity": {"nvidia.com/gpu": "0"}, "allocatable": {"nvidia.com/gpu": "0"}})
        )),
        None
    );
    assert_eq!(reason(&node(json!({}))), None);
}

#[test]
fn removed_plugin_counts_while_capacity_is_reported() {
    let going =
        json!({"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "0"}});
    assert!(reason(&node(going)).is_some());
}

#[test]
fn devices_of_other_drivers_withhold_their_gpu() {
    let other = "GPU-00000000-0000-0000-0000-00000000000b";
    for attributes in [
        json!({"uuid": {"string": GPU}}),
        json!({"uuid": {"string": GPU.to_lowercase()}}),
        json!({"gpu.nvidia.com/uuid": {"string": GPU}}),
        json!({"type": {"string": "mig"}, "uuid": {"string": "MIG-1"}, "parentUUID": {"string": GPU}}),
        json!({"resource.kubernetes.io/pciBusID": {"string": "0000:19:00.0"}}),
        json!({"pcieBusID": {"string": "00000000:19:00.0"}}),
    ] {
        let found = reason(&slice(attributes.clone())).unwrap_or_else(|| panic!("{attributes}"));
        assert!(found.contains("gpu.nvidia.com"), "{found}");
    }
    for attributes in [
        json!({"uuid": {"string": other}}),
        json!({"resource.kubernetes.io/pciBusID": {"string": "0000:1a:00.0"}}),
        json!({"uuid": {"string": "x"}}),
        json!({"uuid": {"int": 1}}),
        json!({}),
    ] {
        assert_eq!(reason(&slice(attributes.clone())), None, "{attributes}");
    }
}
