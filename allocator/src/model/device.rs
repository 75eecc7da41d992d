//! ResourceSlices and devices.

use std::sync::{Arc, OnceLock};

use tessera_api::names::{DeviceName, DriverName, NodeName, PoolName};
use tessera_api::quantity::Quantity;

use super::NameMap;
use super::node::NodeSelector;
use crate::selector::DeviceView;

/// Name of the feature "node allocatable resources" in [`Device::unsupported`].
///
/// The device consumes CPU, memory or other resources of its node.
pub const NODE_ALLOCATABLE: &str = "node allocatable resources";

/// Identity of a pool: devices of one driver that are published together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId {
    /// Driver name.
    pub driver: DriverName,
    /// Pool name.
    pub pool: PoolName,
}

/// Identity of a device in the cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// Pool of the device.
    pub pool: PoolId,
    /// Device name, unique in the pool.
    pub device: DeviceName,
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.pool.driver, self.pool.pool, self.device)
    }
}

/// A published ResourceSlice.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Object name.
    pub name: String,
    /// Driver and pool.
    pub pool: PoolId,
    /// Generation of the pool; only slices of the highest generation count.
    pub generation: i64,
    /// Number of slices of the complete pool.
    pub slice_count: i64,
    /// Position in the list that upstream's allocator receives, if known.
    ///
    /// It matters only if slices of one generation disagree about `slice_count`: upstream uses the
    /// first slice. If the position is unknown, such a pool is incomplete.
    pub list_position: Option<usize>,
    /// Nodes on which the devices can be used.
    pub nodes: NodeChoice,
    /// Devices in published order; empty if the slice carries shared counters.
    pub devices: Vec<Arc<Device>>,
    /// `sharedCounters`, which partitions of one physical device consume. Devices of other slices
    /// of the pool refer to them by name.
    pub counter_sets: Vec<CounterSet>,
    /// The slice uses a feature for which upstream ignores it with the default feature gates.
    pub ignored: bool,
}

/// A set of shared counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterSet {
    /// Name, unique in the pool.
    pub name: String,
    /// Total amount of each counter.
    pub counters: NameMap<Quantity>,
}

/// Consumption of a counter set by an allocated device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterUse {
    /// Name of the counter set.
    pub set: String,
    /// Amount of each counter.
    pub counters: NameMap<Quantity>,
}

/// Binding conditions: set on the claim by a controller before its pod can be bound (KEP-5007).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct BindingConditions {
    /// Conditions that must all be true.
    pub conditions: Vec<String>,
    /// Conditions of which none may be true.
    pub failure_conditions: Vec<String>,
}

/// Nodes on which a slice or device can be used.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeChoice {
    /// One node.
    Node(NodeName),
    /// All nodes.
    All,
    /// Nodes that match the selector.
    Selector(NodeSelector),
    /// Set by each device (slices only).
    PerDevice,
    /// Unknown node selection of a later API version; no node can use the device.
    Unknown,
}

/// A device. It is built once per change of its slice.
#[derive(Debug, Clone)]
pub struct Device {
    /// Name, unique in the pool.
    pub name: DeviceName,
    /// Attributes by published name (with or without a domain).
    pub attributes: NameMap<Attribute>,
    /// Capacities by published name. Equal devices of a slice share them.
    pub capacity: Arc<NameMap<Capacity>>,
    /// `allowMultipleAllocations`: several claims can share the capacity of the device.
    pub shared: bool,
    /// Taints, without the managed taint that only keeps kube-scheduler from the device.
    pub taints: Vec<Taint>,
    /// Nodes on which the device can be used, in slices with per-device node selection.
    pub nodes: NodeChoice,
    /// An allocation restricts the claim to the chosen node.
    pub binds_to_node: bool,
    /// The device is not fenced: another allocator may allocate it, so it is never used.
    pub is_unmanaged: bool,
    /// The device is of a driver other than Tessera's: a GpuConfig does not apply to it, and no
    /// GpuQuota counts it.
    pub is_foreign: bool,
    /// The device publishes more memory than it has; only claims that allow oversubscription use
    /// it.
    pub oversubscribed: bool,
    /// Claims can share the device by MPS.
    pub supports_mps: bool,
    /// Consumption of counter sets of the pool.
    pub consumes: Vec<CounterUse>,
    /// `bindingConditions` and `bindingFailureConditions`, if the former are set.
    pub binding: Option<Arc<BindingConditions>>,
    /// Name of an unsupported feature; such a device is never allocated.
    pub unsupported: Option<&'static str>,
    /// View of the device for selectors, built when the first selector is evaluated.
    pub view: OnceLock<DeviceView>,
}

/// Value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Attribute {
    /// `bool`
    Bool(bool),
    /// `int`
    Int(i64),
    /// `string`
    String(Arc<str>),
    /// `version`: semantic version as published. It is compared as text, since a version has one
    /// spelling.
    Version(Arc<str>),
    /// A list (alpha in 1.37). Selectors can read it; in a constraint it equals no other value.
    List(Vec<Attribute>),
    /// An unknown type of a later API version; every selector fails on the device.
    Unknown,
}

/// A capacity of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacity {
    /// Total amount, in the unit of the capacity (`memory`: bytes, `cores`: percent).
    pub value: Quantity,
    /// Rules for requested amounts, on shared devices.
    pub policy: Option<RequestPolicy>,
}

/// Rules for the amount of a capacity that a request consumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestPolicy {
    /// Amount consumed if the request sets none.
    pub default: Option<Quantity>,
    /// Valid amounts; a request is rounded up to the next one.
    pub valid_values: Vec<Quantity>,
    /// Valid range; a request is rounded up into it.
    pub valid_range: Option<ValidRange>,
}

/// A range of valid amounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidRange {
    /// Minimum; smaller amounts are rounded up to it. Required by the API.
    pub min: Option<Quantity>,
    /// Maximum.
    pub max: Option<Quantity>,
    /// Amounts are `min` plus a multiple of `step`.
    pub step: Option<Quantity>,
}

/// A device taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// Taint key.
    pub key: String,
    /// Taint value; empty if none is set.
    pub value: String,
    /// Effect of the taint.
    pub effect: TaintEffect,
}

/// Effect of a device taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaintEffect {
    /// New claims are not allocated.
    NoSchedule,
    /// New claims are not allocated, and pods are evicted.
    NoExecute,
    /// `None` or an unknown effect; ignored.
    Other(String),
}

impl TaintEffect {
    /// Returns the effect as spelled in the API.
    pub fn as_str(&self) -> &str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
            Self::Other(text) => text,
        }
    }
}

/// Toleration of device taints, set in a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Toleration {
    /// Key; `None` with `Exists` tolerates every key.
    pub key: Option<String>,
    /// Comparison of the values.
    pub operator: TolerationOperator,
    /// Value for `Equal`.
    pub value: String,
    /// Effect; `None` tolerates every effect.
    pub effect: Option<String>,
}

/// Comparison of the values of toleration and taint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TolerationOperator {
    /// The values are equal (default).
    Equal,
    /// Every value matches.
    Exists,
    /// An unknown operator of a later API version; tolerates nothing.
    Unknown,
}

impl Toleration {
    /// Returns true if it tolerates `taint`.
    ///
    /// Source: `ToleratesTaint` of k8s.io/dynamic-resource-allocation/resourceclaim.
    pub fn tolerates(&self, taint: &Taint) -> bool {
        let effect =
            self.effect.as_deref().is_none_or(|e| e.is_empty() || e == taint.effect.as_str());
        let key = self.key.as_deref().is_none_or(|k| k.is_empty() || k == taint.key);
        effect
            && key
            && match self.operator {
                TolerationOperator::Equal => self.value == taint.value,
                TolerationOperator::Exists => true,
                TolerationOperator::Unknown => false,
            }
    }
}

impl Device {
    /// Returns true if the device is managed and uses no unsupported feature.
    pub(crate) fn is_allocatable(&self) -> bool {
        !self.is_unmanaged && self.unsupported.is_none()
    }

    /// Returns true if the fragmentation of GPUs concerns the device: it is allocatable, of our
    /// driver, and no partition of one.
    pub(crate) fn is_gpu(&self) -> bool {
        self.is_allocatable() && !self.is_foreign && self.consumes.is_empty()
    }

    /// Creates a device without attributes, capacities and taints, for the nodes of its slice.
    pub fn new(name: DeviceName) -> Self {
        Self {
            name,
            attributes: NameMap::new(),
            capacity: Arc::default(),
            shared: false,
            taints: Vec::new(),
            nodes: NodeChoice::Unknown,
            binds_to_node: false,
            is_unmanaged: false,
            is_foreign: false,
            oversubscribed: false,
            supports_mps: false,
            consumes: Vec::new(),
            binding: None,
            unsupported: None,
            view: OnceLock::new(),
        }
    }

    /// Returns the attribute with a fully qualified name; a bare name has the domain `driver`.
    pub fn attribute(&self, driver: &DriverName, qualified: &str) -> Option<&Attribute> {
        self.attributes.get(qualified).or_else(|| {
            let (domain, id) = qualified.split_once('/')?;
            (driver.as_str() == domain).then(|| self.attributes.get(id)).flatten()
        })
    }

    /// Returns true if both devices are equal apart from names, attributes and counters.
    pub(crate) fn has_same_profile(&self, other: &Self) -> bool {
        self.shared == other.shared
            && self.is_unmanaged == other.is_unmanaged
            && self.is_foreign == other.is_foreign
            && self.oversubscribed == other.oversubscribed
            && self.supports_mps == other.supports_mps
            && self.unsupported == other.unsupported
            && self.binds_to_node == other.binds_to_node
            && self.binding == other.binding
            && self.capacity == other.capacity
            && self.taints == other.taints
    }

    /// Returns the first taint with a scheduling effect that no toleration tolerates.
    pub fn untolerated_taint(&self, tolerations: &[Toleration]) -> Option<&Taint> {
        self.taints.iter().find(|taint| {
            matches!(taint.effect, TaintEffect::NoSchedule | TaintEffect::NoExecute)
                && !tolerations.iter().any(|t| t.tolerates(taint))
        })
    }
}
