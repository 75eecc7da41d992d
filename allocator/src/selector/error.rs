//! Errors of selectors.

use super::{cost, work};

/// Maximum length of an error message, in bytes: the parser can report one error per byte.
const MAX_PROBLEM_BYTES: usize = 512;

/// Error in compiling or evaluating a selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The expression is not valid CEL, or refers to an undeclared name.
    #[error("the expression does not compile: {problem}")]
    Compile {
        /// Message of the parser or the checker.
        problem: String,
    },
    /// The expression is valid upstream but uses an unsupported construct.
    #[error("the expression uses {construct}, which is not supported in this version")]
    Unsupported {
        /// Name of the construct.
        construct: String,
    },
    /// Evaluation failed on a device, for example on a missing attribute.
    #[error(
        "evaluation failed: {problem}; test for presence with has() or use .?attribute.orValue(...)"
    )]
    Runtime {
        /// Message of the interpreter.
        problem: String,
    },
    /// Evaluation on a device exceeded a limit, at which it stops.
    #[error("evaluation on a device {0}; iterate over fewer elements")]
    TooExpensive(EvaluationLimit),
    /// The result is not a boolean.
    #[error("the result of the expression is not a boolean")]
    NotBoolean,
    /// A version attribute of the device is not a semantic version.
    #[error("version attribute `{attribute}` of the device is not a semantic version: `{value}`")]
    BadVersion {
        /// Attribute name.
        attribute: String,
        /// Attribute value.
        value: String,
    },
}

/// A limit of the evaluation on one device. Its text says that it is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EvaluationLimit {
    /// Cost in units of cel-go, as upstream limits it.
    #[error("costs more than the limit of {limit} CEL cost units", limit = cost::LIMIT)]
    Cost,
    /// Work of the planner, which CEL costs do not count.
    #[error("takes more than the limit of {limit} steps", limit = work::LIMIT)]
    Work,
}

impl SelectorError {
    pub(super) fn compile(mut problem: String) -> Self {
        problem.truncate(problem.floor_char_boundary(MAX_PROBLEM_BYTES));
        Self::Compile { problem }
    }

    pub(super) fn unsupported(construct: &str) -> Self {
        Self::Unsupported { construct: construct.to_owned() }
    }
}
