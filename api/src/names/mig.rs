//! Names of MIG devices.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::macros::name_type;
use super::{DeviceName, GpuUuid, NameError};

name_type! {
    /// UUID of a MIG device as NVML prints it. Each creation of a device gives it a new one.
    MigUuid, "MIG UUID", at most 80,
    "`MIG-` followed by a UUID, such as `MIG-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77`",
    |text| {
        let rest = text.strip_prefix("MIG-")?;
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-/".contains(&b);
        (!rest.is_empty() && rest.bytes().all(is_plain)).then(|| Arc::from(text))
    }
}

/// Name of a MIG device in a slice: GPU, profile and placement,
/// `gpu-<UUID>-mig-<profile>-<profile ID>-<first memory slice>`.
///
/// The profile's name is for people: without dots, and `-` for `+`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MigDeviceName {
    gpu: GpuUuid,
    profile_name: Arc<str>,
    profile: u32,
    start: u32,
}

/// Between the names of GPU and profile.
const INFIX: &str = "-mig-";

impl MigDeviceName {
    /// Returns the name of the device of a profile that starts at a memory slice.
    pub fn new(gpu: GpuUuid, profile_name: &str, profile: u32, start: u32) -> Self {
        let plain = |c: char| match c {
            '+' => Some('-'),
            c if c.is_ascii_alphanumeric() || c == '-' => Some(c.to_ascii_lowercase()),
            _ => None,
        };
        // A device name has 63 bytes, of which the GPU's takes 40.
        let profile_name: String = profile_name.chars().filter_map(plain).take(10).collect();
        Self { gpu, profile_name: profile_name.into(), profile, start }
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &GpuUuid {
        &self.gpu
    }

    /// Returns NVML's ID of the profile.
    pub fn profile(&self) -> u32 {
        self.profile
    }

    /// Returns the first memory slice.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// Returns the name in the slice.
    pub fn device_name(&self) -> DeviceName {
        DeviceName::new(self.to_string())
            .expect("invariant: the parts of the name make a DNS label of 63 bytes at most")
    }

    /// Returns the MIG device that a device names, or `None` if it is not named as one.
    pub fn of_device(device: &DeviceName) -> Option<Self> {
        let (gpu, rest) = device.as_str().split_once(INFIX)?;
        let gpu = GpuUuid::from_device_name(&DeviceName::new(gpu).ok()?).ok()?;
        let (rest, start) = rest.rsplit_once('-')?;
        let (profile_name, profile) = rest.rsplit_once('-')?;
        let name = Self::new(gpu, profile_name, number(profile)?, number(start)?);
        (name.to_string() == device.as_str()).then_some(name)
    }
}

/// Parses an ID of NVML. More than three digits would not fit a name.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number| *number < 1000)
}

impl fmt::Display for MigDeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpu = self.gpu.device_name();
        write!(f, "{gpu}{INFIX}{}-{}-{}", self.profile_name, self.profile, self.start)
    }
}

impl FromStr for MigDeviceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::of_device(&DeviceName::new(text)?).ok_or_else(|| NameError::Malformed {
            kind: "name of a MIG device",
            value: text.to_owned(),
            rule: "the name of a GPU, `-mig-`, a profile, its ID and a memory slice",
        })
    }
}

impl serde::Serialize for MigDeviceName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for MigDeviceName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
