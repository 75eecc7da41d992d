//! Topology of devices: PCIe, CPUs, memory nodes.

use std::ffi::{c_uint, c_ulong};

use tessera_fake_world::{NvLinkEnd, PcieLevel, World};

use crate::abi::{Code, Handle, NvmlResult, OutPtr, export, set_list};
use crate::library::machine;

/// `nvmlGpuP2PStatus_t`.
const P2P_OK: c_uint = 0;
const P2P_CHIPSET_NOT_SUPPORTED: c_uint = 1;
const P2P_NOT_SUPPORTED: c_uint = 5;
/// `NVML_P2P_CAPS_INDEX_NVLINK`, and the number of indexes.
const P2P_NVLINK: c_uint = 2;
const P2P_INDICES: c_uint = 5;

fn has_nvlink(world: &World, a: usize, b: usize) -> bool {
    let switches = |gpu: usize| {
        world.gpus[gpu].links.iter().filter(|l| matches!(l.remote, NvLinkEnd::Switch(_)))
    };
    let share_switch =
        || switches(a).any(|link| switches(b).any(|other| other.remote == link.remote));
    a != b && (world.direct_links(a, b) > 0 || share_switch())
}

/// Returns the CPUs of a `cpulist` such as `0-3,8`.
fn cpus(list: &str) -> impl Iterator<Item = usize> {
    list.split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok::<usize, _>(last)) => first..last + 1,
            _ => 0..0,
        }
    })
}

fn gpu_cpus(world: &World, node: Option<u32>) -> Vec<usize> {
    match node {
        Some(node) => {
            world.cpus.get(node as usize).into_iter().flat_map(|list| cpus(list)).collect()
        }
        None => world.cpus.iter().flat_map(|list| cpus(list)).collect(),
    }
}

/// Writes a set of numbers as bit words. Numbers beyond the capacity are dropped, as NVML does.
fn set_bits(capacity: c_uint, words: OutPtr<c_ulong>, numbers: &[usize]) -> NvmlResult {
    if capacity == 0 {
        return Err(Code::InvalidArgument);
    }
    let bits = c_ulong::BITS as usize;
    let mut set = vec![0; capacity as usize];
    for &number in numbers {
        if let Some(word) = set.get_mut(number / bits) {
            *word |= 1 << (number % bits);
        }
    }
    words.set_all(set)
}

fn affinity(device: Handle, capacity: c_uint, words: OutPtr<c_ulong>) -> NvmlResult {
    let device = device.device()?;
    set_bits(capacity, words, &gpu_cpus(device.machine.world(), device.numa_node))
}

export! {
    fn nvmlDeviceGetTopologyCommonAncestor(first: Handle, second: Handle, level: OutPtr<c_uint>) {
        let (first, second) = (first.device()?, second.device()?);
        level.set(first.machine.world().pcie_level(first.index, second.index).nvml_value())
    }
    fn nvmlDeviceGetTopologyNearestGpus(device: Handle, level: c_uint, count: OutPtr<c_uint>, devices: OutPtr<Handle>) {
        let device = device.device()?;
        let world = device.machine.world();
        let near = world.gpus.iter().filter(|other| {
            other.index != device.index && world.pcie_level(device.index, other.index).nvml_value() == level
        });
        let near = near.filter(|gpu| device.machine.visible().contains(&gpu.index));
        set_list(count, devices, near.map(|gpu| Handle::of(gpu.index)).collect())
    }
    fn nvmlSystemGetTopologyGpuSet(cpu: c_uint, count: OutPtr<c_uint>, devices: OutPtr<Handle>) {
        let machine = machine()?;
        let world = machine.world();
        let near = machine.visible().iter().map(|&gpu| &world.gpus[gpu]);
        let near = near.filter(|gpu| gpu_cpus(world, gpu.numa_node).contains(&(cpu as usize)));
        set_list(count, devices, near.map(|gpu| Handle::of(gpu.index)).collect())
    }
    fn nvmlDeviceGetP2PStatus(first: Handle, second: Handle, index: c_uint, status: OutPtr<c_uint>) {
        let (first, second) = (first.device()?, second.device()?);
        let world = first.machine.world();
        if index >= P2P_INDICES {
            return Err(Code::InvalidArgument);
        }
        let nvlink = has_nvlink(world, first.index, second.index);
        let pcie = world.pcie_level(first.index, second.index) < PcieLevel::System;
        status.set(match (index, nvlink, pcie) {
            (_, true, _) => P2P_OK,
            (P2P_NVLINK, false, _) => P2P_NOT_SUPPORTED,
            (_, false, true) => P2P_OK,
            (_, false, false) => P2P_CHIPSET_NOT_SUPPORTED,
        })
    }
    fn nvmlDeviceGetCpuAffinity(device: Handle, capacity: c_uint, words: OutPtr<c_ulong>) { affinity(device, capacity, words) }
    fn nvmlDeviceGetCpuAffinityWithinScope(device: Handle, capacity: c_uint, words: OutPtr<c_ulong>, _scope: c_uint) {
        affinity(device, capacity, words)
    }
    fn nvmlDeviceGetMemoryAffinity(device: Handle, capacity: c_uint, words: OutPtr<c_ulong>, _scope: c_uint) {
        let node = device.device()?.numa_node.ok_or(Code::NotSupported)?;
        set_bits(capacity, words, &[node as usize])
    }
    // For GPUs that are NUMA nodes (Grace Hopper); no world has one.
    fn nvmlDeviceGetNumaNodeId(device: Handle, _node: OutPtr<c_uint>) {
        device.device()?;
        Err(Code::NotSupported)
    }
}
