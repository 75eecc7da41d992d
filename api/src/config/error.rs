//! Errors of a `GpuConfig`.

/// Error returned for refused parameters. Each variant names the field by its path, such as
/// `placement.node`, after the place of the config if there are several (`config[2]:
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
        /// The expected type.
        expected: &'static str,
    },
    /// A required field is missing.
    #[error("{path}: missing; it must be {expected}")]
    Missing {
        /// The field.
        path: String,
        /// The expected value.
        expected: String,
    },
    /// A value is listed twice.
    #[error("{path}: {value} is listed twice; remove one")]
    Duplicate {
        /// The field.
        path: String,
        /// The repeated value.
        value: String,
    },
    /// This version does not enforce the value.
    #[error("{path}: {value} is not supported in this version")]
    NotSupported {
        /// The field.
        path: String,
        /// The value.
        value: String,
    },
    /// The value is excluded by another one.
    #[error("{path}: {value} cannot be combined with {by}; use {instead}")]
    Excluded {
        /// The field.
        path: String,
        /// The value.
        value: String,
        /// The other one, with its field.
        by: &'static str,
        /// Allowed alternatives.
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

    /// Returns the error with `place`, the place of the config, before the path.
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
