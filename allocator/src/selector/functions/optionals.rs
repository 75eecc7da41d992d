//! Optional values (cel-go's cel.OptionalTypes).

use super::declaration::{Declaration, Outcome, declare};
use crate::selector::cost::Cost;
use crate::selector::value::Value;

pub(super) const FUNCTIONS: &[Declaration] = &[
    declare("optional.of", &["(A) optional(A)"], Cost::One, |a| {
        Some(Ok(Value::some(a.first()?.clone())))
    }),
    declare("optional.ofNonZeroValue", &["(A) optional(A)"], Cost::One, |a| {
        let value = a.first()?;
        Some(Ok(if is_zero(value) { Value::Optional(None) } else { Value::some(value.clone()) }))
    }),
    declare("optional.none", &["() optional(A)"], Cost::One, |a| {
        a.is_empty().then(|| Ok(Value::Optional(None)))
    }),
    declare("hasValue", &["optional(A).() bool"], Cost::One, |a| match a {
        [Value::Optional(inner)] => Some(Ok(Value::Bool(inner.is_some()))),
        _ => None,
    }),
    declare("value", &["optional(A).() A"], Cost::One, |a| match a {
        [Value::Optional(inner)] => {
            let value = inner.as_ref().map(|value| value.as_ref().clone());
            Some(value.ok_or_else(|| "optional.none() dereference".to_owned()))
        }
        _ => None,
    }),
    // Evaluated lazily, see `Code::OrElse`; declared for their types.
    declare("or", &["optional(A).(optional(A)) optional(A)"], Cost::One, |_| None),
    declare("orValue", &["optional(A).(A) A"], Cost::One, |_| None),
    declare("optional.unwrap", &["(list(optional(A))) list(A)"], Cost::One, unwrap),
    declare("unwrapOpt", &["list(optional(A)).() list(A)"], Cost::One, unwrap),
    declare("first", &["list(A).() optional(A)"], Cost::One, |a| match a {
        [Value::List(list)] => {
            Some(Ok(list.first().cloned().map_or(Value::Optional(None), Value::some)))
        }
        _ => None,
    }),
    declare("last", &["list(A).() optional(A)"], Cost::One, |a| match a {
        [Value::List(list)] => {
            Some(Ok(list.last().cloned().map_or(Value::Optional(None), Value::some)))
        }
        _ => None,
    }),
];

fn unwrap(a: &[Value]) -> Outcome {
    let [Value::List(list)] = a else { return None };
    let mut values = Vec::new();
    for element in list.iter() {
        match element {
            Value::Optional(inner) => {
                values.extend(inner.as_ref().map(|value| value.as_ref().clone()))
            }
            other => {
                return Some(Err(format!("expected an optional but found {}", other.type_name())));
            }
        }
    }
    Some(Ok(Value::list(values)))
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(b) => !b,
        Value::Int(i) => *i == 0,
        Value::Uint(u) => *u == 0,
        Value::Double(d) => *d == 0.0,
        Value::String(s) => s.is_empty(),
        Value::Bytes(b) => b.is_empty(),
        Value::List(l) => l.is_empty(),
        Value::Map(m) => m.entries.is_empty(),
        Value::Optional(o) => o.is_none(),
        _ => false,
    }
}
