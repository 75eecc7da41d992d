//! The inverse of decoding: parameters as JSON with the fields that are set.

use serde_json::{Map, Value, json};

use super::{
    API_VERSION, Compute, GpuConfig, KIND, Memory, MemoryPercent, Placement, TopologyTerm,
};

pub(super) fn encode(config: &GpuConfig) -> Value {
    let GpuConfig { placement, topology, exclusive, memory, compute, sharing } = config;
    let fields = [
        ("placement", self::placement(*placement)),
        ("topology", topology.as_deref().map(self::topology)),
        ("exclusive", exclusive.map(Value::from)),
        ("memory", self::memory(*memory)),
        ("compute", self::compute(*compute)),
        ("sharing", sharing.map(|sharing| sharing.word().into())),
    ];
    let mut object = Map::new();
    object.insert("apiVersion".to_owned(), API_VERSION.into());
    object.insert("kind".to_owned(), KIND.into());
    object.extend(set(fields));
    Value::Object(object)
}

fn placement(placement: Placement) -> Option<Value> {
    let Placement { node, device } = placement;
    object([
        ("node", node.map(|policy| policy.word().into())),
        ("device", device.map(|policy| policy.word().into())),
    ])
}

fn topology(terms: &[TopologyTerm]) -> Value {
    let term = |t: &TopologyTerm| json!({"scope": t.scope.word(), "mode": t.mode.word()});
    terms.iter().map(term).collect()
}

fn memory(memory: Memory) -> Option<Value> {
    let Memory { percent, limit, oversubscribe } = memory;
    object([
        ("percent", percent.map(number)),
        ("limit", limit.map(|limit| limit.to_string().into())),
        ("oversubscribe", oversubscribe.map(Value::from)),
    ])
}

fn compute(compute: Compute) -> Option<Value> {
    let Compute { policy, priority, limit } = compute;
    object([
        ("policy", policy.map(|policy| policy.word().into())),
        ("priority", priority.map(|priority| priority.word().into())),
        ("limit", limit.map(|limit| limit.get().into())),
    ])
}

/// Returns the percentage as a number: whole, or the fraction whose shortest text it is.
fn number(percent: MemoryPercent) -> Value {
    let hundredths = percent.hundredths();
    if hundredths.is_multiple_of(100) {
        (hundredths / 100).into()
    } else {
        (f64::from(hundredths) / 100.0).into()
    }
}

fn object<const N: usize>(fields: [(&'static str, Option<Value>); N]) -> Option<Value> {
    let object: Map<_, _> = set(fields).collect();
    (!object.is_empty()).then_some(Value::Object(object))
}

fn set<const N: usize>(
    fields: [(&'static str, Option<Value>); N],
) -> impl Iterator<Item = (String, Value)> {
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)))
}
