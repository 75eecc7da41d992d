//! Comparing what is expected with what was seen.
//!
//! An object holds if each of its fields does, others may be there; a list must have the same
//! length. `null` stands for "not there". A text is compared as such, except
//!
//! - against a number: then it is a quantity (`19Gi`);
//! - where it starts with `<=`, `>=`, `<`, `>` or `!=`: then the rest is compared in that way;
//! - where it starts with `~`: then the rest must occur in the text seen.

use serde_json::Value;
use tessera_api::Quantity;

/// Finds the first difference; the text names its place.
///
/// # Errors
/// The difference.
pub fn compare(expected: &Value, seen: &Value) -> Result<(), String> {
    at("", expected, seen)
}

fn at(place: &str, expected: &Value, seen: &Value) -> Result<(), String> {
    match (expected, seen) {
        (Value::Object(fields), Value::Object(_)) => fields
            .iter()
            .try_for_each(|(name, expected)| at(&format!("{place}.{name}"), expected, &seen[name])),
        (Value::Array(expected), Value::Array(seen)) if expected.len() == seen.len() => {
            let pairs = expected.iter().zip(seen).enumerate();
            pairs
                .into_iter()
                .try_for_each(|(i, (expected, seen))| at(&format!("{place}[{i}]"), expected, seen))
        }
        (Value::String(text), _) => text_holds(place, text, seen),
        _ if expected == seen => Ok(()),
        _ => Err(format!("`{}` is {seen}, expected {expected}", name(place))),
    }
}

fn name(place: &str) -> &str {
    place.strip_prefix('.').unwrap_or(place)
}

fn text_holds(place: &str, text: &str, seen: &Value) -> Result<(), String> {
    let differs = || format!("`{}` is {seen}, expected {text}", name(place));
    if let Some(part) = text.strip_prefix('~') {
        let holds = seen.as_str().is_some_and(|seen| seen.contains(part.trim_start()));
        return if holds { Ok(()) } else { Err(differs()) };
    }
    for (sign, holds) in SIGNS {
        if let Some(rest) = text.strip_prefix(sign) {
            let seen = amount(seen).ok_or_else(differs)?;
            let wanted =
                Quantity::parse(rest.trim()).map_err(|error| format!("`{text}`: {error}"))?;
            return if holds(seen.cmp(&wanted)) { Ok(()) } else { Err(differs()) };
        }
    }
    let holds = match seen {
        Value::String(seen) => seen == text,
        Value::Number(_) => amount(seen)
            .zip(Quantity::parse(text).ok())
            .is_some_and(|(seen, wanted)| seen == wanted),
        _ => false,
    };
    if holds { Ok(()) } else { Err(differs()) }
}

type Holds = fn(std::cmp::Ordering) -> bool;

/// The longer signs first: `<=` also starts with `<`.
const SIGNS: [(&str, Holds); 5] = [
    ("<=", std::cmp::Ordering::is_le as Holds),
    (">=", std::cmp::Ordering::is_ge as Holds),
    ("!=", std::cmp::Ordering::is_ne as Holds),
    ("<", std::cmp::Ordering::is_lt as Holds),
    (">", std::cmp::Ordering::is_gt as Holds),
];

fn amount(seen: &Value) -> Option<Quantity> {
    match seen {
        Value::Number(number) => Quantity::parse(&number.to_string()).ok(),
        Value::String(text) => Quantity::parse(text).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_are_not_named_may_be_anything() {
        assert_eq!(compare(&json!({"a": 1}), &json!({"a": 1, "b": 2})), Ok(()));
        assert!(compare(&json!({"a": 1}), &json!({"b": 2})).is_err());
        assert_eq!(compare(&json!({"a": null}), &json!({})), Ok(()));
    }

    #[test]
    fn a_list_has_all_of_its_elements_and_no_more() {
        let seen = json!([{"uuid": "x", "bytes": 1}]);
        assert_eq!(compare(&json!([{"uuid": "x"}]), &seen), Ok(()));
        assert!(compare(&json!([]), &seen).is_err());
        assert!(compare(&json!([{}, {}]), &seen).is_err());
    }

    #[test]
    fn a_quantity_is_compared_with_a_number_exactly() {
        assert_eq!(compare(&json!("19Gi"), &json!(20_401_094_656_u64)), Ok(()));
        assert!(compare(&json!("19Gi"), &json!(20_401_094_657_u64)).is_err());
        assert_eq!(compare(&json!("> 18Gi"), &json!(20_401_094_656_u64)), Ok(()));
        assert!(compare(&json!("< 18Gi"), &json!(20_401_094_656_u64)).is_err());
        assert_eq!(compare(&json!("<=19Gi"), &json!("19456Mi")), Ok(()));
    }

    #[test]
    fn a_difference_names_its_place() {
        let difference =
            compare(&json!({"devices": [{"total": "19Gi"}]}), &json!({"devices": [{"total": 5}]}));
        assert_eq!(difference.unwrap_err(), "`devices[0].total` is 5, expected 19Gi");
    }

    #[test]
    fn a_part_of_a_text_is_enough_where_it_says_so() {
        assert_eq!(compare(&json!("~ H100"), &json!("NVIDIA H100 80GB")), Ok(()));
        assert!(compare(&json!("~ A100"), &json!("NVIDIA H100 80GB")).is_err());
        assert!(compare(&json!("H100"), &json!("NVIDIA H100 80GB")).is_err());
    }
}
