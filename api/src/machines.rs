//! Builders of inventories for tests: single GPUs and whole machines.

use crate::gpu::{
    ComputeCapability, CudaVersion, Gpu, Health, Inventory, Link, LinkKind, PcieLevel,
};
use crate::names::{GpuUuid, PciBusId};

/// NVLinks between each pair of the GPUs of a DGX-1 with V100 (NVIDIA/go-gpuallocator,
/// `NewDGX1VoltaNode`).
const DGX1V_NVLINKS: [[u32; 8]; 8] = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
];

/// The UUID of the GPU with that index.
pub(crate) fn uuid(index: u32) -> GpuUuid {
    GpuUuid::new(format!("GPU-0000{index:04x}-aaaa-bbbb-cccc-0123456789ab")).expect("a GPU UUID")
}

/// A healthy H100.
pub(crate) fn gpu(index: u32) -> Gpu {
    Gpu {
        uuid: uuid(index),
        index,
        minor: index,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        architecture: "Hopper".to_owned(),
        memory_bytes: 81559 << 20,
        cuda_compute_capability: ComputeCapability { major: 9, minor: 0 },
        driver_version: "580.95.05".to_owned(),
        cuda_driver_version: CudaVersion::from_number(13000),
        pci_bus_id: PciBusId::new(format!("0000:{:02x}:00.0", 0x19 + index))
            .expect("a PCI address"),
        pcie_root: Some(format!("pci0000:{:02x}", 0x16 + index)),
        numa_node: Some(i32::from(index >= 4)),
        mig: None,
        health: Health::Healthy,
    }
}

/// Returns `count` H100 without links.
pub(crate) fn unlinked(count: u32) -> Inventory {
    Inventory::new((0..count).map(gpu).collect(), Vec::new(), Vec::new())
}

/// An NVLink between two GPUs.
pub(crate) fn nvlink(one: u32, other: u32, count: u32) -> Link {
    Link::new(uuid(one), uuid(other), LinkKind::NvLink(count))
}

/// Every pair of so many GPUs joined by that many NVLinks.
pub(crate) fn all_pairs(gpus: u32, nvlinks: u32) -> Vec<Link> {
    (0..gpus).flat_map(|a| (a + 1..gpus).map(move |b| nvlink(a, b, nvlinks))).collect()
}

/// Eight H100 behind NVSwitches, over two NUMA nodes.
pub(crate) fn h100_8() -> Inventory {
    Inventory::new((0..8).map(gpu).collect(), all_pairs(8, 18), Vec::new())
}

/// A DGX-1 with V100: two quads, single links between them; pairs share a PCIe switch.
pub(crate) fn dgx1v() -> Inventory {
    let gpus = (0..8).map(|index| Gpu {
        product_name: "Tesla V100-SXM2-32GB".to_owned(),
        architecture: "Volta".to_owned(),
        memory_bytes: (32768 << 20) + 4096,
        cuda_compute_capability: ComputeCapability { major: 7, minor: 0 },
        pcie_root: Some(if index < 4 { "pci0000:00" } else { "pci0000:80" }.to_owned()),
        ..gpu(index)
    });
    Inventory::new(gpus.collect(), dgx1v_links(), Vec::new())
}

/// The links of a DGX-1 with V100.
pub(crate) fn dgx1v_links() -> Vec<Link> {
    let mut links = Vec::new();
    for a in 0..8_u32 {
        for b in a + 1..8 {
            let level = match (a / 2 == b / 2, a / 4 == b / 4) {
                (true, _) => PcieLevel::Single,
                (false, true) => PcieLevel::HostBridge,
                (false, false) => PcieLevel::System,
            };
            links.push(Link::new(uuid(a), uuid(b), LinkKind::Pcie(level)));
            let nvlinks = DGX1V_NVLINKS[a as usize][b as usize];
            if nvlinks > 0 {
                links.push(nvlink(a, b, nvlinks));
            }
        }
    }
    links
}
