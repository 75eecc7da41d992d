//! Operators, conversions and sizes: the standard library of CEL, without times.

use std::cmp::Ordering;
use std::sync::Arc;

use super::declaration::{Declaration, Outcome, declare};
use crate::selector::cost::Cost;
use crate::selector::value::{Key, Value};

const ORDERED: &[&str] = &[
    "(bool, bool) bool",
    "(int, int) bool",
    "(int, uint) bool",
    "(int, double) bool",
    "(uint, int) bool",
    "(uint, uint) bool",
    "(uint, double) bool",
    "(double, int) bool",
    "(double, uint) bool",
    "(double, double) bool",
    "(string, string) bool",
    "(bytes, bytes) bool",
];

const NUMERIC: &[&str] = &["(int, int) int", "(uint, uint) uint", "(double, double) double"];

pub(super) const FUNCTIONS: &[Declaration] = &[
    declare("_==_", &["(A, A) bool"], Cost::Comparison, equals),
    // Values that cannot be compared are not equal.
    declare("_!=_", &["(A, A) bool"], Cost::Comparison, |a| {
        Some(Ok(Value::Bool(!a[0].equals(&a[1]))))
    }),
    declare("_<_", ORDERED, Cost::Comparison, |a| ordered(a, Ordering::is_lt)),
    declare("_<=_", ORDERED, Cost::Comparison, |a| ordered(a, Ordering::is_le)),
    declare("_>_", ORDERED, Cost::Comparison, |a| ordered(a, Ordering::is_gt)),
    declare("_>=_", ORDERED, Cost::Comparison, |a| ordered(a, Ordering::is_ge)),
    declare("_+_", NUMERIC, Cost::Concatenation, |a| {
        arithmetic(a, i64::checked_add, u64::checked_add, |a, b| a + b)
    }),
    declare(
        "_+_",
        &["(string, string) string", "(bytes, bytes) bytes", "(list(A), list(A)) list(A)"],
        Cost::Concatenation,
        concatenate,
    ),
    declare("_-_", NUMERIC, Cost::One, |a| {
        arithmetic(a, i64::checked_sub, u64::checked_sub, |a, b| a - b)
    }),
    declare("_*_", NUMERIC, Cost::One, |a| {
        arithmetic(a, i64::checked_mul, u64::checked_mul, |a, b| a * b)
    }),
    declare("_/_", NUMERIC, Cost::One, |a| {
        arithmetic(a, i64::checked_div, u64::checked_div, |a, b| a / b)
    }),
    declare("_%_", &["(int, int) int", "(uint, uint) uint"], Cost::One, modulo),
    declare("-_", &["(int) int", "(double) double"], Cost::One, negate),
    declare("!_", &["(bool) bool"], Cost::One, |a| match a {
        [Value::Bool(b)] => Some(Ok(Value::Bool(!b))),
        _ => None,
    }),
    declare("@in", &["(A, list(A)) bool", "(A, map(A, B)) bool"], Cost::Elements(1), is_in),
    declare(
        "size",
        &[
            "(string) int",
            "(bytes) int",
            "(list(A)) int",
            "(map(A, B)) int",
            "string.() int",
            "bytes.() int",
            "list(A).() int",
            "map(A, B).() int",
        ],
        Cost::One,
        size,
    ),
    declare("type", &["(A) type"], Cost::One, |a| match a {
        [value] => Some(Ok(Value::Type(value.type_name().into()))),
        _ => None,
    }),
    declare("dyn", &["(A) dyn"], Cost::One, |a| a.first().cloned().map(Ok)),
    declare("bool", &["(bool) bool", "(string) bool"], Cost::One, to_bool),
    declare("int", &["(int) int", "(uint) int", "(double) int", "(string) int"], Cost::One, to_int),
    declare(
        "uint",
        &["(int) uint", "(uint) uint", "(double) uint", "(string) uint"],
        Cost::One,
        to_uint,
    ),
    declare(
        "double",
        &["(int) double", "(uint) double", "(double) double", "(string) double"],
        Cost::One,
        to_double,
    ),
    declare("bytes", &["(bytes) bytes", "(string) bytes"], Cost::Characters(0, 1), to_bytes),
    declare(
        "string",
        &[
            "(bool) string",
            "(int) string",
            "(uint) string",
            "(double) string",
            "(string) string",
            "(bytes) string",
        ],
        Cost::One,
        to_string,
    ),
    declare("cel.@mapInsert", &["(map(A, B), A, B) map(A, B)"], Cost::One, insert_entry),
    declare("cel.@mapInsert", &["(map(A, B), map(A, B)) map(A, B)"], Cost::One, insert_entries),
];

fn equals(a: &[Value]) -> Outcome {
    let [a, b] = a else { return None };
    a.equality(b).map(|equal| Ok(Value::Bool(equal)))
}

fn ordered(a: &[Value], holds: fn(Ordering) -> bool) -> Outcome {
    let [a, b] = a else { return None };
    match a.compare(b) {
        Some(order) => Some(Ok(Value::Bool(holds(order)))),
        None if [a, b].iter().any(|v| matches!(v, Value::Double(d) if d.is_nan())) => {
            Some(Err("NaN values cannot be ordered".to_owned()))
        }
        None => None,
    }
}

fn arithmetic(
    a: &[Value],
    int: fn(i64, i64) -> Option<i64>,
    uint: fn(u64, u64) -> Option<u64>,
    double: fn(f64, f64) -> f64,
) -> Outcome {
    let overflow = || "overflow or division by zero".to_owned();
    match a {
        [Value::Int(a), Value::Int(b)] => Some(int(*a, *b).map(Value::Int).ok_or_else(overflow)),
        [Value::Uint(a), Value::Uint(b)] => {
            Some(uint(*a, *b).map(Value::Uint).ok_or_else(overflow))
        }
        [Value::Double(a), Value::Double(b)] => Some(Ok(Value::Double(double(*a, *b)))),
        _ => None,
    }
}

fn modulo(a: &[Value]) -> Outcome {
    match a {
        [Value::Double(_), _] => None,
        _ => arithmetic(a, i64::checked_rem, u64::checked_rem, |a, _| a),
    }
}

fn negate(a: &[Value]) -> Outcome {
    match a {
        [Value::Int(i)] => {
            Some(i.checked_neg().map(Value::Int).ok_or_else(|| "overflow".to_owned()))
        }
        [Value::Double(d)] => Some(Ok(Value::Double(-d))),
        _ => None,
    }
}

fn concatenate(a: &[Value]) -> Outcome {
    match a {
        [Value::String(a), Value::String(b)] => Some(Ok(Value::string(format!("{a}{b}")))),
        [Value::Bytes(a), Value::Bytes(b)] => {
            Some(Ok(Value::Bytes([&a[..], &b[..]].concat().into())))
        }
        [Value::List(a), Value::List(b)] => {
            let mut joined = Vec::with_capacity(a.len() + b.len());
            joined.extend(a.iter().chain(b.iter()).cloned());
            Some(Ok(Value::list(joined)))
        }
        _ => None,
    }
}

fn is_in(a: &[Value]) -> Outcome {
    match a {
        [value, Value::List(list)] => {
            let equalities = || list.iter().map(|element| value.equality(element));
            let found = equalities().any(|equality| equality == Some(true));
            (found || equalities().all(|equality| equality.is_some()))
                .then_some(Ok(Value::Bool(found)))
        }
        [value, Value::Map(map)] => Some(Ok(Value::Bool(map.contains(value)))),
        _ => None,
    }
}

fn size(a: &[Value]) -> Outcome {
    match a {
        [value @ (Value::String(_) | Value::Bytes(_) | Value::List(_) | Value::Map(_))] => {
            Some(Ok(Value::Int(i64::try_from(value.size()).unwrap_or(i64::MAX))))
        }
        _ => None,
    }
}

fn to_bool(a: &[Value]) -> Outcome {
    match a {
        [Value::Bool(b)] => Some(Ok(Value::Bool(*b))),
        [Value::String(s)] => Some(match &**s {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Value::Bool(true)),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Value::Bool(false)),
            other => Err(format!("`{other}` is not a bool")),
        }),
        _ => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the range is checked")]
fn to_int(a: &[Value]) -> Outcome {
    let out = || "integer overflow".to_owned();
    match a {
        [Value::Int(i)] => Some(Ok(Value::Int(*i))),
        [Value::Uint(u)] => Some(i64::try_from(*u).map(Value::Int).map_err(|_| out())),
        [Value::Double(d)] if d.abs() < 9_223_372_036_854_775_807.0 => {
            Some(Ok(Value::Int(*d as i64)))
        }
        [Value::Double(_)] => Some(Err(out())),
        [Value::String(s)] => {
            Some(s.parse().map(Value::Int).map_err(|_| format!("`{s}` is not an int")))
        }
        _ => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the range is checked")]
fn to_uint(a: &[Value]) -> Outcome {
    let out = || "unsigned integer overflow".to_owned();
    match a {
        [Value::Uint(u)] => Some(Ok(Value::Uint(*u))),
        [Value::Int(i)] => Some(u64::try_from(*i).map(Value::Uint).map_err(|_| out())),
        [Value::Double(d)] if *d >= 0.0 && *d < 18_446_744_073_709_551_615.0 => {
            Some(Ok(Value::Uint(*d as u64)))
        }
        [Value::Double(_)] => Some(Err(out())),
        [Value::String(s)] => {
            Some(s.parse().map(Value::Uint).map_err(|_| format!("`{s}` is not a uint")))
        }
        _ => None,
    }
}

fn to_double(a: &[Value]) -> Outcome {
    match a {
        [Value::Double(d)] => Some(Ok(Value::Double(*d))),
        [Value::Int(i)] => Some(Ok(Value::Double(*i as f64))),
        [Value::Uint(u)] => Some(Ok(Value::Double(*u as f64))),
        [Value::String(s)] => {
            Some(s.parse().map(Value::Double).map_err(|_| format!("`{s}` is not a double")))
        }
        _ => None,
    }
}

fn to_bytes(a: &[Value]) -> Outcome {
    match a {
        [Value::Bytes(b)] => Some(Ok(Value::Bytes(Arc::clone(b)))),
        [Value::String(s)] => Some(Ok(Value::Bytes(s.as_bytes().into()))),
        _ => None,
    }
}

fn to_string(a: &[Value]) -> Outcome {
    match a {
        [Value::Bool(b)] => Some(Ok(Value::string(b.to_string()))),
        [Value::Int(i)] => Some(Ok(Value::string(i.to_string()))),
        [Value::Uint(u)] => Some(Ok(Value::string(u.to_string()))),
        [Value::Double(d)] => Some(Ok(Value::string(d.to_string()))),
        [Value::String(s)] => Some(Ok(Value::String(Arc::clone(s)))),
        [Value::Bytes(b)] => {
            let text = std::str::from_utf8(b).map(Value::string);
            Some(text.map_err(|_| "invalid UTF-8 in bytes, cannot convert to string".to_owned()))
        }
        _ => None,
    }
}

fn insert_entry(a: &[Value]) -> Outcome {
    let [Value::Map(map), key, value] = a else { return None };
    let key = match Key::of(key) {
        Some(key) => key,
        None => return Some(Err(format!("unsupported key type: {}", key.type_name()))),
    };
    let mut map = map.as_ref().clone();
    if map.entries.insert(key, value.clone()).is_some() {
        return Some(Err("insert failed: key already exists".to_owned()));
    }
    Some(Ok(Value::Map(Arc::new(map))))
}

fn insert_entries(a: &[Value]) -> Outcome {
    let [Value::Map(map), Value::Map(more)] = a else { return None };
    let mut map = map.as_ref().clone();
    for (key, value) in &more.entries {
        if map.entries.insert(key.clone(), value.clone()).is_some() {
            return Some(Err("insert failed: key already exists".to_owned()));
        }
    }
    Some(Ok(Value::Map(Arc::new(map))))
}
