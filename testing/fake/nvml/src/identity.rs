//! Counting and finding devices, and what they are.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{nvmlPciInfo_t, nvmlPciInfoExt_t};
use tessera_fake_world::{Gpu, PciAddress};

use crate::abi::{Answer, Code, Handle, Out, Text, export};
use crate::library::machine;

/// Hands out the handle of the GPU that fits.
fn find(device: Out<Handle>, fits: impl Fn(&Gpu) -> bool) -> Answer {
    let machine = machine()?;
    let gpu = machine
        .visible()
        .iter()
        .find(|&&gpu| fits(&machine.world().gpus[gpu]))
        .ok_or(Code::NotFound)?;
    let handle = Handle::of(*gpu);
    handle.device()?;
    device.set(handle)
}

fn by_index(index: c_uint, device: Out<Handle>) -> Answer {
    let seen = *machine()?.visible().get(index as usize).ok_or(Code::InvalidArgument)?;
    find(device, |gpu| gpu.index == seen)
}

fn by_pci(bus_id: Text, device: Out<Handle>) -> Answer {
    let address = PciAddress::parse(bus_id.get()?).ok_or(Code::InvalidArgument)?;
    find(device, |gpu| gpu.pci == address)
}

/// What NVML says about a PCI address. `ids` are vendor and device; a GPU's subsystem is its own
/// device again.
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

fn padded<const N: usize>(text: &str) -> [c_char; N] {
    let mut buffer = [0; N];
    // One byte is left for the terminating zero.
    for (place, byte) in buffer[..N - 1].iter_mut().zip(text.bytes()) {
        *place = byte as c_char;
    }
    buffer
}

fn device_pci_info(device: Handle, pci: Out<nvmlPciInfo_t>) -> Answer {
    let device = device.device()?;
    pci.set(pci_info(device.pci, (device.model.pci_id.vendor, device.model.pci_id.device)))
}

export! {
    fn nvmlDeviceGetCount(count: Out<c_uint>) { count.set(machine()?.visible().len() as c_uint) }
    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) { count.set(machine()?.visible().len() as c_uint) }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, device: Out<Handle>) { by_index(index, device) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Handle>) { by_index(index, device) }
    fn nvmlDeviceGetHandleByUUID(uuid: Text, device: Out<Handle>) {
        let uuid = uuid.get()?;
        find(device, |gpu| gpu.uuid == uuid)
    }
    fn nvmlDeviceGetHandleBySerial(serial: Text, device: Out<Handle>) {
        let serial = serial.get()?;
        find(device, |gpu| gpu.serial == serial)
    }
    fn nvmlDeviceGetHandleByPciBusId(bus_id: Text, device: Out<Handle>) { by_pci(bus_id, device) }
    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: Text, device: Out<Handle>) { by_pci(bus_id, device) }

    fn nvmlDeviceGetIndex(device: Handle, index: Out<c_uint>) {
        let device = device.device()?;
        let seen = device.machine.visible().iter().position(|&gpu| gpu == device.index);
        index.set(seen.ok_or(Code::InvalidArgument)? as c_uint)
    }
    fn nvmlDeviceGetName(device: Handle, name: Out<c_char>, length: c_uint) {
        name.set_text(length, &device.device()?.model.name)
    }
    fn nvmlDeviceGetUUID(device: Handle, uuid: Out<c_char>, length: c_uint) {
        uuid.set_text(length, &device.device()?.uuid)
    }
    fn nvmlDeviceGetSerial(device: Handle, serial: Out<c_char>, length: c_uint) {
        serial.set_text(length, &device.device()?.serial)
    }
    fn nvmlDeviceGetMinorNumber(device: Handle, minor: Out<c_uint>) { minor.set(device.device()?.minor) }
    fn nvmlDeviceGetBrand(device: Handle, brand: Out<c_uint>) { brand.set(device.device()?.model.brand.nvml_value()) }
    fn nvmlDeviceGetArchitecture(device: Handle, architecture: Out<c_uint>) {
        architecture.set(device.device()?.model.architecture.nvml_value())
    }
    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) {
        let capability = device.device()?.model.compute_capability;
        if minor.is_null() {
            return Err(Code::InvalidArgument);
        }
        major.set(capability.major as c_int)?;
        minor.set(capability.minor as c_int)
    }
    fn nvmlDeviceGetBoardId(device: Handle, board: Out<c_uint>) {
        let pci = device.device()?.pci;
        board.set(pci.domain << 16 | u32::from(pci.bus) << 8 | u32::from(pci.device))
    }
    fn nvmlDeviceOnSameBoard(one: Handle, other: Handle, same: Out<c_int>) {
        same.set(c_int::from(one.device()?.index == other.device()?.index))
    }

    fn nvmlDeviceGetPciInfo(device: Handle, pci: Out<nvmlPciInfo_t>) { device_pci_info(device, pci) }
    fn nvmlDeviceGetPciInfo_v2(device: Handle, pci: Out<nvmlPciInfo_t>) { device_pci_info(device, pci) }
    fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: Out<nvmlPciInfo_t>) { device_pci_info(device, pci) }
    fn nvmlDeviceGetPciInfoExt(device: Handle, pci: Out<nvmlPciInfoExt_t>) {
        let device = device.device()?;
        let mut info = pci.get()?;
        let base = pci_info(device.pci, (device.model.pci_id.vendor, device.model.pci_id.device));
        info.domain = base.domain;
        info.bus = base.bus;
        info.device = base.device;
        info.pciDeviceId = base.pciDeviceId;
        info.pciSubSystemId = base.pciSubSystemId;
        // VGA-compatible display controllers are 0x0300; GPUs without a display are 3D controllers.
        (info.baseClass, info.subClass) = (0x03, 0x02);
        info.busId = base.busId;
        pci.set(info)
    }

    fn nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) {
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
    fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: Out<c_uint>) {
        count.set(device.device()?.model.max_mig_devices)
    }
    fn nvmlDeviceIsMigDeviceHandle(device: Handle, is: Out<c_uint>) {
        device.any_device()?;
        is.set(0)
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, _index: c_uint, _mig: Out<Handle>) {
        let device = device.device()?;
        // MIG mode is modelled, MIG instances are not: there are none.
        Err(if device.machine.mig(&device) { Code::NotFound } else { Code::InvalidArgument })
    }
}

/// The layouts of `nvml.h`.
const _: () = {
    assert!(size_of::<nvmlPciInfo_t>() == 68);
    assert!(std::mem::offset_of!(nvmlPciInfo_t, domain) == 16);
    assert!(std::mem::offset_of!(nvmlPciInfo_t, busId) == 36);
};
