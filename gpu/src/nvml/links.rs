//! Links between GPUs: PCIe and NVLink.

use std::collections::BTreeMap;

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::NVML_NVLINK_MAX_LINKS;
use tessera_api::gpu::{Gpu, Link, LinkKind, PcieLevel};
use tessera_api::names::PciBusId;

use super::raw;
use super::session::Session;

/// Number of active NVLinks of one GPU per peer.
#[derive(Debug, Default, PartialEq, Eq)]
struct NvLinkPeers {
    gpus: BTreeMap<PciBusId, u32>,
    switches: BTreeMap<PciBusId, u32>,
}

/// NVLinks between two GPUs, given by their indexes in the inventory; the lower one comes
/// first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NvLinks {
    between: (usize, usize),
    count: u32,
}

/// Returns all links between the GPUs: the PCIe level of each pair, and their NVLinks. Links that
/// cannot be read are left out: a claim that requires a topology must not get a guess.
pub(super) fn between(session: &Session, gpus: &[Gpu]) -> Vec<Link> {
    let peers_by_address: Vec<_> =
        gpus.iter().map(|gpu| (gpu.pci_bus_id.clone(), read_peers(session, gpu))).collect();
    let nvlinks = pairs(&peers_by_address).into_iter().map(|links| {
        let (first_gpu, second_gpu) = links.between;
        Link::new(
            gpus[first_gpu].uuid.clone(),
            gpus[second_gpu].uuid.clone(),
            LinkKind::NvLink(links.count),
        )
    });
    nvlinks.chain(pcie_levels(session, gpus)).collect()
}

fn read_peers(session: &Session, gpu: &Gpu) -> NvLinkPeers {
    let device = session.nvml().device_by_uuid(gpu.uuid.as_str());
    device.and_then(|device| peers(&device)).unwrap_or_else(|error| {
        tracing::warn!(gpu = %gpu.uuid, %error, "cannot read NVLinks of GPU");
        NvLinkPeers::default()
    })
}

fn pcie_levels(session: &Session, gpus: &[Gpu]) -> Vec<Link> {
    let devices: Vec<_> =
        gpus.iter().map(|gpu| session.nvml().device_by_uuid(gpu.uuid.as_str()).ok()).collect();
    let mut links = Vec::new();
    for (first, first_gpu) in devices.iter().enumerate() {
        for (second, second_gpu) in devices.iter().enumerate().skip(first + 1) {
            let (Some(first_gpu), Some(second_gpu)) = (first_gpu, second_gpu) else { continue };
            let level = match session.nvml().topology_common_ancestor(first_gpu, second_gpu) {
                Ok(level) => level,
                Err(error) => {
                    tracing::warn!(gpu = %gpus[first].uuid, second_gpu = %gpus[second].uuid, %error, "cannot read PCIe distance between GPUs");
                    continue;
                }
            };
            let kind = LinkKind::Pcie(pcie_level(level));
            links.push(Link::new(gpus[first].uuid.clone(), gpus[second].uuid.clone(), kind));
        }
    }
    links
}

fn pcie_level(level: TopologyLevel) -> PcieLevel {
    match level {
        TopologyLevel::Internal => PcieLevel::Board,
        TopologyLevel::Single => PcieLevel::Single,
        TopologyLevel::Multiple => PcieLevel::Multiple,
        TopologyLevel::HostBridge => PcieLevel::HostBridge,
        TopologyLevel::Node => PcieLevel::Node,
        TopologyLevel::System => PcieLevel::System,
    }
}

fn peers(device: &Device<'_>) -> Result<NvLinkPeers, NvmlError> {
    let mut peers = NvLinkPeers::default();
    for link in 0..NVML_NVLINK_MAX_LINKS {
        let wrapper = device.link_wrapper_for(link);
        match wrapper.is_active() {
            Ok(true) => {}
            Ok(false) => continue,
            // The GPU has no NVLink, or fewer links than the maximum.
            Err(NvmlError::NotSupported | NvmlError::InvalidArg) => break,
            Err(error) => return Err(error),
        }
        let Ok(address) = PciBusId::new(wrapper.remote_pci_info()?.bus_id) else { continue };
        // Drivers that do not support the call are older than the NVSwitch generations after DGX-2.
        // A link to a CPU (POWER9) leads to neither.
        let side = if raw::leads_to_switch(device, link).unwrap_or(false) {
            &mut peers.switches
        } else {
            &mut peers.gpus
        };
        *side.entry(address).or_default() += 1;
    }
    Ok(peers)
}

/// Returns the NVLinks of each pair. Direct links count if one of the GPUs reports them.
/// Through switches, a pair can use as many links as the GPU with fewer links to their common
/// switches.
fn pairs(gpus: &[(PciBusId, NvLinkPeers)]) -> Vec<NvLinks> {
    let mut found = Vec::new();
    for (first, (first_address, first_peers)) in gpus.iter().enumerate() {
        for (second, (second_address, second_peers)) in gpus.iter().enumerate().skip(first + 1) {
            let forth = first_peers.gpus.get(second_address).copied().unwrap_or(0);
            let back = second_peers.gpus.get(first_address).copied().unwrap_or(0);
            let count = forth.max(back) + through_switches(first_peers, second_peers);
            if count > 0 {
                found.push(NvLinks { between: (first, second), count });
            }
        }
    }
    found
}

fn through_switches(first_gpu: &NvLinkPeers, second_gpu: &NvLinkPeers) -> u32 {
    let into_shared = |from: &NvLinkPeers, to: &NvLinkPeers| -> u32 {
        from.switches
            .iter()
            .filter(|(switch, _)| to.switches.contains_key(*switch))
            .map(|(_, count)| count)
            .sum()
    };
    into_shared(first_gpu, second_gpu).min(into_shared(second_gpu, first_gpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(bus: u8) -> PciBusId {
        PciBusId::new(format!("0000:{bus:02x}:00.0")).unwrap()
    }

    fn gpu(bus: u8, gpus: &[(u8, u32)], switches: &[(u8, u32)]) -> (PciBusId, NvLinkPeers) {
        let map =
            |list: &[(u8, u32)]| list.iter().map(|&(bus, count)| (address(bus), count)).collect();
        (address(bus), NvLinkPeers { gpus: map(gpus), switches: map(switches) })
    }

    #[test]
    fn ignores_links_to_absent_gpus() {
        assert_eq!(pairs(&[gpu(1, &[(9, 4)], &[]), gpu(2, &[], &[])]), []);
    }

    #[test]
    fn counts_link_reported_by_one_side() {
        let expected = [NvLinks { between: (0, 1), count: 2 }];
        assert_eq!(pairs(&[gpu(1, &[], &[]), gpu(2, &[(1, 2)], &[])]), expected);
    }

    #[test]
    fn gpus_on_different_switches_are_not_linked() {
        let gpus =
            [gpu(1, &[], &[(7, 9), (8, 9)]), gpu(2, &[], &[(8, 9)]), gpu(3, &[], &[(6, 18)])];
        assert_eq!(pairs(&gpus), [NvLinks { between: (0, 1), count: 9 }]);
    }
}
