//! Actual work of an evaluation, where it exceeds the CEL cost.
//!
//! The costs of cel-go determine which devices are selected, so they are used here too. But they
//! count a list that contains another list twice as two elements, whatever a comparison costs, and
//! count a result only after it is built. On such an expression upstream's scheduler may spend
//! hours or all of its memory; the planner must not.

use super::value::Value;

/// Work limit of an evaluation on one device, in steps or created bytes; a fraction of a second.
pub(super) const LIMIT: u64 = 20_000_000;

/// Work to build a regular expression, which happens on each call.
const REGEX: u64 = 50_000;

/// Returns an upper bound of the work of a call.
pub(super) fn of_call(function: &str, arguments: &[Value]) -> u64 {
    let all = || arguments.iter().map(weight).fold(0, u64::saturating_add);
    match (function, arguments) {
        ("indexOf" | "lastIndexOf", [Value::String(text), Value::String(part), ..]) => {
            product(text.len(), part.len() as u64)
        }
        (
            "_==_" | "_!=_" | "@in" | "includes" | "indexOf" | "lastIndexOf" | "flatten" | "format",
            _,
        ) => all(),
        ("sets.contains" | "sets.equivalent" | "sets.intersects", [Value::List(a), b]) => {
            product(a.len(), weight(b)).saturating_mul(2)
        }
        ("distinct", [list @ Value::List(elements)]) => product(elements.len(), weight(list)),
        ("replace", [Value::String(text), Value::String(old), Value::String(new), ..]) => {
            product(text.len() / old.len().max(1) + 1, new.len() as u64)
                .saturating_add(text.len() as u64)
        }
        ("join", [list @ Value::List(elements), separators @ ..]) => {
            let separators = separators.iter().map(|s| product(elements.len(), weight(s)));
            separators.fold(weight(list), u64::saturating_add)
        }
        ("matches" | "find" | "findAll", _) => REGEX + arguments.iter().map(extent).sum::<u64>(),
        _ => arguments.iter().map(extent).sum(),
    }
}

/// Returns the size of the value without nested values.
pub(super) fn extent(value: &Value) -> u64 {
    let extent = match value {
        Value::String(s) => s.len(),
        Value::Bytes(b) => b.len(),
        Value::List(l) => l.len(),
        Value::Map(m) => m.entries.len(),
        _ => 0,
    };
    extent as u64
}

/// Returns the size of the value with nested values; a value contained twice counts twice. Counting
/// stops beyond the limit.
fn weight(value: &Value) -> u64 {
    let mut weight = 0;
    add_weight(value, &mut weight);
    weight
}

fn add_weight(value: &Value, sum: &mut u64) {
    let elements: &mut dyn Iterator<Item = &Value> = match value {
        Value::List(list) => &mut list.iter(),
        Value::Map(map) => &mut map.entries.values(),
        Value::Optional(inner) => &mut inner.iter().map(AsRef::as_ref),
        _ => &mut std::iter::empty(),
    };
    *sum += 1 + extent(value);
    for element in elements {
        if *sum > LIMIT {
            return;
        }
        add_weight(element, sum);
    }
}

fn product(count: usize, each: u64) -> u64 {
    each.saturating_mul(count as u64)
}
