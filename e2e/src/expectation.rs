//! Compares an expected value with an observed one.
//!
//! An object matches if each expected field matches; other fields are ignored. A list must have the
//! expected length. `null` matches a missing field. A string matches an equal string, except that
//!
//! - a string compared with a number is parsed as a quantity (`19Gi`);
//! - a string that starts with `<=`, `>=`, `<`, `>` or `!=` compares quantities with that operator;
//! - a string that starts with `~` matches if the rest occurs in the observed string.

use serde_json::Value;
use tessera_api::Quantity;

/// Returns the first difference between `expected` and `seen`; the text names the field.
///
/// # Errors
/// Returns the description of the difference.
pub fn compare(expected: &Value, seen: &Value) -> Result<(), String> {
    compare_at("", expected, seen)
}

fn compare_at(path: &str, expected: &Value, seen: &Value) -> Result<(), String> {
    match (expected, seen) {
        (Value::Object(fields), Value::Object(_)) => {
            fields.iter().try_for_each(|(name, expected)| {
                compare_at(&format!("{path}.{name}"), expected, &seen[name])
            })
        }
        (Value::Array(expected), Value::Array(seen)) if expected.len() == seen.len() => {
            let pairs = expected.iter().zip(seen).enumerate();
            pairs.into_iter().try_for_each(|(i, (expected, seen))| {
                compare_at(&format!("{path}[{i}]"), expected, seen)
            })
        }
        (Value::String(text), _) => compare_text(path, text, seen),
        _ if expected == seen => Ok(()),
        _ => Err(format!("`{}` is {seen}, expected {expected}", name(path))),
    }
}

fn name(path: &str) -> &str {
    path.strip_prefix('.').unwrap_or(path)
}

fn compare_text(path: &str, text: &str, seen: &Value) -> Result<(), String> {
    let differs = || format!("`{}` is {seen}, expected {text}", name(path));
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

type Operator = fn(std::cmp::Ordering) -> bool;

/// Comparison operators. Longer ones come first, because `<=` also starts with `<`.
const SIGNS: [(&str, Operator); 5] = [
    ("<=", std::cmp::Ordering::is_le as Operator),
    (">=", std::cmp::Ordering::is_ge as Operator),
    ("!=", std::cmp::Ordering::is_ne as Operator),
    ("<", std::cmp::Ordering::is_lt as Operator),
    (">", std::cmp::Ordering::is_gt as Operator),
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
    fn ignores_fields_without_expectation() {
        assert_eq!(compare(&json!({"a": 1}), &json!({"a": 1, "b": 2})), Ok(()));
        assert!(compare(&json!({"a": 1}), &json!({"b": 2})).is_err());
        assert_eq!(compare(&json!({"a": null}), &json!({})), Ok(()));
    }

    #[test]
    fn list_must_have_expected_length() {
        let seen = json!([{"uuid": "x", "bytes": 1}]);
        assert_eq!(compare(&json!([{"uuid": "x"}]), &seen), Ok(()));
        assert!(compare(&json!([]), &seen).is_err());
        assert!(compare(&json!([{}, {}]), &seen).is_err());
    }

    #[test]
    fn compares_quantity_with_number_exactly() {
        assert_eq!(compare(&json!("19Gi"), &json!(20_401_094_656_u64)), Ok(()));
        assert!(compare(&json!("19Gi"), &json!(20_401_094_657_u64)).is_err());
        assert_eq!(compare(&json!("> 18Gi"), &json!(20_401_094_656_u64)), Ok(()));
        assert!(compare(&json!("< 18Gi"), &json!(20_401_094_656_u64)).is_err());
        assert_eq!(compare(&json!("<=19Gi"), &json!("19456Mi")), Ok(()));
    }

    #[test]
    fn difference_names_the_field() {
        let difference =
            compare(&json!({"devices": [{"total": "19Gi"}]}), &json!({"devices": [{"total": 5}]}));
        assert_eq!(difference.unwrap_err(), "`devices[0].total` is 5, expected 19Gi");
    }

    #[test]
    fn tilde_matches_substring() {
        assert_eq!(compare(&json!("~ H100"), &json!("NVIDIA H100 80GB")), Ok(()));
        assert!(compare(&json!("~ A100"), &json!("NVIDIA H100 80GB")).is_err());
        assert!(compare(&json!("H100"), &json!("NVIDIA H100 80GB")).is_err());
    }
}
