//! Why a name was refused.

/// A text that is not a name of the wanted kind: which kind, the text, and the rule it breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing was given.
    #[error("the {kind} is empty; it must be {rule}")]
    Empty {
        /// What was being named.
        kind: &'static str,
        /// The rule in words.
        rule: &'static str,
    },
    /// Too long.
    #[error("the {kind} `{value}` has {length} bytes, and at most {limit} are allowed")]
    TooLong {
        /// What was being named.
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
        /// What was being named.
        kind: &'static str,
        /// The refused text.
        value: String,
        /// The rule in words.
        rule: &'static str,
    },
}
