//! PCI addresses and PCIe distances.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Address of a PCI function, `domain:bus:device.function`, in the kernel's notation
/// (`0000:19:00.0`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// Domain (segment).
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device (slot).
    pub device: u8,
    /// Function.
    pub function: u8,
}

impl PciAddress {
    /// Parses `0000:19:00.0`, `00000000:19:00.0` (NVML) or `19:00.0`, in upper or lower case.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.trim().rsplit_once('.')?;
        let (rest, device) = rest.rsplit_once(':')?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
        let address = Self {
            domain: u32::from_str_radix(domain, 16).ok()?,
            bus: u8::from_str_radix(bus, 16).ok()?,
            device: u8::from_str_radix(device, 16).ok()?,
            function: u8::from_str_radix(function, 16).ok()?,
        };
        (address.device < 32 && address.function < 8).then_some(address)
    }

    /// Returns NVML's `busId`: eight digits of domain, upper case.
    pub fn nvml_bus_id(self) -> String {
        format!("{:08X}:{:02X}:{:02X}.{:X}", self.domain, self.bus, self.device, self.function)
    }

    /// Returns NVML's `busIdLegacy`: four digits of domain, upper case.
    pub fn nvml_legacy_bus_id(self) -> String {
        format!("{:04X}:{:02X}:{:02X}.{:X}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl TryFrom<String> for PciAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or_else(|| {
            format!("invalid PCI address `{text}`: expected a value such as \"0000:19:00.0\"")
        })
    }
}

impl From<PciAddress> for String {
    fn from(value: PciAddress) -> Self {
        value.to_string()
    }
}

/// Vendor and device id of a PCI function, such as `10de:2330`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciDeviceId {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
}

impl TryFrom<String> for PciDeviceId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let error = || format!("invalid PCI id `{text}`: expected a value such as \"10de:2330\"");
        let (vendor, device) = text.split_once(':').ok_or_else(error)?;
        Ok(Self {
            vendor: u16::from_str_radix(vendor, 16).map_err(|_| error())?,
            device: u16::from_str_radix(device, 16).map_err(|_| error())?,
        })
    }
}

impl From<PciDeviceId> for String {
    fn from(value: PciDeviceId) -> Self {
        format!("{:04x}:{:04x}", value.vendor, value.device)
    }
}

/// PCIe distance of two GPUs: `nvmlGpuTopologyLevel_t`, and the names of `nvidia-smi topo -m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PcieLevel {
    /// Same board.
    Internal,
    /// PIX: one PCIe switch.
    Single,
    /// PXB: several PCIe switches, no host bridge.
    Multiple,
    /// PHB: one host bridge.
    HostBridge,
    /// NODE: host bridges of one NUMA node.
    Node,
    /// SYS: across NUMA nodes.
    System,
}

impl PcieLevel {
    /// Returns the value of `nvmlGpuTopologyLevel_t`.
    pub fn nvml_value(self) -> u32 {
        match self {
            Self::Internal => 0,
            Self::Single => 10,
            Self::Multiple => 20,
            Self::HostBridge => 30,
            Self::Node => 40,
            Self::System => 50,
        }
    }

    /// Returns the name of `nvidia-smi topo -m`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Internal => "X",
            Self::Single => "PIX",
            Self::Multiple => "PXB",
            Self::HostBridge => "PHB",
            Self::Node => "NODE",
            Self::System => "SYS",
        }
    }
}
