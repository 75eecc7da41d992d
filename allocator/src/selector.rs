//! Selectors: CEL over one device.
//!
//! The interpreter is the crate `cel`; this module is the only one that knows it. Around it stand the parts of the Kubernetes
//! environment that it lacks: [`quantity`](https://kubernetes.io/docs/reference/using-api/cel/) and semver values, sets,
//! `cel.bind`, and the variable `device` with its maps that answer an unknown domain with an empty map.
//!
//! ```text
//! expression --parse--> AST --check--> CompiledSelector --matches(DeviceView)--> bool | SelectorError
//! ```
//!
//! What upstream has and this does not (comprehensions over two variables, URLs, IP addresses, the list functions of
//! Kubernetes) is refused with [`SelectorError::Unsupported`]; it never counts as a match. There is no run-time cost budget;
//! instead the source is limited to 10 KiB and comprehensions to two levels.

mod check;
mod driver;
mod environment;
mod quantity;
mod semver;
mod sets;
mod view;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use cel::{Context, Program, Value};

pub use driver::DriverVerdict;
pub use view::DeviceView;

/// Upstream's limit on the length of an expression.
const MAX_EXPRESSION_BYTES: usize = 10 * 1024;

/// Compiled programs kept. A cluster has a handful of classes; beyond this the oldest half is of no use either.
const MAX_CACHED: usize = 4096;

/// Why a selector has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The expression is not valid CEL, or names something that is not there.
    #[error("the expression does not compile: {problem}")]
    Compile {
        /// What the parser or the checker says.
        problem: String,
    },
    /// Valid upstream, unknown here.
    #[error("the expression uses {construct}, which is not supported in this version")]
    Unsupported {
        /// What is used.
        construct: String,
    },
    /// Evaluation failed on a device, for example on a missing attribute.
    #[error("evaluation failed: {problem}; test for presence with has() or use .?attribute.orValue(...)")]
    Runtime {
        /// What the interpreter says.
        problem: String,
    },
    /// The result is not a boolean.
    #[error("the expression gives a value that is not a boolean")]
    NotBoolean,
    /// An attribute of the device is not semver although it is published as a version.
    #[error("the version attribute `{attribute}` of the device is not semver: `{value}`")]
    BadVersion {
        /// The attribute.
        attribute: String,
        /// Its value.
        value: String,
    },
}

impl SelectorError {
    fn unsupported(construct: &str) -> Self {
        Self::Unsupported { construct: construct.to_owned() }
    }
}

/// An expression, ready to be evaluated on any number of devices.
#[derive(Debug)]
pub struct CompiledSelector {
    program: Program,
}

type Cache = HashMap<Box<str>, Result<Arc<CompiledSelector>, SelectorError>>;

/// Programs by source. A pure function remembered, not state: the same source always gives the same entry.
static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);

impl CompiledSelector {
    /// Compiles `expression`, or takes it from those compiled before.
    ///
    /// # Errors
    /// The expression is too long, does not compile or uses what we do not know.
    pub fn cached(expression: &str) -> Result<Arc<Self>, SelectorError> {
        if let Some(known) = CACHE.lock().unwrap_or_else(PoisonError::into_inner).get(expression) {
            return known.clone();
        }
        let compiled = Self::compile(expression).map(Arc::new);
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= MAX_CACHED {
            cache.clear();
        }
        cache.insert(expression.into(), compiled.clone());
        compiled
    }

    fn compile(expression: &str) -> Result<Self, SelectorError> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            let problem = format!("it has {} bytes, the limit is {MAX_EXPRESSION_BYTES}", expression.len());
            return Err(SelectorError::Compile { problem });
        }
        let program = environment::ENVIRONMENT
            .compile(expression)
            .map_err(|errors| SelectorError::Compile { problem: errors.to_string() })?;
        check::check(program.expression())?;
        Ok(Self { program })
    }

    /// Whether the device is selected.
    ///
    /// # Errors
    /// Evaluation fails on this device, or gives no boolean.
    pub fn matches(&self, device: &DeviceView) -> Result<bool, SelectorError> {
        let variable = device.variable()?;
        let mut context = Context::with_env(Arc::clone(&environment::ENVIRONMENT));
        context.add_variable_as_val("device", variable);
        match self.program.execute(&context) {
            Ok(Value::Bool(selected)) => Ok(selected),
            Ok(_) => Err(SelectorError::NotBoolean),
            Err(error) => Err(SelectorError::Runtime { problem: error.to_string() }),
        }
    }

    /// Whether a device of the driver `driver` can be selected at all.
    pub fn verdict_on_driver(&self, driver: &str) -> DriverVerdict {
        driver::verdict(self.program.expression(), driver)
    }
}
