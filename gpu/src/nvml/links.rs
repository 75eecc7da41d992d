//! How GPUs are joined: PCIe and NVLink.

use std::collections::BTreeMap;

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::NVML_NVLINK_MAX_LINKS;
use tessera_api::gpu::{Gpu, Link, LinkKind, PcieLevel};
use tessera_api::names::PciBusId;

use super::raw;
use super::session::Session;

/// Where the active links of one GPU lead, and how many lead there.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ends {
    gpus: BTreeMap<PciBusId, u32>,
    switches: BTreeMap<PciBusId, u32>,
}

/// NVLinks between two GPUs, by their positions among the found ones; the first is the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NvLinks {
    between: (usize, usize),
    count: u32,
}

/// All links between the GPUs: the PCIe level of every pair, and their NVLinks. What cannot be read
/// is left out: topology is a preference, and a claim that requires it must not be given a guess.
pub(super) fn between(session: &Session, gpus: &[Gpu]) -> Vec<Link> {
    let addressed: Vec<_> =
        gpus.iter().map(|gpu| (gpu.pci_bus_id.clone(), read_ends(session, gpu))).collect();
    let nvlinks = pairs(&addressed).into_iter().map(|links| {
        let (one, other) = links.between;
        Link::new(gpus[one].uuid.clone(), gpus[other].uuid.clone(), LinkKind::NvLink(links.count))
    });
    nvlinks.chain(pcie_levels(session, gpus)).collect()
}

fn read_ends(session: &Session, gpu: &Gpu) -> Ends {
    let device = session.nvml().device_by_uuid(gpu.uuid.as_str());
    device.and_then(|device| ends(&device)).unwrap_or_else(|error| {
        tracing::warn!(gpu = %gpu.uuid, %error, "the GPU's NVLinks cannot be read");
        Ends::default()
    })
}

fn pcie_levels(session: &Session, gpus: &[Gpu]) -> Vec<Link> {
    let devices: Vec<_> =
        gpus.iter().map(|gpu| session.nvml().device_by_uuid(gpu.uuid.as_str()).ok()).collect();
    let mut links = Vec::new();
    for (first, one) in devices.iter().enumerate() {
        for (second, other) in devices.iter().enumerate().skip(first + 1) {
            let (Some(one), Some(other)) = (one, other) else { continue };
            let level = match session.nvml().topology_common_ancestor(one, other) {
                Ok(level) => level,
                Err(error) => {
                    tracing::warn!(gpu = %gpus[first].uuid, other = %gpus[second].uuid, %error, "PCIe distance unknown");
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

fn ends(device: &Device<'_>) -> Result<Ends, NvmlError> {
    let mut ends = Ends::default();
    for link in 0..NVML_NVLINK_MAX_LINKS {
        let wrapper = device.link_wrapper_for(link);
        match wrapper.is_active() {
            Ok(true) => {}
            Ok(false) => continue,
            // No NVLink at all; or fewer links than the most that any GPU has.
            Err(NvmlError::NotSupported | NvmlError::InvalidArg) => break,
            Err(error) => return Err(error),
        }
        let Ok(address) = PciBusId::new(wrapper.remote_pci_info()?.bus_id) else { continue };
        // Drivers that cannot tell are from before NVSwitch's successors to DGX-2; a link to a CPU
        // (POWER9) is neither.
        let side = if raw::leads_to_switch(device, link).unwrap_or(false) {
            &mut ends.switches
        } else {
            &mut ends.gpus
        };
        *side.entry(address).or_default() += 1;
    }
    Ok(ends)
}

/// Direct links are what one of the GPUs says leads to the other; through switches, the pair can
/// use as many as the one with fewer links into the switches that both are on.
fn pairs(gpus: &[(PciBusId, Ends)]) -> Vec<NvLinks> {
    let mut found = Vec::new();
    for (first, (first_address, first_ends)) in gpus.iter().enumerate() {
        for (second, (second_address, second_ends)) in gpus.iter().enumerate().skip(first + 1) {
            let forth = first_ends.gpus.get(second_address).copied().unwrap_or(0);
            let back = second_ends.gpus.get(first_address).copied().unwrap_or(0);
            let count = forth.max(back) + through_switches(first_ends, second_ends);
            if count > 0 {
                found.push(NvLinks { between: (first, second), count });
            }
        }
    }
    found
}

fn through_switches(one: &Ends, other: &Ends) -> u32 {
    let into_shared = |from: &Ends, to: &Ends| -> u32 {
        from.switches
            .iter()
            .filter(|(switch, _)| to.switches.contains_key(*switch))
            .map(|(_, count)| count)
            .sum()
    };
    into_shared(one, other).min(into_shared(other, one))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(bus: u8) -> PciBusId {
        PciBusId::new(format!("0000:{bus:02x}:00.0")).unwrap()
    }

    fn gpu(bus: u8, gpus: &[(u8, u32)], switches: &[(u8, u32)]) -> (PciBusId, Ends) {
        let map =
            |list: &[(u8, u32)]| list.iter().map(|&(bus, count)| (address(bus), count)).collect();
        (address(bus), Ends { gpus: map(gpus), switches: map(switches) })
    }

    #[test]
    fn links_to_gpus_that_are_not_there_count_for_nothing() {
        assert_eq!(pairs(&[gpu(1, &[(9, 4)], &[]), gpu(2, &[], &[])]), []);
    }

    #[test]
    fn a_link_that_only_one_side_reports_is_a_link() {
        let expected = [NvLinks { between: (0, 1), count: 2 }];
        assert_eq!(pairs(&[gpu(1, &[], &[]), gpu(2, &[(1, 2)], &[])]), expected);
    }

    #[test]
    fn gpus_on_different_switches_are_not_joined() {
        let gpus =
            [gpu(1, &[], &[(7, 9), (8, 9)]), gpu(2, &[], &[(8, 9)]), gpu(3, &[], &[(6, 18)])];
        assert_eq!(pairs(&gpus), [NvLinks { between: (0, 1), count: 9 }]);
    }
}
