//! What can be wrong with a `GpuConfig`.

/// Why parameters are refused. Each variant names the field by its path, such as `placement.node`;
/// once it is known which of several configs it was, the path begins there (`config[2]:
/// placement.node`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a field of a GpuConfig.
    #[error("{path}: unknown field; allowed here: {allowed}")]
    UnknownField {
        /// The field.
        path: String,
        /// Fields that exist there.
        allowed: String,
    },
    /// Not a value of this field.
    #[error("{path}: unknown value {value}; allowed: {allowed}")]
    UnknownValue {
        /// The field.
        path: String,
        /// The value as JSON.
        value: String,
        /// The values it can have.
        allowed: String,
    },
    /// Not the type of this field.
    #[error("{path}: {value} is not {expected}")]
    WrongType {
        /// The field.
        path: String,
        /// The value as JSON, shortened.
        value: String,
        /// What it must be.
        expected: &'static str,
    },
    /// A field without which the rest means nothing.
    #[error("{path}: missing; it must be {expected}")]
    Missing {
        /// The field.
        path: String,
        /// What it must be.
        expected: String,
    },
    /// Said twice.
    #[error("{path}: {value} is listed twice; remove one")]
    Duplicate {
        /// The field.
        path: String,
        /// What is there twice.
        value: String,
    },
    /// A value that this version knows and does not enforce.
    #[error("{path}: {value} is not supported in this version")]
    NotSupported {
        /// The field.
        path: String,
        /// The value.
        value: String,
    },
    /// A value that cannot be together with another one.
    #[error("{path}: {value} cannot be together with {by}; use {instead}")]
    Excluded {
        /// The field.
        path: String,
        /// The value.
        value: String,
        /// The other one, with its field.
        by: &'static str,
        /// What can be.
        instead: &'static str,
    },
}

impl ConfigError {
    /// The field.
    pub fn path(&self) -> &str {
        match self {
            Self::UnknownField { path, .. }
            | Self::UnknownValue { path, .. }
            | Self::WrongType { path, .. }
            | Self::Missing { path, .. }
            | Self::Duplicate { path, .. }
            | Self::NotSupported { path, .. }
            | Self::Excluded { path, .. } => path,
        }
    }

    /// The same error, with the place of the config in front of the path.
    #[must_use]
    pub fn at(mut self, place: &str) -> Self {
        let (Self::UnknownField { path, .. }
        | Self::UnknownValue { path, .. }
        | Self::WrongType { path, .. }
        | Self::Missing { path, .. }
        | Self::Duplicate { path, .. }
        | Self::NotSupported { path, .. }
        | Self::Excluded { path, .. }) = &mut self;
        *path = format!("{place}: {path}");
        self
    }
}
