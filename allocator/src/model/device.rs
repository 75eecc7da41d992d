//! Slices and devices.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use tessera_api::names::{DeviceName, DriverName, NodeName, PoolName};
use tessera_api::quantity::Quantity;

use super::node::NodeSelector;
use crate::selector::DeviceView;

/// Feature name in [`Device::unsupported`]: the device takes CPU, memory or other resources of its
/// node.
pub const NODE_ALLOCATABLE: &str = "node allocatable resources";

/// A pool: devices of one driver that are published together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId {
    /// The driver.
    pub driver: DriverName,
    /// The pool.
    pub pool: PoolName,
}

/// A device, anywhere in the cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// Its pool.
    pub pool: PoolId,
    /// Its name, unique in the pool.
    pub device: DeviceName,
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.pool.driver, self.pool.pool, self.device)
    }
}

/// One published ResourceSlice.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The object's name.
    pub name: String,
    /// Driver and pool.
    pub pool: PoolId,
    /// The pool's generation; only the highest counts.
    pub generation: i64,
    /// How many slices make the pool complete.
    pub slice_count: i64,
    /// Its place in the list that upstream's allocator is given, where that is known. It decides
    /// only where slices of one generation disagree in how many they are: upstream goes by the
    /// first. Unknown: such slices are waited for.
    pub listed: Option<usize>,
    /// From where the devices can be used.
    pub nodes: NodeChoice,
    /// The devices, in published order. Empty where the slice carries shared counters.
    pub devices: Vec<Arc<Device>>,
    /// `sharedCounters`: what partitions of one piece of hardware draw on. Devices of other slices
    /// of the pool name them.
    pub counter_sets: Vec<CounterSet>,
    /// The slice has something in it that makes upstream ignore it with the default features.
    pub ignored: bool,
}

/// A set of counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterSet {
    /// Its name, unique in the pool.
    pub name: String,
    /// What there is of each counter.
    pub counters: BTreeMap<String, Quantity>,
}

/// What a device takes of a counter set while it is allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterUse {
    /// The set.
    pub set: String,
    /// How much of each of its counters.
    pub counters: BTreeMap<String, Quantity>,
}

/// Conditions that somebody sets on the claim before its pod can be bound (KEP-5007).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Binding {
    /// All of them must be true.
    pub conditions: Vec<String>,
    /// None of them may be.
    pub failure_conditions: Vec<String>,
}

/// From which nodes a slice or device can be used.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeChoice {
    /// This node only.
    Node(NodeName),
    /// All of them.
    All,
    /// Those that match.
    Selector(NodeSelector),
    /// Each device says for itself (slices only).
    PerDevice,
    /// Something we do not know: reachable from nowhere.
    Unknown,
}

/// One device. Built once for each change of its slice.
#[derive(Debug, Clone)]
pub struct Device {
    /// Name, unique in its pool.
    pub name: DeviceName,
    /// Attributes by the name they are published under (with or without a domain).
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by the name they are published under.
    pub capacity: BTreeMap<String, Capacity>,
    /// `allowMultipleAllocations`: takes any number of claims up to its capacity.
    pub shared: bool,
    /// Taints, without the fence that only tells kube-scheduler to keep away.
    pub taints: Vec<Taint>,
    /// From where it can be used, in slices with per-device node selection.
    pub nodes: NodeChoice,
    /// An allocation of it pins the claim to the chosen node.
    pub binds_to_node: bool,
    /// The device is not behind our fence: somebody else may hand it out, so we never do.
    pub foreign: bool,
    /// It publishes more memory than it has: only for claims whose memory may spill to the host.
    pub oversubscribed: bool,
    /// Claims can share it by MPS.
    pub mps: bool,
    /// What it takes of the counter sets of its pool.
    pub consumes: Vec<CounterUse>,
    /// `bindingConditions` and `bindingFailureConditions`, where the former are given.
    pub binding: Option<Arc<Binding>>,
    /// A feature that this version cannot account for: never allocated.
    pub unsupported: Option<&'static str>,
    /// The device as selectors see it, made when the first selector asks.
    pub view: OnceLock<DeviceView>,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Attribute {
    /// `bool`
    Bool(bool),
    /// `int`
    Int(i64),
    /// `string`
    String(Arc<str>),
    /// `version`: semver text as published; compared as text, since semver has one spelling per
    /// version.
    Version(Arc<str>),
    /// A list (alpha in 1.37): selectors see it; to a constraint it is a value that equals nothing.
    List(Vec<Attribute>),
    /// A type of the future: no selector can be evaluated on its device.
    Unknown,
}

/// A capacity and how it may be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacity {
    /// All of it, in the capacity's unit (`memory`: bytes, `cores`: percent).
    pub value: Quantity,
    /// Rules for requests, on shared devices.
    pub policy: Option<RequestPolicy>,
}

/// How much of a capacity a request may take.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestPolicy {
    /// Taken when the request does not say.
    pub default: Option<Quantity>,
    /// Round up to one of these.
    pub valid_values: Vec<Quantity>,
    /// Round up into this range.
    pub valid_range: Option<ValidRange>,
}

/// A range of valid amounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidRange {
    /// The least amount; less is rounded up to it. The API requires it.
    pub min: Option<Quantity>,
    /// The most.
    pub max: Option<Quantity>,
    /// Amounts are `min` plus a multiple of this.
    pub step: Option<Quantity>,
}

/// A device taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// The key.
    pub key: String,
    /// The value, empty where none is given.
    pub value: String,
    /// What it does.
    pub effect: TaintEffect,
}

/// What a device taint does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaintEffect {
    /// Keeps new claims away.
    NoSchedule,
    /// Keeps new claims away and evicts pods.
    NoExecute,
    /// `None` or unknown: nothing.
    Other(String),
}

impl TaintEffect {
    /// The effect as the API spells it.
    pub fn as_str(&self) -> &str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
            Self::Other(text) => text,
        }
    }
}

/// A request's toleration of device taints.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Toleration {
    /// The key; none with `Exists` tolerates every key.
    pub key: Option<String>,
    /// How the value is compared.
    pub operator: TolerationOperator,
    /// The value for `Equal`.
    pub value: String,
    /// The effect; none tolerates every effect.
    pub effect: Option<String>,
}

/// How a toleration compares values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TolerationOperator {
    /// The value must be equal (the default).
    Equal,
    /// Any value.
    Exists,
    /// An operator of the future: tolerates nothing.
    Unknown,
}

impl Toleration {
    /// Whether it tolerates `taint` (`ToleratesTaint` of
    /// k8s.io/dynamic-resource-allocation/resourceclaim).
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
    /// Whether we may hand it out at all: it is behind our fence, and nothing of it is beyond this
    /// version.
    pub(crate) fn is_ours(&self) -> bool {
        !self.foreign && self.unsupported.is_none()
    }

    /// A device without attributes, capacities or taints, usable from wherever its slice is.
    pub fn new(name: DeviceName) -> Self {
        Self {
            name,
            attributes: BTreeMap::new(),
            capacity: BTreeMap::new(),
            shared: false,
            taints: Vec::new(),
            nodes: NodeChoice::Unknown,
            binds_to_node: false,
            foreign: false,
            oversubscribed: false,
            mps: false,
            consumes: Vec::new(),
            binding: None,
            unsupported: None,
            view: OnceLock::new(),
        }
    }

    /// The attribute of a fully qualified name; a bare name belongs to `driver`.
    pub fn attribute(&self, driver: &DriverName, qualified: &str) -> Option<&Attribute> {
        self.attributes.get(qualified).or_else(|| {
            let (domain, id) = qualified.split_once('/')?;
            (driver.as_str() == domain).then(|| self.attributes.get(id)).flatten()
        })
    }

    /// Whether the two offer the same to anybody who does not look at names, attributes and
    /// counters.
    pub(crate) fn same_offer(&self, other: &Self) -> bool {
        self.shared == other.shared
            && self.foreign == other.foreign
            && self.oversubscribed == other.oversubscribed
            && self.mps == other.mps
            && self.unsupported == other.unsupported
            && self.binds_to_node == other.binds_to_node
            && self.binding == other.binding
            && self.capacity == other.capacity
            && self.taints == other.taints
    }

    /// The first taint that no toleration tolerates and that keeps new claims away.
    pub fn untolerated_taint(&self, tolerations: &[Toleration]) -> Option<&Taint> {
        self.taints.iter().find(|taint| {
            matches!(taint.effect, TaintEffect::NoSchedule | TaintEffect::NoExecute)
                && !tolerations.iter().any(|t| t.tolerates(taint))
        })
    }
}
