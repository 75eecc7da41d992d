//! Versions (k8s.io/apiserver/pkg/cel/library/semverlib.go).

use std::cmp::Ordering;
use std::sync::Arc;

use semver::Version;

use super::declaration::{Declaration, Outcome, declare};
use crate::selector::cost::Cost;
use crate::selector::value::Value;

pub(super) const FUNCTIONS: &[Declaration] = &[
    declare("semver", &["(string) semver", "(string, bool) semver"], Cost::Characters(0, 1), |a| {
        Some(parse(a)?.map(|version| Value::Semver(Arc::new(version))))
    }),
    declare("isSemver", &["(string) bool", "(string, bool) bool"], Cost::Characters(0, 1), |a| {
        Some(Ok(Value::Bool(parse(a)?.is_ok())))
    }),
    declare("major", &["semver.() int"], Cost::One, |a| number(a, |v| v.major)),
    declare("minor", &["semver.() int"], Cost::One, |a| number(a, |v| v.minor)),
    declare("patch", &["semver.() int"], Cost::One, |a| number(a, |v| v.patch)),
    declare("compareTo", &["semver.(semver) int"], Cost::One, |a| {
        order(a, |o| Value::Int(o as i64))
    }),
    declare("isGreaterThan", &["semver.(semver) bool"], Cost::One, |a| {
        order(a, |o| Value::Bool(o.is_gt()))
    }),
    declare("isLessThan", &["semver.(semver) bool"], Cost::One, |a| {
        order(a, |o| Value::Bool(o.is_lt()))
    }),
];

fn parse(a: &[Value]) -> Option<Result<Version, String>> {
    let strictly = |text: &str| Version::parse(text).map_err(|e| e.to_string());
    match a {
        [Value::String(text)] | [Value::String(text), Value::Bool(false)] => Some(strictly(text)),
        [Value::String(text), Value::Bool(true)] => {
            Some(normalized(text).and_then(|text| strictly(&text)))
        }
        _ => None,
    }
}

/// Removes a leading `v` and leading zeros, and adds missing minor and patch numbers.
fn normalized(text: &str) -> Result<String, String> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let (core, rest) = text.split_at(text.find(['-', '+']).unwrap_or(text.len()));
    let without_zeros = |part: &str| match part.trim_start_matches('0') {
        "" if !part.is_empty() => "0".to_owned(),
        trimmed => trimmed.to_owned(),
    };
    let mut parts: Vec<String> = core.splitn(3, '.').map(without_zeros).collect();
    if parts.len() < 3 && !rest.is_empty() {
        return Err("short version cannot contain PreRelease/Build meta data".to_owned());
    }
    parts.resize(3, "0".to_owned());
    Ok(format!("{}{rest}", parts.join(".")))
}

fn number(a: &[Value], part: fn(&Version) -> u64) -> Outcome {
    match a {
        [Value::Semver(version)] => {
            Some(Ok(Value::Int(i64::try_from(part(version)).unwrap_or(i64::MAX))))
        }
        _ => None,
    }
}

fn order(a: &[Value], value: fn(Ordering) -> Value) -> Outcome {
    match a {
        [Value::Semver(a), Value::Semver(b)] => Some(Ok(value(a.cmp_precedence(b)))),
        _ => None,
    }
}
