//! Names of hardware.

use std::sync::Arc;

use super::macros::name_type;
use super::syntax::is_uuid;
use super::{DeviceName, MigDeviceName, NameError};

name_type! {
    /// A GPU's UUID as NVML prints it: `GPU-` and a UUID in lowercase. Hexadecimal digits are
    /// lowered when parsed, so equal GPUs are equal text. A MIG instance (`MIG-…`) is not a GPU.
    GpuUuid, "GPU UUID", at most 40,
    "`GPU-` followed by a UUID, such as `GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77`",
    |text| {
        let digits = text.strip_prefix("GPU-").filter(|digits| is_uuid(digits))?;
        Some(Arc::from(format!("GPU-{}", digits.to_ascii_lowercase())))
    }
}

impl GpuUuid {
    /// The device's name in the slice: the UUID in lowercase, `gpu-…`. So a replaced or re-ordered
    /// GPU is never mistaken for the one that was there before.
    pub fn device_name(&self) -> DeviceName {
        DeviceName::new(self.as_str().to_ascii_lowercase())
            .expect("invariant: a lowercased GPU UUID is a DNS label of 40 bytes")
    }

    /// The GPU that a device of ours names.
    ///
    /// # Errors
    /// The device is not named as a GPU of ours is.
    pub fn from_device_name(device: &DeviceName) -> Result<Self, NameError> {
        let malformed = || NameError::Malformed {
            kind: "device name",
            value: device.to_string(),
            rule: "`gpu-` followed by a UUID",
        };
        let digits = device.as_str().strip_prefix("gpu-").ok_or_else(malformed)?;
        Self::new(format!("GPU-{digits}")).map_err(|_| malformed())
    }

    /// The GPU that a device of ours is, or is a part of; `None` for other devices.
    pub fn of_device(device: &DeviceName) -> Option<Self> {
        let of_mig = || MigDeviceName::of_device(device).map(|device| device.gpu().clone());
        Self::from_device_name(device).ok().or_else(of_mig)
    }

    /// The fully qualified CDI device of the GPU's driver files,
    /// `k8s.gpu.tessera.dev/driver=GPU-…`.
    pub fn cdi_id(&self) -> String {
        format!("{}={self}", super::CDI_DRIVER_KIND)
    }
}

impl From<&GpuUuid> for DeviceName {
    fn from(uuid: &GpuUuid) -> Self {
        uuid.device_name()
    }
}

name_type! {
    /// A PCI address `domain:bus:device.function` in the form that sysfs and the standard attribute
    /// use: lowercase, domain of at least four digits. NVML's eight-digit domain is shortened when
    /// parsed.
    PciBusId, "PCI address", at most 16,
    "`domain:bus:device.function` in hexadecimal, such as `0000:19:00.0`",
    canonical_pci
}

fn canonical_pci(text: &str) -> Option<Arc<str>> {
    let hex = |part: &str, digits: std::ops::RangeInclusive<usize>| {
        (digits.contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit()))
            .then(|| u32::from_str_radix(part, 16).ok())
            .flatten()
    };
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let (domain, bus) = (hex(domain, 4..=8)?, hex(bus, 2..=2)?);
    // A bus has 32 devices and a device 8 functions (PCI Local Bus Specification 3.0, 3.2.2.3).
    let device = hex(device, 2..=2).filter(|device| *device < 32)?;
    let function = hex(function, 1..=1).filter(|function| *function < 8)?;
    Some(Arc::from(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")))
}
