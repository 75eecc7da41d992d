//! Nodes and the scheduling constraints of pods.
//!
//! Only constraints that are cheap to test and often decisive are modeled; kube-scheduler tests the
//! others.

use std::collections::BTreeMap;

use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;

use super::NameMap;

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of the node.
    pub name: NodeName,
    /// Labels of the node.
    pub labels: BTreeMap<String, String>,
    /// True if condition `Ready` is `True`.
    pub ready: bool,
    /// `spec.unschedulable`.
    pub cordoned: bool,
    /// `spec.taints`, including the taint that Kubernetes sets for `spec.unschedulable`.
    pub taints: Vec<NodeTaint>,
    /// `status.allocatable`; the key `pods` holds the number of pods.
    pub allocatable: NameMap<Quantity>,
    /// Sum of the requests of the pods that are bound to the node or expected on it.
    ///
    /// The key `pods` holds their number.
    pub used: NameMap<Quantity>,
    /// Part of [`used`](Self::used) that belongs to pods with managed devices on this node. It is
    /// released together with the devices.
    pub releasable: NameMap<Quantity>,
}

/// A node taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTaint {
    /// Taint key.
    pub key: String,
    /// Taint value; empty if none is set.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// Toleration of node taints, set in a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodToleration {
    /// Key; `None` with `Exists` tolerates every key.
    pub key: Option<String>,
    /// `Exists`, `Equal` (default), `Lt` or `Gt`.
    pub operator: Option<String>,
    /// Value to compare with.
    pub value: String,
    /// Effect; `None` tolerates every effect.
    pub effect: Option<String>,
}

impl Node {
    /// Returns the unrequested CPU of the node, in millicores.
    pub(crate) fn cpu_milli_left(&self) -> u64 {
        cpu_milli_of(&self.allocatable).saturating_sub(cpu_milli_of(&self.used))
    }

    /// Adds the requests of a pod that gets devices on this node.
    pub(crate) fn add_requests(&mut self, requests: &NameMap<Quantity>) {
        for sums in [&mut self.used, &mut self.releasable] {
            for (name, amount) in requests {
                let sum = sums.entry(name.clone()).or_default();
                *sum = sum.checked_add(*amount).unwrap_or(*sum);
            }
        }
    }
}

impl PodToleration {
    /// Returns true if it tolerates `taint` (`Toleration.ToleratesTaint` of k8s.io/api/core/v1).
    pub fn tolerates(&self, taint: &NodeTaint) -> bool {
        let effect = self.effect.as_deref().is_none_or(|e| e.is_empty() || e == taint.effect);
        let key = self.key.as_deref().is_none_or(|k| k.is_empty() || k == taint.key);
        let value = match self.operator.as_deref().unwrap_or("Equal") {
            "" | "Equal" => self.value == taint.value,
            "Exists" => true,
            // Numeric comparison of taint values is off by default in 1.37.
            _ => false,
        };
        effect && key && value
    }
}

/// `core/v1 NodeSelector`: matches if any term matches. Without terms it matches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct NodeSelector {
    /// Terms, of which one must match.
    pub terms: Vec<NodeAffinityTerm>,
}

/// A term: all requirements must match. Without requirements it matches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct NodeAffinityTerm {
    /// Requirements on labels.
    pub labels: Vec<Requirement>,
    /// Requirements on fields; only `metadata.name` exists.
    pub fields: Vec<Requirement>,
}

/// A requirement on a label or field.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Requirement {
    /// Label or field.
    pub key: String,
    /// Comparison operator.
    pub operator: SelectorOperator,
    /// Values to compare with.
    pub values: Vec<String>,
}

/// Operator of a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SelectorOperator {
    /// The key is present and its value is in the list.
    In,
    /// The key is absent or its value is not in the list.
    NotIn,
    /// The key is present.
    Exists,
    /// The key is absent.
    DoesNotExist,
    /// The value is greater than the given one, as integers.
    Gt,
    /// The value is less than the given one, as integers.
    Lt,
    /// An unknown operator of a later API version.
    Unknown,
}

/// Resource name of CPU.
const CPU: &str = "cpu";

/// Returns the CPU in a list of resources, in millicores, rounded up.
pub(crate) fn cpu_milli_of(resources: &NameMap<Quantity>) -> u64 {
    let milli = |cpu: &Quantity| {
        u64::try_from((cpu.nano().max(0) + 999_999) / 1_000_000).unwrap_or(u64::MAX)
    };
    resources.get(CPU).map_or(0, milli)
}

/// Field name of a node's name.
const NAME_FIELD: &str = tessera_api::names::NODE_NAME_FIELD;

impl NodeSelector {
    /// Creates a selector for one node by name, as in allocations of node-local devices.
    pub fn for_node(node: &NodeName) -> Self {
        let name = Requirement {
            key: NAME_FIELD.to_owned(),
            operator: SelectorOperator::In,
            values: vec![node.to_string()],
        };
        Self { terms: vec![NodeAffinityTerm { labels: Vec::new(), fields: vec![name] }] }
    }

    /// Returns the node name if the selector selects exactly one node by name.
    pub fn single_node(&self) -> Option<&str> {
        let [NodeAffinityTerm { labels, fields }] = self.terms.as_slice() else { return None };
        match (labels.as_slice(), fields.as_slice()) {
            ([], [Requirement { key, operator: SelectorOperator::In, values }])
                if key == NAME_FIELD =>
            {
                let [name] = values.as_slice() else { return None };
                Some(name)
            }
            _ => None,
        }
    }

    /// Returns true if the selector matches `node`.
    pub fn matches(&self, node: &Node) -> bool {
        self.terms.iter().any(|term| term.matches(node))
    }

    /// Returns the parse error that upstream reports for this selector, if it is invalid.
    pub fn defect(&self) -> Option<String> {
        self.terms.iter().find_map(|term| {
            let label = term.labels.iter().find_map(Requirement::defect);
            label.or_else(|| term.fields.iter().find_map(Requirement::field_defect))
        })
    }
}

impl NodeAffinityTerm {
    fn matches(&self, node: &Node) -> bool {
        if self.labels.is_empty() && self.fields.is_empty() {
            return false;
        }
        let labels =
            self.labels.iter().all(|r| r.matches(node.labels.get(&r.key).map(String::as_str)));
        let name = node.name.as_str();
        labels && self.fields.iter().all(|r| r.key == NAME_FIELD && r.matches(Some(name)))
    }
}

impl Requirement {
    fn matches(&self, value: Option<&str>) -> bool {
        let listed = || value.is_some_and(|v| self.values.iter().any(|w| w == v));
        match self.operator {
            SelectorOperator::In => listed(),
            SelectorOperator::NotIn => !listed(),
            SelectorOperator::Exists => value.is_some(),
            SelectorOperator::DoesNotExist => value.is_none(),
            SelectorOperator::Gt => self.compares(value, |v, limit| v > limit),
            SelectorOperator::Lt => self.compares(value, |v, limit| v < limit),
            SelectorOperator::Unknown => false,
        }
    }

    fn compares(&self, value: Option<&str>, holds: impl Fn(i64, i64) -> bool) -> bool {
        let parse = |text: &str| text.parse::<i64>().ok();
        match (value.and_then(parse), self.values.first().and_then(|v| parse(v))) {
            (Some(value), Some(limit)) => holds(value, limit),
            _ => false,
        }
    }

    /// Checks the rules of `labels.NewRequirement` that stored objects are known to violate.
    fn defect(&self) -> Option<String> {
        let wrong = match self.operator {
            SelectorOperator::In | SelectorOperator::NotIn => self.values.is_empty(),
            SelectorOperator::Exists | SelectorOperator::DoesNotExist => !self.values.is_empty(),
            SelectorOperator::Gt | SelectorOperator::Lt => {
                self.values.len() != 1 || self.values[0].parse::<i64>().is_err()
            }
            SelectorOperator::Unknown => true,
        };
        let bad_key = !is_label_key(&self.key);
        let bad_value = self.values.iter().any(|v| !is_label_value(v));
        (wrong || bad_key || bad_value)
            .then(|| format!("the requirement on `{}` is not valid", self.key))
    }

    fn field_defect(&self) -> Option<String> {
        let plain = matches!(self.operator, SelectorOperator::In | SelectorOperator::NotIn)
            && self.values.len() == 1;
        (!plain || self.key != NAME_FIELD)
            .then(|| format!("the requirement on field `{}` is not valid", self.key))
    }
}

fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(p, n)| (Some(p), n));
    !name.is_empty()
        && is_label_value(name)
        && prefix.is_none_or(|p| !p.is_empty() && p.len() <= 253)
}

fn is_label_value(value: &str) -> bool {
    let ends = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = value.as_bytes();
    value.is_empty()
        || (bytes.len() <= 63
            && ends(bytes.first())
            && ends(bytes.last())
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')))
}
