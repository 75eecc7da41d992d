//! Nodes, and what pods demand of them. Only what is cheap and decides often: the rest is
//! kube-scheduler's.

use std::collections::BTreeMap;

use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Condition `Ready` is `True`.
    pub ready: bool,
    /// `spec.unschedulable`.
    pub cordoned: bool,
    /// `spec.taints` (the cordon's own taint included, as Kubernetes sets it).
    pub taints: Vec<NodeTaint>,
    /// `status.allocatable`; `pods` counts pods.
    pub allocatable: BTreeMap<String, Quantity>,
    /// Sum of the requests of the pods that are bound here or are expected to be; `pods` counts
    /// them.
    pub used: BTreeMap<String, Quantity>,
    /// What of [`used`](Self::used) is of pods that hold devices of ours here: it comes back with
    /// the devices.
    pub held: BTreeMap<String, Quantity>,
}

/// A node's taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTaint {
    /// The key.
    pub key: String,
    /// The value, empty where none is given.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// A pod's toleration of node taints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodToleration {
    /// The key; none with `Exists` tolerates every key.
    pub key: Option<String>,
    /// `Exists`, `Equal` (default), `Lt` or `Gt`.
    pub operator: Option<String>,
    /// The value.
    pub value: String,
    /// The effect; none tolerates every effect.
    pub effect: Option<String>,
}

impl Node {
    /// What is left of its CPU, in thousandths of a core.
    pub(crate) fn cpu_milli_left(&self) -> u64 {
        cpu_milli_of(&self.allocatable).saturating_sub(cpu_milli_of(&self.used))
    }

    /// Adds the requests of a pod that gets devices here to what is used.
    pub(crate) fn take(&mut self, requests: &BTreeMap<String, Quantity>) {
        for sums in [&mut self.used, &mut self.held] {
            for (name, amount) in requests {
                let sum = sums.entry(name.clone()).or_default();
                *sum = sum.checked_add(*amount).unwrap_or(*sum);
            }
        }
    }
}

impl PodToleration {
    /// Whether it tolerates `taint` (`Toleration.ToleratesTaint` of k8s.io/api/core/v1).
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

/// `core/v1 NodeSelector`: matches if any term does. No term matches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeSelector {
    /// Any of these.
    pub terms: Vec<NodeAffinityTerm>,
}

/// One term: all of its requirements. A term without requirements matches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeAffinityTerm {
    /// On labels.
    pub labels: Vec<Requirement>,
    /// On fields; only `metadata.name` exists.
    pub fields: Vec<Requirement>,
}

/// One requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The label or field.
    pub key: String,
    /// The comparison.
    pub operator: SelectorOperator,
    /// What with.
    pub values: Vec<String>,
}

/// How a requirement compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelectorOperator {
    /// Present and one of the values.
    In,
    /// Absent or none of the values.
    NotIn,
    /// Present.
    Exists,
    /// Absent.
    DoesNotExist,
    /// Present and greater than the value, as integers.
    Gt,
    /// Present and less than the value, as integers.
    Lt,
    /// An operator of the future.
    Unknown,
}

/// The resource that a node's CPU is.
const CPU: &str = "cpu";

/// The CPU of a list of resources, in thousandths of a core, rounded up.
pub(crate) fn cpu_milli_of(resources: &BTreeMap<String, Quantity>) -> u64 {
    let milli = |cpu: &Quantity| {
        u64::try_from((cpu.nano().max(0) + 999_999) / 1_000_000).unwrap_or(u64::MAX)
    };
    resources.get(CPU).map_or(0, milli)
}

/// The field that holds a node's name.
const NAME_FIELD: &str = tessera_api::names::NODE_NAME_FIELD;

impl NodeSelector {
    /// Selects one node by name, as an allocation of node-local devices does.
    pub fn of_node(node: &NodeName) -> Self {
        let name = Requirement {
            key: NAME_FIELD.to_owned(),
            operator: SelectorOperator::In,
            values: vec![node.to_string()],
        };
        Self { terms: vec![NodeAffinityTerm { labels: Vec::new(), fields: vec![name] }] }
    }

    /// The one node it selects by name, if it is of that form.
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

    /// Whether the selector selects `node`.
    pub fn matches(&self, node: &Node) -> bool {
        self.terms.iter().any(|term| term.matches(node))
    }

    /// Why upstream would refuse to parse it, if it would. Such a selector is an error and not a
    /// mismatch.
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

    /// The rules of `labels.NewRequirement`, as far as stored objects have been seen to break them.
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
