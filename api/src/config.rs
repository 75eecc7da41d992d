//! `GpuConfig`: opaque parameters of a DeviceClass or a claim that select how its GPUs are chosen
//! and shared.
//!
//! ```text
//! class configs, claim configs --decode (strict)--> GpuConfig --merge, per field--> GpuConfig
//!     --supported, consistent, defaults--> EffectiveConfig
//! ```
//!
//! Decoding is strict: an unknown field, value, version or kind is an error that names the field
//! and the allowed values. A value that this version does not enforce is refused as well ("not
//! supported in this version"), and so are values that exclude each other: nothing is accepted and
//! then ignored.

mod collect;
mod decode;
mod defaulting;
mod encode;
mod error;
mod fields;
mod values;

#[cfg(test)]
mod tests;

pub use collect::{
    ConfigEntry, ConfigSource, allocated_config, effective_config, effective_config_of_request,
    merged_config,
};
pub use error::ConfigError;
pub use fields::{ConfigField, FIELDS};
pub use values::{
    ComputePolicy, ComputePriority, MemoryPercent, Percent, PlacementPolicy, Sharing, TopologyMode,
    TopologyScope, UnknownWord,
};

use crate::quantity::Quantity;

/// `apiVersion` of the parameters.
pub const API_VERSION: &str = "gpu.tessera.dev/v1alpha1";
/// `kind` of the parameters.
pub const KIND: &str = "GpuConfig";

/// The parameters as written; a field that is not set is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct GpuConfig {
    /// `placement`: preference among nodes and GPUs that fit.
    pub placement: Placement,
    /// `topology`: connections between the GPUs of one request. A claim's list replaces that of
    /// its class.
    pub topology: Option<Vec<TopologyTerm>>,
    /// `exclusive`: reserves all of each chosen GPU.
    pub exclusive: Option<bool>,
    /// `memory`: amount, limit and oversubscription.
    pub memory: Memory,
    /// `compute`: enforcement and priority.
    pub compute: Compute,
    /// `sharing`: the mechanism that enforces the shares.
    pub sharing: Option<Sharing>,
}

/// `placement`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Placement {
    /// `placement.node`: preference among nodes.
    pub node: Option<PlacementPolicy>,
    /// `placement.device`: preference among the GPUs of the node.
    pub device: Option<PlacementPolicy>,
}

/// One entry of `topology`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopologyTerm {
    /// `scope`: the connection.
    pub scope: TopologyScope,
    /// `mode`: preferred or required.
    pub mode: TopologyMode,
}

/// `memory`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Memory {
    /// `memory.percent`: percent of each chosen GPU's published memory, instead of
    /// `capacity.requests.memory`.
    pub percent: Option<MemoryPercent>,
    /// `memory.limit`: what containers may use of the memory that is reserved.
    pub limit: Option<Quantity>,
    /// `memory.oversubscribe`: allows memory to spill to the host. Only such claims get GPUs whose
    /// memory is oversubscribed.
    pub oversubscribe: Option<bool>,
}

/// `compute`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Compute {
    /// `compute.policy`: enforcement of `cores`.
    pub policy: Option<ComputePolicy>,
    /// `compute.priority`: order in which claims get idle compute.
    pub priority: Option<ComputePriority>,
    /// `compute.limit`: ceiling above `cores`, in percent of a GPU.
    pub limit: Option<Percent>,
}

/// Reservation of a request on each GPU: its `capacity.requests`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestedCapacity {
    /// `capacity.requests.memory`.
    pub memory: Option<Quantity>,
    /// `capacity.requests.cores`.
    pub cores: Option<Quantity>,
}

impl GpuConfig {
    /// Checks the parameters against the capacity that their request names.
    ///
    /// # Errors
    /// [`ConfigError::Excluded`] or [`ConfigError::UnknownValue`] for the first field that the
    /// request contradicts.
    pub fn check_request(&self, requested: RequestedCapacity) -> Result<(), ConfigError> {
        if self.exclusive == Some(true) {
            return Self::check_exclusive(requested);
        }
        if let Some(memory) = requested.memory {
            self.memory.check_amount(memory)?;
        }
        let cores = requested.cores.and_then(|cores| cores.as_exact_i64()).unwrap_or(0);
        self.compute.check_cores(u64::try_from(cores).unwrap_or(0))
    }

    fn check_exclusive(requested: RequestedCapacity) -> Result<(), ConfigError> {
        let by = match requested {
            RequestedCapacity { memory: Some(_), .. } => "capacity.requests.memory of the request",
            RequestedCapacity { cores: Some(_), .. } => "capacity.requests.cores of the request",
            RequestedCapacity { memory: None, cores: None } => return Ok(()),
        };
        Err(ConfigError::Excluded {
            path: "exclusive".to_owned(),
            value: "true".to_owned(),
            by,
            instead: "memory.limit and compute.limit to be held to less than the GPU",
        })
    }
}

impl Memory {
    fn check_amount(&self, requested: Quantity) -> Result<(), ConfigError> {
        if let Some(percent) = self.percent {
            return Err(ConfigError::Excluded {
                path: "memory.percent".to_owned(),
                value: percent.to_string(),
                by: "capacity.requests.memory of the request",
                instead: "one of the two",
            });
        }
        match self.limit {
            Some(limit) if limit > requested => Err(ConfigError::UnknownValue {
                path: "memory.limit".to_owned(),
                value: limit.to_string(),
                allowed: format!("at most capacity.requests.memory, {requested}"),
            }),
            _ => Ok(()),
        }
    }
}

impl Compute {
    /// Checks that the limit is not below the request's `cores`, in percent.
    ///
    /// # Errors
    /// [`ConfigError::Excluded`] if there are no `cores`, [`ConfigError::UnknownValue`] if they are
    /// more than the limit.
    pub fn check_cores(&self, cores: u64) -> Result<(), ConfigError> {
        let Some(limit) = self.limit else { return Ok(()) };
        let path = "compute.limit".to_owned();
        match cores {
            0 => Err(ConfigError::Excluded {
                path,
                value: limit.to_string(),
                by: "a request without cores",
                instead: "capacity.requests.cores as well",
            }),
            cores if cores > u64::from(limit.get()) => Err(ConfigError::UnknownValue {
                path,
                value: limit.to_string(),
                allowed: format!("the request's cores and more, {cores} to 100"),
            }),
            _ => Ok(()),
        }
    }
}

/// The parameters in effect for one request: merged, validated, with defaults.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EffectiveConfig {
    /// Preference among nodes.
    pub node: PlacementPolicy,
    /// Preference among the GPUs of the node.
    pub device: PlacementPolicy,
    /// Connections between the GPUs; empty if any will do.
    pub topology: Vec<TopologyTerm>,
    /// True if all of each chosen GPU is reserved.
    pub exclusive: bool,
    /// Percent of each chosen GPU's memory, instead of an amount.
    pub memory_percent: Option<MemoryPercent>,
    /// The part of the reserved memory that containers may use; `None`: all of it.
    pub memory_limit: Option<Quantity>,
    /// True if memory may spill to the host.
    pub oversubscribe: bool,
    /// Enforcement of `cores`. Its default depends on the driver's settings.
    pub compute: Compute,
    /// Order in which claims get idle compute.
    pub compute_priority: ComputePriority,
    /// Mechanism that enforces the shares.
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
    /// The first wrong field, with its path.
    pub fn decode(parameters: &serde_json::Value) -> Result<Self, ConfigError> {
        decode::decode(parameters)
    }

    /// Returns the opaque parameters: version, kind, and the fields that are set.
    #[must_use]
    pub fn encode(&self) -> serde_json::Value {
        encode::encode(self)
    }

    /// Returns these parameters with each field that `over` sets taken from `over`.
    #[must_use]
    pub fn overridden_by(&self, over: &Self) -> Self {
        Self {
            placement: Placement {
                node: over.placement.node.or(self.placement.node),
                device: over.placement.device.or(self.placement.device),
            },
            topology: over.topology.clone().or_else(|| self.topology.clone()),
            exclusive: over.exclusive.or(self.exclusive),
            memory: Memory {
                percent: over.memory.percent.or(self.memory.percent),
                limit: over.memory.limit.or(self.memory.limit),
                oversubscribe: over.memory.oversubscribe.or(self.memory.oversubscribe),
            },
            compute: Compute {
                policy: over.compute.policy.or(self.compute.policy),
                priority: over.compute.priority.or(self.compute.priority),
                limit: over.compute.limit.or(self.compute.limit),
            },
            sharing: over.sharing.or(self.sharing),
        }
    }

    /// Checks that this version enforces every value that is set.
    ///
    /// # Errors
    /// [`ConfigError::NotSupported`] for the first value that it does not enforce.
    pub fn supported(&self) -> Result<(), ConfigError> {
        match self.sharing {
            Some(sharing @ Sharing::TimeSlicing) => Err(not_supported("sharing", sharing)),
            Some(Sharing::Intercept | Sharing::Mps) | None => Ok(()),
        }
    }

    /// Checks that the values do not exclude each other: MPS has fixed caps only, two priorities,
    /// and no memory beyond the GPU; only `Balance` has a ceiling of its own.
    ///
    /// # Errors
    /// [`ConfigError::Excluded`] for the first value that another one excludes.
    pub fn consistent(&self) -> Result<(), ConfigError> {
        if let (Some(limit), Some(policy)) = (self.compute.limit, self.compute.policy)
            && policy != ComputePolicy::Balance
        {
            return Err(ConfigError::Excluded {
                path: "compute.limit".to_owned(),
                value: limit.to_string(),
                by: match policy {
                    ComputePolicy::Fixed => "compute.policy: Fixed",
                    ComputePolicy::Balance | ComputePolicy::None => "compute.policy: None",
                },
                instead: "compute.policy: Balance",
            });
        }
        if let (Some(true), Some(percent)) = (self.exclusive, self.memory.percent) {
            return Err(ConfigError::Excluded {
                path: "memory.percent".to_owned(),
                value: percent.to_string(),
                by: "exclusive: true",
                instead: "memory.limit",
            });
        }
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
            _ => match self.compute.limit {
                Some(limit) => excluded("compute.limit", &limit, "compute.policy: Fixed"),
                None => Ok(()),
            },
        }
    }

    /// Returns the parameters with defaults filled in.
    ///
    /// # Errors
    /// As [`supported`](Self::supported) and [`consistent`](Self::consistent).
    pub fn effective(&self) -> Result<EffectiveConfig, ConfigError> {
        self.supported()?;
        self.consistent()?;
        Ok(self.filled_in())
    }

    /// Returns the first field that is set and needs tessera-controller, with the alternative where
    /// kube-scheduler allocates; `None` if no such field is set.
    #[must_use]
    pub fn needs_controller(&self) -> Option<(&'static str, &'static str)> {
        if self.exclusive == Some(true) {
            return Some((
                "exclusive",
                "leave capacity.requests.memory out: it reserves all memory",
            ));
        }
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
        // kube-scheduler would allocate it beside claims with another kind of sharing.
        (self.sharing == Some(Sharing::Mps)).then_some(("sharing", "leave it out"))
    }

    fn filled_in(&self) -> EffectiveConfig {
        EffectiveConfig {
            node: self.placement.node.unwrap_or(PlacementPolicy::LeastFragmentation),
            device: self.placement.device.unwrap_or(PlacementPolicy::LeastFragmentation),
            topology: self.topology.clone().unwrap_or_default(),
            exclusive: self.exclusive.unwrap_or(false),
            memory_percent: self.memory.percent,
            memory_limit: self.memory.limit,
            oversubscribe: self.memory.oversubscribe.unwrap_or(false),
            compute: self.compute,
            compute_priority: self.compute.priority.unwrap_or(ComputePriority::Normal),
            sharing: self.sharing.unwrap_or(Sharing::Intercept),
        }
    }
}

fn not_supported(path: &str, value: impl ToString) -> ConfigError {
    ConfigError::NotSupported { path: path.to_owned(), value: value.to_string() }
}
