//! `GpuConfig`, the opaque parameters by which a DeviceClass or a claim says how its GPUs are
//! chosen and shared.
//!
//! ```text
//! class configs, claim configs --decode (strict)--> GpuConfig --merge, per field--> GpuConfig --supported--> EffectiveConfig
//! ```
//!
//! Decoding is strict: an unknown field, value, version or kind is an error that names the field
//! and what is allowed there. A value that is known and that this version does not enforce yet is
//! refused as well, with the words "not supported in this version": nothing is ever accepted and
//! ignored. Nor is a value that another one excludes.

mod collect;
mod decode;
mod error;
mod values;

#[cfg(test)]
mod tests;

pub use collect::{
    ConfigEntry, ConfigSource, allocated_config, effective_config, effective_config_of_request,
    merged_config,
};
pub use error::ConfigError;
pub use values::{
    ComputePolicy, ComputePriority, Percent, PlacementPolicy, Sharing, TopologyMode, TopologyScope,
};

/// `apiVersion` of the parameters.
pub const API_VERSION: &str = "gpu.tessera.dev/v1alpha1";
/// `kind` of the parameters.
pub const KIND: &str = "GpuConfig";

/// The parameters as written: what is not set is `None`. All defaults: no field set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct GpuConfig {
    /// Where the GPUs are taken.
    pub placement: Placement,
    /// `topology`: how the GPUs of one request belong together. A claim's list replaces the
    /// class's as a whole.
    pub topology: Option<Vec<TopologyTerm>>,
    /// How memory is shared.
    pub memory: Memory,
    /// How compute is shared.
    pub compute: Compute,
    /// `sharing`: what enforces the shares.
    pub sharing: Option<Sharing>,
}

/// `placement`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Placement {
    /// `placement.node`: which node.
    pub node: Option<PlacementPolicy>,
    /// `placement.device`: which GPU on it.
    pub device: Option<PlacementPolicy>,
}

/// One entry of `topology`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopologyTerm {
    /// `scope`: what the GPUs are to share.
    pub scope: TopologyScope,
    /// `mode`: whether they must.
    pub mode: TopologyMode,
}

/// `memory`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Memory {
    /// `memory.percent`: share of each chosen GPU's memory as it is published, in place of
    /// `capacity.requests.memory`.
    pub percent: Option<Percent>,
    /// `memory.oversubscribe`: whether plain memory may spill to the host; only then does the
    /// claim get GPUs whose memory is oversubscribed.
    pub oversubscribe: Option<bool>,
}

/// `compute`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Compute {
    /// `compute.policy`: when the share of compute is a cap.
    pub policy: Option<ComputePolicy>,
    /// `compute.priority`: who yields first.
    pub priority: Option<ComputePriority>,
}

/// The parameters that hold for one request: merged, checked to be supported, defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EffectiveConfig {
    /// Which node.
    pub node: PlacementPolicy,
    /// Which GPU on it.
    pub device: PlacementPolicy,
    /// How the GPUs belong together; empty = in any way.
    pub topology: Vec<TopologyTerm>,
    /// Share of each chosen GPU's memory, instead of an amount.
    pub memory_percent: Option<Percent>,
    /// Whether memory may spill to the host.
    pub oversubscribe: bool,
    /// When the share of compute is a cap.
    pub compute_policy: ComputePolicy,
    /// Who yields first.
    pub compute_priority: ComputePriority,
    /// What enforces the shares.
    pub sharing: Sharing,
}

impl Default for EffectiveConfig {
    fn default() -> Self {
        GpuConfig::default().filled_in()
    }
}

impl GpuConfig {
    /// Decodes opaque parameters, strictly.
    ///
    /// # Errors
    /// The first thing found that is not as it must be, with its field path.
    pub fn decode(parameters: &serde_json::Value) -> Result<Self, ConfigError> {
        decode::decode(parameters)
    }

    /// The parameters with each field that `over` sets replaced by what it sets there.
    #[must_use]
    pub fn overridden_by(&self, over: &Self) -> Self {
        Self {
            placement: Placement {
                node: over.placement.node.or(self.placement.node),
                device: over.placement.device.or(self.placement.device),
            },
            topology: over.topology.clone().or_else(|| self.topology.clone()),
            memory: Memory {
                percent: over.memory.percent.or(self.memory.percent),
                oversubscribe: over.memory.oversubscribe.or(self.memory.oversubscribe),
            },
            compute: Compute {
                policy: over.compute.policy.or(self.compute.policy),
                priority: over.compute.priority.or(self.compute.priority),
            },
            sharing: over.sharing.or(self.sharing),
        }
    }

    /// Checks that this version enforces every value that is set.
    ///
    /// # Errors
    /// [`ConfigError::NotSupported`] for the first value that it does not.
    pub fn supported(&self) -> Result<(), ConfigError> {
        match self.sharing {
            Some(sharing @ Sharing::TimeSlicing) => Err(not_supported("sharing", sharing)),
            Some(Sharing::Intercept | Sharing::Mps) | None => Ok(()),
        }
    }

    /// Checks that its values can hold together: MPS has no cap that gives way, two priorities, and
    /// knows nothing of memory beyond the GPU.
    ///
    /// # Errors
    /// [`ConfigError::Excluded`] for the first value that another one excludes.
    pub fn consistent(&self) -> Result<(), ConfigError> {
        if self.sharing != Some(Sharing::Mps) {
            return Ok(());
        }
        let excluded = |path: &str, value: &dyn ToString, instead| {
            let (path, value) = (path.to_owned(), value.to_string());
            Err(ConfigError::Excluded { path, value, by: "sharing: MPS", instead })
        };
        match (self.compute.policy, self.compute.priority, self.memory.oversubscribe) {
            (Some(policy @ ComputePolicy::Balance), _, _) => {
                excluded("compute.policy", &policy, "Fixed or None")
            }
            (_, Some(priority @ ComputePriority::High), _) => {
                excluded("compute.priority", &priority, "Normal or Low")
            }
            (_, _, Some(true)) => excluded("memory.oversubscribe", &true, "false"),
            _ => Ok(()),
        }
    }

    /// The parameters as they take effect.
    ///
    /// # Errors
    /// As [`supported`](Self::supported) and [`consistent`](Self::consistent).
    pub fn effective(&self) -> Result<EffectiveConfig, ConfigError> {
        self.supported()?;
        self.consistent()?;
        Ok(self.filled_in())
    }

    /// The first field that is set and that only our controller can act on, with what to do where
    /// kube-scheduler allocates.
    #[must_use]
    pub fn needs_controller(&self) -> Option<(&'static str, &'static str)> {
        const LEAVE_OUT: &str = "leave it out; the order of devices in the slices (driver.deviceOrder) is the only policy there";
        if self.memory.percent.is_some() {
            return Some(("memory.percent", "ask for an amount with capacity.requests.memory"));
        }
        let fields = [
            ("placement.node", self.placement.node.is_some()),
            ("placement.device", self.placement.device.is_some()),
            ("topology", self.topology.is_some()),
        ];
        if let Some((field, _)) = fields.into_iter().find(|(_, set)| *set) {
            return Some((field, LEAVE_OUT));
        }
        // kube-scheduler would put it beside claims that are shared in another way.
        (self.sharing == Some(Sharing::Mps)).then_some(("sharing", "leave it out"))
    }

    fn filled_in(&self) -> EffectiveConfig {
        EffectiveConfig {
            node: self.placement.node.unwrap_or(PlacementPolicy::LeastFragmentation),
            device: self.placement.device.unwrap_or(PlacementPolicy::LeastFragmentation),
            topology: self.topology.clone().unwrap_or_default(),
            memory_percent: self.memory.percent,
            oversubscribe: self.memory.oversubscribe.unwrap_or(false),
            compute_policy: self.compute.policy.unwrap_or(ComputePolicy::None),
            compute_priority: self.compute.priority.unwrap_or(ComputePriority::Normal),
            sharing: self.sharing.unwrap_or(Sharing::Intercept),
        }
    }
}

fn not_supported(path: &str, value: impl ToString) -> ConfigError {
    ConfigError::NotSupported { path: path.to_owned(), value: value.to_string() }
}
