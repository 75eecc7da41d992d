//! How devices hang together: PCIe, CPUs, memory nodes.

use std::ffi::{c_uint, c_ulong};

use tessera_fake_world::{NvLinkEnd, PcieLevel, World};

use crate::abi::{Answer, Code, Handle, Out, export, set_list};
use crate::library::machine;

/// `nvmlGpuP2PStatus_t`.
const P2P_OK: c_uint = 0;
const P2P_CHIPSET_NOT_SUPPORTED: c_uint = 1;
const P2P_NOT_SUPPORTED: c_uint = 5;
/// `NVML_P2P_CAPS_INDEX_NVLINK`, and one above the last index.
const P2P_NVLINK: c_uint = 2;
const P2P_INDICES: c_uint = 5;

fn joined_by_nvlink(world: &World, a: usize, b: usize) -> bool {
    let switches = |gpu: usize| {
        world.gpus[gpu].links.iter().filter(|l| matches!(l.remote, NvLinkEnd::Switch(_)))
    };
    let one_switch =
        || switches(a).any(|link| switches(b).any(|other| other.remote == link.remote));
    a != b && (world.direct_links(a, b) > 0 || one_switch())
}

/// The CPUs of a `cpulist` such as `0-3,8`.
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

/// Hands out a set of numbers as words of bits; those beyond the caller's room are left out, as
/// NVML does.
fn set_bits(room: c_uint, words: Out<c_ulong>, numbers: &[usize]) -> Answer {
    if room == 0 {
        return Err(Code::InvalidArgument);
    }
    let bits = c_ulong::BITS as usize;
    let mut set = vec![0; room as usize];
    for &number in numbers {
        if let Some(word) = set.get_mut(number / bits) {
            *word |= 1 << (number % bits);
        }
    }
    words.set_all(set)
}

fn affinity(device: Handle, room: c_uint, words: Out<c_ulong>) -> Answer {
    let device = device.device()?;
    set_bits(room, words, &gpu_cpus(device.machine.world(), device.numa_node))
}

export! {
    fn nvmlDeviceGetTopologyCommonAncestor(one: Handle, other: Handle, level: Out<c_uint>) {
        let (one, other) = (one.device()?, other.device()?);
        level.set(one.machine.world().pcie_level(one.index, other.index).nvml_value())
    }
    fn nvmlDeviceGetTopologyNearestGpus(device: Handle, level: c_uint, count: Out<c_uint>, devices: Out<Handle>) {
        let device = device.device()?;
        let world = device.machine.world();
        let near = world.gpus.iter().filter(|other| {
            other.index != device.index && world.pcie_level(device.index, other.index).nvml_value() == level
        });
        let near = near.filter(|gpu| device.machine.visible().contains(&gpu.index));
        set_list(count, devices, near.map(|gpu| Handle::of(gpu.index)).collect())
    }
    fn nvmlSystemGetTopologyGpuSet(cpu: c_uint, count: Out<c_uint>, devices: Out<Handle>) {
        let machine = machine()?;
        let world = machine.world();
        let near = machine.visible().iter().map(|&gpu| &world.gpus[gpu]);
        let near = near.filter(|gpu| gpu_cpus(world, gpu.numa_node).contains(&(cpu as usize)));
        set_list(count, devices, near.map(|gpu| Handle::of(gpu.index)).collect())
    }
    fn nvmlDeviceGetP2PStatus(one: Handle, other: Handle, index: c_uint, status: Out<c_uint>) {
        let (one, other) = (one.device()?, other.device()?);
        let world = one.machine.world();
        if index >= P2P_INDICES {
            return Err(Code::InvalidArgument);
        }
        let nvlink = joined_by_nvlink(world, one.index, other.index);
        let pcie = world.pcie_level(one.index, other.index) < PcieLevel::System;
        status.set(match (index, nvlink, pcie) {
            (_, true, _) => P2P_OK,
            (P2P_NVLINK, false, _) => P2P_NOT_SUPPORTED,
            (_, false, true) => P2P_OK,
            (_, false, false) => P2P_CHIPSET_NOT_SUPPORTED,
        })
    }
    fn nvmlDeviceGetCpuAffinity(device: Handle, room: c_uint, words: Out<c_ulong>) { affinity(device, room, words) }
    fn nvmlDeviceGetCpuAffinityWithinScope(device: Handle, room: c_uint, words: Out<c_ulong>, _scope: c_uint) {
        affinity(device, room, words)
    }
    fn nvmlDeviceGetMemoryAffinity(device: Handle, room: c_uint, words: Out<c_ulong>, _scope: c_uint) {
        let node = device.device()?.numa_node.ok_or(Code::NotSupported)?;
        set_bits(room, words, &[node as usize])
    }
    // Serves GPUs that are NUMA nodes themselves (Grace Hopper); none of the worlds has one.
    fn nvmlDeviceGetNumaNodeId(device: Handle, _node: Out<c_uint>) {
        device.device()?;
        Err(Code::NotSupported)
    }
}
