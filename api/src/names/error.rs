//! Error of a refused name.

/// Error returned for a text that is not a name of the kind: the kind, the text and the rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing was given.
    #[error("the {kind} is empty; it must be {rule}")]
    Empty {
        /// Kind of the name.
        kind: &'static str,
        /// The rule in words.
        rule: &'static str,
    },
    /// Too long.
    #[error("the {kind} `{value}` has {length} bytes, and at most {limit} are allowed")]
    TooLong {
        /// Kind of the name.
        kind: &'static str,
        /// The refused text.
        value: String,
        /// Its length in bytes.
        length: usize,
        /// The longest length allowed, in bytes.
        limit: usize,
    },
    /// Breaks the syntax.
    #[error("the {kind} `{value}` is malformed; it must be {rule}")]
    Malformed {
        /// Kind of the name.
        kind: &'static str,
        /// The refused text.
        value: String,
        /// The rule in words.
        rule: &'static str,
    },
}
