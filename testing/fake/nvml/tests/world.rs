//! Tests of the real `nvml-wrapper` on the fake library with every shipped world.

mod node;

use nvml_wrapper::enum_wrappers::device::{Brand, EccCounter, MemoryError, TopologyLevel};
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;
use tessera_fake_world::{NvLinkEnd, shipped};

use node::Node;

#[test]
fn nvml_data_matches_every_shipped_world() {
    for (name, text) in shipped::ALL {
        let node = Node::new(text);
        let nvml = node.nvml();
        assert_eq!(nvml.sys_driver_version().unwrap(), node.world.driver.version, "{name}");
        assert_eq!(nvml.sys_cuda_driver_version().unwrap(), node.world.driver.cuda_number());
        assert_eq!(nvml.sys_nvml_version().unwrap(), node.world.driver.nvml_version());
        assert_eq!(nvml.device_count().unwrap() as usize, node.world.gpus.len());
        for gpu in &node.world.gpus {
            let device = nvml.device_by_index(gpu.index as u32).unwrap();
            assert_eq!(device.uuid().unwrap(), gpu.uuid);
            assert_eq!(device.name().unwrap(), gpu.model.name);
            assert_eq!(device.serial().unwrap(), gpu.serial);
            assert_eq!(device.minor_number().unwrap(), gpu.minor);
            let memory = device.memory_info().unwrap();
            assert_eq!((memory.total, memory.used), (gpu.model.memory_bytes(), 0));
            let capability = device.cuda_compute_capability().unwrap();
            assert_eq!(capability.major as u32, gpu.model.compute_capability.major);
            assert_eq!(device.pci_info().unwrap().bus_id, gpu.pci.nvml_bus_id());
            for found in [
                nvml.device_by_uuid(gpu.uuid.as_str()),
                nvml.device_by_pci_bus_id(gpu.pci.to_string()),
            ] {
                assert_eq!(found.unwrap().index().unwrap() as usize, gpu.index);
            }
        }
        assert!(matches!(nvml.device_by_index(99), Err(NvmlError::InvalidArg)));
        assert!(matches!(nvml.device_by_uuid("GPU-unknown"), Err(NvmlError::NotFound)));
    }
}

#[test]
fn t4_has_properties_of_a_t4() {
    let node = Node::new(shipped::T4_1);
    let nvml = node.nvml();
    let t4 = nvml.device_by_index(0).unwrap();
    assert_eq!(t4.architecture().unwrap(), DeviceArchitecture::Turing);
    assert_eq!(t4.brand().unwrap(), Brand::Tesla);
    assert!(matches!(t4.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(t4.link_wrapper_for(0).is_active(), Err(NvmlError::NotSupported)));
    assert_eq!(t4.enforced_power_limit().unwrap(), 70_000);
    assert!(t4.power_usage().unwrap() < 70_000);
    assert_eq!(t4.utilization_rates().unwrap().gpu, 0);
    assert!(
        t4.temperature(nvml_wrapper::enum_wrappers::device::TemperatureSensor::Gpu).unwrap() > 20
    );
    assert!(t4.is_ecc_enabled().unwrap().currently_enabled);
    assert_eq!(t4.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).unwrap(), 0);
    assert!(t4.running_compute_processes().unwrap().is_empty());
    assert!(t4.running_graphics_processes().unwrap().is_empty());
    assert!(matches!(t4.numa_node_id(), Err(NvmlError::NotSupported)));
    assert!(matches!(
        t4.encoder_capacity(nvml_wrapper::enum_wrappers::device::EncoderType::H264),
        Err(NvmlError::NotSupported)
    ));
}

#[test]
fn nvlinks_lead_to_mesh_peers() {
    let node = Node::new(shipped::DGX_1V);
    let nvml = node.nvml();
    for gpu in &node.world.gpus {
        let device = nvml.device_by_index(gpu.index as u32).unwrap();
        for link in &gpu.links {
            let NvLinkEnd::Gpu(peer) = link.remote else { panic!("a DGX-1 has no switches") };
            let found = device.link_wrapper_for(link.index);
            assert!(found.is_active().unwrap());
            assert_eq!(found.version().unwrap(), 2);
            assert_eq!(
                found.remote_pci_info().unwrap().bus_id,
                node.world.gpus[peer].pci.nvml_bus_id()
            );
        }
        assert!(matches!(device.link_wrapper_for(6).is_active(), Err(NvmlError::InvalidArg)));
    }
    let (one, far) = (nvml.device_by_index(0).unwrap(), nvml.device_by_index(4).unwrap());
    assert_eq!(nvml.topology_common_ancestor(&one, &far).unwrap(), TopologyLevel::System);
    let near = one.topology_nearest_gpus(TopologyLevel::Single).unwrap();
    assert_eq!(near.iter().map(|device| device.index().unwrap()).collect::<Vec<_>>(), [1]);
    assert_eq!(one.cpu_affinity(2).unwrap().len(), 2);
}

#[test]
fn links_of_unbridged_gpus_are_inactive() {
    let node = Node::new(shipped::A100_4_PCIE);
    let nvml = node.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(!device.link_wrapper_for(11).is_active().unwrap());
    assert!(matches!(device.link_wrapper_for(0).remote_pci_info(), Err(NvmlError::NotSupported)));
}

#[test]
fn control_file_overrides_mig_mode() {
    let node = Node::new(shipped::MIXED);
    let nvml = node.nvml();
    let (plain, mig) = (nvml.device_by_index(0).unwrap(), nvml.device_by_index(3).unwrap());
    let on = |device: &nvml_wrapper::Device<'_>| device.mig_mode().unwrap().current == 1;
    assert_eq!((on(&plain), on(&mig)), (false, true));
    node.control
        .update(|control| control.gpu_mut(&node.world.gpus[3].uuid).mig = Some(false))
        .unwrap();
    assert!(!on(&mig));
}
