//! Lists and sets: ext.Lists (version 3) and ext.Sets of cel-go, and the list functions of
//! Kubernetes.

use std::cmp::Ordering;

use tessera_api::quantity::Quantity;

use super::declaration::{Declaration, Outcome, declare};
use crate::selector::cost::Cost;
use crate::selector::value::Value;

/// Maximum length of `lists.range`; a selector could not iterate over more anyway.
const MAX_RANGE: i64 = 100_000;

pub(super) const FUNCTIONS: &[Declaration] = &[
    declare("sets.contains", &["(list(A), list(A)) bool"], Cost::Elements(0), |a| {
        of_sets(a, includes_all)
    }),
    declare("sets.equivalent", &["(list(A), list(A)) bool"], Cost::Elements(0), |a| {
        of_sets(a, |a, b| includes_all(a, b) && includes_all(b, a))
    }),
    declare("sets.intersects", &["(list(A), list(A)) bool"], Cost::Elements(0), |a| {
        of_sets(a, |a, b| b.iter().any(|y| a.iter().any(|x| x.equals(y))))
    }),
    declare("slice", &["list(A).(int, int) list(A)"], Cost::One, slice),
    declare(
        "flatten",
        &["list(list(A)).() list(A)", "list(dyn).(int) list(dyn)"],
        Cost::Elements(0),
        flatten,
    ),
    declare("lists.range", &["(int) list(int)"], Cost::One, |a| match a {
        [Value::Int(n)] if *n > MAX_RANGE => Some(Err(format!("lists.range({n}) is too long"))),
        [Value::Int(n)] => Some(Ok(Value::list((0..*n).map(Value::Int).collect()))),
        _ => None,
    }),
    declare("distinct", &["list(A).() list(A)"], Cost::Elements(0), distinct),
    declare("reverse", &["list(A).() list(A)"], Cost::Elements(0), |a| match a {
        [Value::List(list)] => Some(Ok(Value::list(list.iter().rev().cloned().collect()))),
        _ => None,
    }),
    declare(
        "sort",
        &[
            "list(int).() list(int)",
            "list(uint).() list(uint)",
            "list(double).() list(double)",
            "list(bool).() list(bool)",
            "list(string).() list(string)",
            "list(bytes).() list(bytes)",
        ],
        Cost::Elements(0),
        |a| match a {
            [Value::List(list)] => Some(sorted(list, list)),
            _ => None,
        },
    ),
    declare(
        "@sortByAssociatedKeys",
        &["(list(A), list(B)) list(A)"],
        Cost::Elements(0),
        |a| match a {
            [Value::List(list), Value::List(keys)] => Some(sorted(list, keys)),
            _ => None,
        },
    ),
    declare("isSorted", ORDERED_LISTS_BOOL, Cost::Elements(0), is_sorted),
    declare("min", ORDERED_LISTS, Cost::Elements(0), |a| extreme(a, Ordering::Less)),
    declare("max", ORDERED_LISTS, Cost::Elements(0), |a| extreme(a, Ordering::Greater)),
    declare(
        "sum",
        &["list(int).() int", "list(uint).() uint", "list(double).() double"],
        Cost::Elements(0),
        sum,
    ),
    declare("indexOf", &["list(A).(A) int"], Cost::Elements(0), |a| match a {
        [Value::List(list), value] => Some(Ok(position(list.iter().position(|x| x.equals(value))))),
        _ => None,
    }),
    declare("lastIndexOf", &["list(A).(A) int"], Cost::Elements(0), |a| match a {
        [Value::List(list), value] => {
            Some(Ok(position(list.iter().rposition(|x| x.equals(value)))))
        }
        _ => None,
    }),
    // An attribute with a single value may become a list later, so a value includes itself.
    declare("includes", &["list(A).(A) bool", "dyn.(dyn) bool"], Cost::Elements(0), |a| match a {
        [Value::List(list), value] => Some(Ok(Value::Bool(list.iter().any(|x| x.equals(value))))),
        [value, other] => Some(Ok(Value::Bool(value.equals(other)))),
        _ => None,
    }),
];

const ORDERED_LISTS: &[&str] = &[
    "list(int).() int",
    "list(uint).() uint",
    "list(double).() double",
    "list(bool).() bool",
    "list(string).() string",
    "list(bytes).() bytes",
];

const ORDERED_LISTS_BOOL: &[&str] = &[
    "list(int).() bool",
    "list(uint).() bool",
    "list(double).() bool",
    "list(bool).() bool",
    "list(string).() bool",
    "list(bytes).() bool",
];

fn of_sets(a: &[Value], f: fn(&[Value], &[Value]) -> bool) -> Outcome {
    match a {
        [Value::List(a), Value::List(b)] => Some(Ok(Value::Bool(f(a, b)))),
        _ => None,
    }
}

fn includes_all(outer: &[Value], inner: &[Value]) -> bool {
    inner.iter().all(|y| outer.iter().any(|x| x.equals(y)))
}

fn slice(a: &[Value]) -> Outcome {
    let [Value::List(list), Value::Int(start), Value::Int(end)] = a else { return None };
    let range = usize::try_from(*start).ok().zip(usize::try_from(*end).ok());
    let found = range.and_then(|(start, end)| list.get(start..end));
    Some(
        found
            .map(|part| Value::list(part.to_vec()))
            .ok_or_else(|| format!("cannot slice({start}, {end}), list is length {}", list.len())),
    )
}

fn flatten(a: &[Value]) -> Outcome {
    let (list, depth) = match a {
        [Value::List(list)] => (list, 1),
        [Value::List(_), Value::Int(depth)] if *depth < 0 => {
            return Some(Err("level must be non-negative".to_owned()));
        }
        [Value::List(list), Value::Int(depth)] => (list, *depth),
        _ => return None,
    };
    let mut flat = Vec::new();
    flatten_into(&mut flat, list, depth);
    Some(Ok(Value::list(flat)))
}

fn flatten_into(flat: &mut Vec<Value>, list: &[Value], depth: i64) {
    for element in list {
        match element {
            Value::List(inner) if depth > 0 => flatten_into(flat, inner, depth - 1),
            other => flat.push(other.clone()),
        }
    }
}

fn distinct(a: &[Value]) -> Outcome {
    let [Value::List(list)] = a else { return None };
    let mut found: Vec<Value> = Vec::new();
    for value in list.iter() {
        if !found.iter().any(|known| known.equals(value)) {
            found.push(value.clone());
        }
    }
    Some(Ok(Value::list(found)))
}

fn sorted(list: &[Value], keys: &[Value]) -> Result<Value, String> {
    let mut order: Vec<usize> = (0..list.len().min(keys.len())).collect();
    if let Some(wrong) = keys.windows(2).find(|pair| pair[0].compare(&pair[1]).is_none()) {
        return Err(format!(
            "list elements must have the same comparable type, not {} and {}",
            wrong[0].type_name(),
            wrong[1].type_name()
        ));
    }
    order.sort_by(|a, b| keys[*a].compare(&keys[*b]).unwrap_or(Ordering::Equal));
    Ok(Value::list(order.into_iter().map(|i| list[i].clone()).collect()))
}

fn is_sorted(a: &[Value]) -> Outcome {
    let [Value::List(list)] = a else { return None };
    let orders: Option<Vec<Ordering>> =
        list.windows(2).map(|pair| pair[0].compare(&pair[1])).collect();
    Some(
        orders
            .map(|orders| Value::Bool(orders.iter().all(|o| o.is_le())))
            .ok_or_else(|| "no such overload".to_owned()),
    )
}

fn extreme(a: &[Value], wanted: Ordering) -> Outcome {
    let [Value::List(list)] = a else { return None };
    let mut elements = list.iter();
    let Some(mut best) = elements.next() else {
        return Some(Err("min or max called on empty list".to_owned()));
    };
    for element in elements {
        match element.compare(best) {
            Some(order) if order == wanted => best = element,
            Some(_) => {}
            None => return Some(Err("no such overload".to_owned())),
        }
    }
    Some(Ok(best.clone()))
}

fn sum(a: &[Value]) -> Outcome {
    let [Value::List(list)] = a else { return None };
    let overflow = || "overflow".to_owned();
    let mut sum: Option<Value> = None;
    for element in list.iter() {
        let next = match (sum.take(), element) {
            (None, value) => value.clone(),
            (Some(Value::Int(a)), Value::Int(b)) => match a.checked_add(*b) {
                Some(sum) => Value::Int(sum),
                None => return Some(Err(overflow())),
            },
            (Some(Value::Uint(a)), Value::Uint(b)) => match a.checked_add(*b) {
                Some(sum) => Value::Uint(sum),
                None => return Some(Err(overflow())),
            },
            (Some(Value::Double(a)), Value::Double(b)) => Value::Double(a + b),
            (Some(Value::Quantity(a)), Value::Quantity(b)) => {
                Value::Quantity(a.checked_add(*b).unwrap_or(Quantity::ZERO))
            }
            _ => return Some(Err("no such overload".to_owned())),
        };
        sum = Some(next);
    }
    Some(Ok(sum.unwrap_or(Value::Int(0))))
}

fn position(found: Option<usize>) -> Value {
    Value::Int(found.and_then(|i| i64::try_from(i).ok()).unwrap_or(-1))
}
