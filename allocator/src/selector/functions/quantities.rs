//! Quantities (k8s.io/apiserver/pkg/cel/library/quantity.go).

use tessera_api::quantity::Quantity;

use super::declaration::{Declaration, Outcome, declare};
use crate::selector::cost::Cost;
use crate::selector::value::Value;

pub(super) const FUNCTIONS: &[Declaration] = &[
    declare("quantity", &["(string) quantity"], Cost::Characters(0, 1), |a| match a {
        [Value::String(s)] => {
            Some(Quantity::parse(s).map(Value::Quantity).map_err(|e| e.to_string()))
        }
        _ => None,
    }),
    declare("isQuantity", &["(string) bool"], Cost::Characters(0, 1), |a| match a {
        [Value::String(s)] => Some(Ok(Value::Bool(Quantity::parse(s).is_ok()))),
        _ => None,
    }),
    declare("sign", &["(quantity) int"], Cost::One, |a| {
        of_one(a, |q| Ok(Value::Int(q.nano().signum() as i64)))
    }),
    declare("isInteger", &["quantity.() bool"], Cost::One, |a| {
        of_one(a, |q| Ok(Value::Bool(q.as_exact_i64().is_some())))
    }),
    declare("asInteger", &["quantity.() int"], Cost::One, |a| {
        of_one(a, |q| {
            q.as_exact_i64()
                .map(Value::Int)
                .ok_or_else(|| "cannot convert value to integer".to_owned())
        })
    }),
    declare("asApproximateFloat", &["quantity.() double"], Cost::One, |a| {
        of_one(a, |q| Ok(Value::Double(q.nano() as f64 / 1e9)))
    }),
    declare("compareTo", &["quantity.(quantity) int"], Cost::One, |a| {
        of_two(a, |a, b| Ok(Value::Int(a.cmp(&b) as i64)))
    }),
    declare("isGreaterThan", &["quantity.(quantity) bool"], Cost::One, |a| {
        of_two(a, |a, b| Ok(Value::Bool(a > b)))
    }),
    declare("isLessThan", &["quantity.(quantity) bool"], Cost::One, |a| {
        of_two(a, |a, b| Ok(Value::Bool(a < b)))
    }),
    declare("add", &["quantity.(quantity) quantity", "quantity.(int) quantity"], Cost::One, |a| {
        of_two(a, |a, b| in_range(a.checked_add(b)))
    }),
    declare("sub", &["quantity.(quantity) quantity", "quantity.(int) quantity"], Cost::One, |a| {
        of_two(a, |a, b| in_range(a.checked_sub(b)))
    }),
];

fn of_one(a: &[Value], f: fn(Quantity) -> Result<Value, String>) -> Outcome {
    match a {
        [Value::Quantity(q)] => Some(f(*q)),
        _ => None,
    }
}

fn of_two(a: &[Value], f: fn(Quantity, Quantity) -> Result<Value, String>) -> Outcome {
    match a {
        [Value::Quantity(a), Value::Quantity(b)] => Some(f(*a, *b)),
        // Only `add` and `sub` are declared for an int.
        [Value::Quantity(a), Value::Int(b)] => Some(f(*a, Quantity::from_integer(*b))),
        _ => None,
    }
}

fn in_range(result: Option<Quantity>) -> Result<Value, String> {
    result.map(Value::Quantity).ok_or_else(|| "the result is out of range".to_owned())
}
