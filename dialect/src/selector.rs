//! CEL expressions that select GPUs by product name and UUID.

use serde_json::Value;
use tessera_api::names::DRIVER_NAME;
use tessera_api::names::attribute::{PRODUCT_NAME, PROFILE, UUID};

/// Longest CEL expression of a device selector, in bytes
/// (`CELSelectorExpressionMaxLength` of `resource.k8s.io/v1`).
pub(crate) const MAX_EXPRESSION: usize = 10 * 1024;

/// Text of a GPU that is searched for parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Text {
    /// Product name with `NVIDIA-` in front if it does not begin with `NVIDIA`.
    PrefixedType,
    /// `NVIDIA-` and the product name.
    AlwaysPrefixedType,
    /// Product name.
    Product,
    /// UUID.
    Uuid,
}

const PREFIX: &str = "NVIDIA-";

impl Text {
    /// Returns an expression that is true if the text contains `part`, without regard to case.
    fn contains(self, part: &str) -> String {
        let upper = part.to_ascii_uppercase();
        let text = match self {
            // A part that cannot reach into the prefix needs none.
            Self::PrefixedType | Self::AlwaysPrefixedType if !reaches_into_prefix(&upper) => {
                attribute(PRODUCT_NAME)
            }
            Self::PrefixedType => {
                let name = attribute(PRODUCT_NAME);
                format!(r#"({name}.startsWith("NVIDIA") ? {name} : "{PREFIX}" + {name})"#)
            }
            Self::AlwaysPrefixedType => format!(r#"("{PREFIX}" + {})"#, attribute(PRODUCT_NAME)),
            Self::Product => attribute(PRODUCT_NAME),
            Self::Uuid => attribute(UUID),
        };
        format!("{text}.upperAscii().contains({})", quoted(&upper))
    }
}

/// Returns an expression that is true if the text contains one of the parts.
pub(crate) fn contains_one(text: Text, parts: &[&str]) -> String {
    joined(parts.iter().map(|part| text.contains(part)), " || ")
}

/// Returns an expression that is true if the text contains none of the parts.
pub(crate) fn contains_none(text: Text, parts: &[&str]) -> String {
    joined(parts.iter().map(|part| format!("!{}", text.contains(part))), " && ")
}

/// Returns an expression that is true for the GPUs of these UUIDs.
pub(crate) fn is_one_of(uuids: &[&str]) -> String {
    format!("{} in {}", attribute(UUID), Value::from(uuids))
}

/// Returns an expression that is true for all GPUs but those of these UUIDs.
pub(crate) fn is_none_of(uuids: &[&str]) -> String {
    format!("!({})", is_one_of(uuids))
}

/// Returns an expression that is true for MIG devices of a profile.
pub(crate) fn is_mig_profile(profile: &str) -> String {
    format!("{} == {}", attribute(PROFILE), quoted(profile))
}

fn attribute(name: &str) -> String {
    format!(r#"device.attributes["{DRIVER_NAME}"].{name}"#)
}

fn joined(parts: impl Iterator<Item = String>, operator: &str) -> String {
    parts.collect::<Vec<_>>().join(operator)
}

/// Returns the text as a CEL string, whose escapes include those of JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn reaches_into_prefix(upper: &str) -> bool {
    upper.contains('-') || PREFIX.contains(upper)
}
