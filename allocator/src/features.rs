//! Kubernetes feature gates that affect feasibility. The defaults are those of 1.37.

/// Enabled feature gates of upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FeatureGates {
    /// `DRAAdminAccess`
    pub admin_access: bool,
    /// `DRAPrioritizedList`: `firstAvailable`.
    pub prioritized_list: bool,
    /// `DRAPartitionableDevices`: shared counters and per-device node selection.
    pub partitionable: bool,
    /// `DRAConsumableCapacity`: shares of devices.
    pub consumable_capacity: bool,
    /// `DRAFractionalCapacityRange`: steps of less than one unit.
    pub fractional_range: bool,
    /// `DRADeviceTaints`
    pub taints: bool,
    /// `DRADeviceBindingConditions`
    pub binding_conditions: bool,
    /// `DRAListTypeAttributes`: constraints compare lists as sets. Off by default.
    pub list_attributes: bool,
}

impl Default for FeatureGates {
    fn default() -> Self {
        Self {
            admin_access: true,
            prioritized_list: true,
            partitionable: true,
            consumable_capacity: true,
            fractional_range: true,
            taints: true,
            binding_conditions: true,
            list_attributes: false,
        }
    }
}

impl FeatureGates {
    /// Enables exactly the named gates. Unknown names are ignored.
    pub fn with_names<'n>(names: impl IntoIterator<Item = &'n str>) -> Self {
        let mut features = Self {
            admin_access: false,
            prioritized_list: false,
            partitionable: false,
            consumable_capacity: false,
            fractional_range: false,
            taints: false,
            binding_conditions: false,
            list_attributes: false,
        };
        for name in names {
            match name {
                "DRAAdminAccess" => features.admin_access = true,
                "DRAPrioritizedList" => features.prioritized_list = true,
                "DRAPartitionableDevices" => features.partitionable = true,
                "DRAConsumableCapacity" => features.consumable_capacity = true,
                "DRAFractionalCapacityRange" => features.fractional_range = true,
                "DRADeviceTaints" => features.taints = true,
                "DRADeviceBindingConditions" => features.binding_conditions = true,
                "DRAListTypeAttributes" => features.list_attributes = true,
                _ => {}
            }
        }
        features
    }
}
