//! Refusals of pods that cannot be converted as written.

use crate::name::Dialect;

/// Longest part of a value that a refusal repeats, in characters.
const SHOWN_VALUE: usize = 64;

/// A pod that is not converted, because a field of it has no meaning or none that Tessera enforces.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value}: {problem} (read as a pod of {dialect})")]
pub struct PodRefusal {
    /// The dialect that the field belongs to.
    pub dialect: Dialect,
    /// Path of the field from the pod's root.
    pub field: String,
    /// The value, shortened.
    pub value: String,
    /// The problem, and what is allowed.
    pub problem: String,
}

impl PodRefusal {
    pub(crate) fn new(
        dialect: Dialect,
        field: impl Into<String>,
        value: impl ToString,
        problem: impl Into<String>,
    ) -> Self {
        let value = shortened(&value.to_string());
        Self { dialect, field: field.into(), value, problem: problem.into() }
    }
}

/// Returns the text, or its beginning if it is long.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_VALUE) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
