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

/// Model of the work of a function.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// The size of the arguments.
    Arguments,
    /// The size of the arguments with nested values.
    Nested,
    /// A search for a part of a text; of a list, the size with nested values.
    IndexOf,
    /// Each element of a list compared with each of another one.
    Pairs,
    /// Each element of a list compared with the others.
    Distinct,
    /// A text in which parts are replaced.
    Replace,
    /// Elements of a list with separators.
    Join,
    /// A regular expression.
    Regex,
}

impl Work {
    /// Returns the model of the function with this name.
    pub(super) fn of_function(name: &str) -> Self {
        match name {
            "indexOf" | "lastIndexOf" => Self::IndexOf,
            "_==_" | "_!=_" | "@in" | "includes" | "flatten" | "format" => Self::Nested,
            "sets.contains" | "sets.equivalent" | "sets.intersects" => Self::Pairs,
            "distinct" => Self::Distinct,
            "replace" => Self::Replace,
            "join" => Self::Join,
            "matches" | "find" | "findAll" => Self::Regex,
            _ => Self::Arguments,
        }
    }

    /// Returns an upper bound of the work of a call.
    pub(super) fn of(self, arguments: &[Value]) -> u64 {
        let nested = || arguments.iter().map(weight).fold(0, u64::saturating_add);
        match (self, arguments) {
            (Self::IndexOf, [Value::String(text), Value::String(part), ..]) => {
                product(text.len(), part.len() as u64)
            }
            (Self::Nested | Self::IndexOf, _) => nested(),
            (Self::Pairs, [Value::List(a), b]) => product(a.len(), weight(b)).saturating_mul(2),
            (Self::Distinct, [list @ Value::List(elements)]) => {
                product(elements.len(), weight(list))
            }
            (Self::Replace, [Value::String(text), Value::String(old), Value::String(new), ..]) => {
                product(text.len() / old.len().max(1) + 1, new.len() as u64)
                    .saturating_add(text.len() as u64)
            }
            (Self::Join, [list @ Value::List(elements), separators @ ..]) => {
                let separators = separators.iter().map(|s| product(elements.len(), weight(s)));
                separators.fold(weight(list), u64::saturating_add)
            }
            (Self::Regex, _) => REGEX + arguments.iter().map(extent).sum::<u64>(),
            _ => arguments.iter().map(extent).sum(),
        }
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
