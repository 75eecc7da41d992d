//! Device lookup and identity.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{nvmlPciInfo_t, nvmlPciInfoExt_t};
use tessera_fake_world::{Gpu, PciAddress};

use crate::abi::{Code, Handle, InText, NvmlResult, OutPtr, export};
use crate::library::machine;
use crate::mig::MigDevice;

/// Writes the handle of the first matching GPU.
fn find(device: OutPtr<Handle>, matches: impl Fn(&Gpu) -> bool) -> NvmlResult {
    let machine = machine()?;
    let gpu = machine
        .visible()
        .iter()
        .find(|&&gpu| matches(&machine.world().gpus[gpu]))
        .ok_or(Code::NotFound)?;
    let handle = Handle::of(*gpu);
    handle.device()?;
    device.set(handle)
}

fn by_index(index: c_uint, device: OutPtr<Handle>) -> NvmlResult {
    let visible = *machine()?.visible().get(index as usize).ok_or(Code::InvalidArgument)?;
    find(device, |gpu| gpu.index == visible)
}

fn by_pci(bus_id: InText, device: OutPtr<Handle>) -> NvmlResult {
    let address = PciAddress::parse(bus_id.get()?).ok_or(Code::InvalidArgument)?;
    find(device, |gpu| gpu.pci == address)
}

/// Returns NVML's data of a PCI address. `ids` are vendor and device; the subsystem is the device
/// itself.
pub(crate) fn pci_info(address: PciAddress, ids: (u16, u16)) -> nvmlPciInfo_t {
    let (vendor, device) = ids;
    let id = u32::from(device) << 16 | u32::from(vendor);
    nvmlPciInfo_t {
        busIdLegacy: padded(&address.nvml_legacy_bus_id()),
        domain: address.domain,
        bus: u32::from(address.bus),
        device: u32::from(address.device),
        pciDeviceId: id,
        pciSubSystemId: id,
        busId: padded(&address.nvml_bus_id()),
    }
}

pub(crate) fn padded<const N: usize>(text: &str) -> [c_char; N] {
    let mut buffer = [0; N];
    // Leaves one byte for the terminating zero.
    for (slot, byte) in buffer[..N - 1].iter_mut().zip(text.bytes()) {
        *slot = byte as c_char;
    }
    buffer
}

fn device_pci_info(device: Handle, pci: OutPtr<nvmlPciInfo_t>) -> NvmlResult {
    let device = device.device()?;
    pci.set(pci_info(device.pci, (device.model.pci_id.vendor, device.model.pci_id.device)))
}

export! {
    fn nvmlDeviceGetCount(count: OutPtr<c_uint>) { count.set(machine()?.visible().len() as c_uint) }
    fn nvmlDeviceGetCount_v2(count: OutPtr<c_uint>) { count.set(machine()?.visible().len() as c_uint) }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, device: OutPtr<Handle>) { by_index(index, device) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: OutPtr<Handle>) { by_index(index, device) }
    fn nvmlDeviceGetHandleByUUID(uuid: InText, device: OutPtr<Handle>) {
        let uuid = uuid.get()?;
        find(device, |gpu| gpu.uuid == uuid)
    }
    fn nvmlDeviceGetHandleBySerial(serial: InText, device: OutPtr<Handle>) {
        let serial = serial.get()?;
        find(device, |gpu| gpu.serial == serial)
    }
    fn nvmlDeviceGetHandleByPciBusId(bus_id: InText, device: OutPtr<Handle>) { by_pci(bus_id, device) }
    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: InText, device: OutPtr<Handle>) { by_pci(bus_id, device) }

    fn nvmlDeviceGetIndex(device: Handle, index: OutPtr<c_uint>) {
        let device = device.device()?;
        let ordinal = device.machine.visible().iter().position(|&gpu| gpu == device.index);
        index.set(ordinal.ok_or(Code::InvalidArgument)? as c_uint)
    }
    fn nvmlDeviceGetName(device: Handle, name: OutPtr<c_char>, length: c_uint) {
        if let Some(mig) = MigDevice::of(device)? {
            return name.set_text(length, &mig.name);
        }
        name.set_text(length, &device.device()?.model.name)
    }
    fn nvmlDeviceGetUUID(device: Handle, uuid: OutPtr<c_char>, length: c_uint) {
        if let Some(mig) = MigDevice::of(device)? {
            return uuid.set_text(length, &mig.uuid);
        }
        uuid.set_text(length, &device.device()?.uuid)
    }
    fn nvmlDeviceGetSerial(device: Handle, serial: OutPtr<c_char>, length: c_uint) {
        serial.set_text(length, &device.device()?.serial)
    }
    fn nvmlDeviceGetMinorNumber(device: Handle, minor: OutPtr<c_uint>) { minor.set(device.device()?.minor) }
    fn nvmlDeviceGetBrand(device: Handle, brand: OutPtr<c_uint>) { brand.set(device.device()?.model.brand.nvml_value()) }
    fn nvmlDeviceGetArchitecture(device: Handle, architecture: OutPtr<c_uint>) {
        architecture.set(device.device()?.model.architecture.nvml_value())
    }
    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: OutPtr<c_int>, minor: OutPtr<c_int>) {
        let capability = device.device()?.model.compute_capability;
        if minor.is_null() {
            return Err(Code::InvalidArgument);
        }
        major.set(capability.major as c_int)?;
        minor.set(capability.minor as c_int)
    }
    fn nvmlDeviceGetBoardId(device: Handle, board: OutPtr<c_uint>) {
        let pci = device.device()?.pci;
        board.set(pci.domain << 16 | u32::from(pci.bus) << 8 | u32::from(pci.device))
    }
    fn nvmlDeviceOnSameBoard(first: Handle, second: Handle, same: OutPtr<c_int>) {
        same.set(c_int::from(first.device()?.index == second.device()?.index))
    }

    fn nvmlDeviceGetPciInfo(device: Handle, pci: OutPtr<nvmlPciInfo_t>) { device_pci_info(device, pci) }
    fn nvmlDeviceGetPciInfo_v2(device: Handle, pci: OutPtr<nvmlPciInfo_t>) { device_pci_info(device, pci) }
    fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: OutPtr<nvmlPciInfo_t>) { device_pci_info(device, pci) }
    fn nvmlDeviceGetPciInfoExt(device: Handle, pci: OutPtr<nvmlPciInfoExt_t>) {
        let device = device.device()?;
        let mut info = pci.get()?;
        let base = pci_info(device.pci, (device.model.pci_id.vendor, device.model.pci_id.device));
        info.domain = base.domain;
        info.bus = base.bus;
        info.device = base.device;
        info.pciDeviceId = base.pciDeviceId;
        info.pciSubSystemId = base.pciSubSystemId;
        // GPUs without a display are 3D controllers (0x0302); VGA-compatible controllers are
        // 0x0300.
        (info.baseClass, info.subClass) = (0x03, 0x02);
        info.busId = base.busId;
        pci.set(info)
    }

    fn nvmlDeviceGetMigMode(device: Handle, current: OutPtr<c_uint>, pending: OutPtr<c_uint>) {
        let device = device.device()?;
        if device.model.max_mig_devices == 0 {
            return Err(Code::NotSupported);
        }
        if pending.is_null() {
            return Err(Code::InvalidArgument);
        }
        let on = c_uint::from(device.machine.mig(&device));
        current.set(on)?;
        pending.set(on)
    }
    fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: OutPtr<c_uint>) {
        count.set(device.device()?.model.max_mig_devices)
    }
}

/// Layouts of `nvml.h`.
const _: () = {
    assert!(size_of::<nvmlPciInfo_t>() == 68);
    assert!(std::mem::offset_of!(nvmlPciInfo_t, domain) == 16);
    assert!(std::mem::offset_of!(nvmlPciInfo_t, busId) == 36);
};
