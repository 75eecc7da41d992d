//! Measured load of devices.

/// Measured load of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLoad {
    /// Percent of the time in which the device worked, as an average of about a minute.
    pub busy_percent: u8,
    /// Reserved compute of the shares whose work `busy_percent` contains, in percent of the device.
    pub settled_cores_percent: u32,
}
