//! NVLinks and their remote ends.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::nvmlPciInfo_t;
use tessera_fake_world::{NvLink, NvLinkEnd};

use crate::abi::{Code, Device, Handle, NvmlResult, OutPtr, export};
use crate::identity::pci_info;

/// Vendor and device id of an NVSwitch (third generation).
const NVSWITCH: (u16, u16) = (0x10de, 0x22a3);
/// `nvmlIntNvLinkDeviceType_t`.
const REMOTE_GPU: c_uint = 0;
const REMOTE_SWITCH: c_uint = 2;
/// `NVML_NVLINK_CAP_P2P_SUPPORTED`, `..._P2P_ATOMICS`, `..._VALID`; and the number of capabilities.
const SUPPORTED_CAPABILITIES: [c_uint; 3] = [0, 2, 5];
const CAPABILITIES: c_uint = 6;
/// Number of `nvmlNvLinkErrorCounter_t` values.
const ERROR_COUNTERS: c_uint = 5;

/// Returns the link if it is active. GPUs without NVLink return `NOT_SUPPORTED`, and numbers beyond
/// the GPU's links an error.
fn link(device: Handle, number: c_uint) -> NvmlResult<(Device, Option<NvLink>)> {
    let device = device.device()?;
    if device.model.nvlink_version.is_none() {
        return Err(Code::NotSupported);
    }
    if number >= device.model.nvlinks {
        return Err(Code::InvalidArgument);
    }
    let found = device.links.iter().find(|link| link.index == number).copied();
    Ok((device, found))
}

fn active(device: Handle, number: c_uint) -> NvmlResult<(Device, NvLink)> {
    let (device, found) = link(device, number)?;
    Ok((device, found.ok_or(Code::NotSupported)?))
}

fn remote_pci(device: Handle, number: c_uint, pci: OutPtr<nvmlPciInfo_t>) -> NvmlResult {
    let (device, link) = active(device, number)?;
    pci.set(match link.remote {
        NvLinkEnd::Switch(address) => pci_info(address, NVSWITCH),
        NvLinkEnd::Gpu(peer) => {
            let peer = &device.machine.world().gpus[peer];
            pci_info(peer.pci, (peer.model.pci_id.vendor, peer.model.pci_id.device))
        }
    })
}

export! {
    fn nvmlDeviceGetNvLinkState(device: Handle, number: c_uint, is_active: OutPtr<c_uint>) {
        is_active.set(c_uint::from(link(device, number)?.1.is_some()))
    }
    fn nvmlDeviceGetNvLinkVersion(device: Handle, number: c_uint, version: OutPtr<c_uint>) {
        let (device, _) = link(device, number)?;
        version.set(device.model.nvlink_version.ok_or(Code::NotSupported)?)
    }
    fn nvmlDeviceGetNvLinkCapability(device: Handle, number: c_uint, capability: c_uint, result: OutPtr<c_uint>) {
        let (_, link) = link(device, number)?;
        if capability >= CAPABILITIES {
            return Err(Code::InvalidArgument);
        }
        result.set(c_uint::from(link.is_some() && SUPPORTED_CAPABILITIES.contains(&capability)))
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo(device: Handle, number: c_uint, pci: OutPtr<nvmlPciInfo_t>) {
        remote_pci(device, number, pci)
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, number: c_uint, pci: OutPtr<nvmlPciInfo_t>) {
        remote_pci(device, number, pci)
    }
    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, number: c_uint, kind: OutPtr<c_uint>) {
        let (_, link) = active(device, number)?;
        kind.set(match link.remote {
            NvLinkEnd::Gpu(_) => REMOTE_GPU,
            NvLinkEnd::Switch(_) => REMOTE_SWITCH,
        })
    }
    fn nvmlDeviceGetNvLinkErrorCounter(device: Handle, number: c_uint, counter: c_uint, value: OutPtr<c_ulonglong>) {
        active(device, number)?;
        if counter >= ERROR_COUNTERS {
            return Err(Code::InvalidArgument);
        }
        value.set(0)
    }
}
