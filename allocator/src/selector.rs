//! Selectors: CEL over one device.
//!
//! ```text
//! expression --parse--> syntax --check--> Code --evaluate(DeviceView)--> bool | SelectorError
//!                              (macros, types)   (costs)
//! ```
//!
//! The crate `cel` parses; checking and evaluating are our own, with the environment that Kubernetes 1.37 gives to selectors
//! and cel-go's semantics: types are checked before anything is evaluated, logical operators absorb errors, and evaluation ends
//! at the cost limit of a million.
//!
//! Times and durations, URLs and named formats say nothing about devices and are left out: an expression with one of them
//! does not compile and never matches.

mod check;
mod code;
mod cost;
mod driver;
mod eval;
mod functions;
mod macros;
mod parse;
mod reads;
mod types;
mod value;
mod view;
mod work;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use cel::common::ast::IdedExpr;

pub use driver::DriverVerdict;
pub(crate) use reads::{Read, Reads};
pub use view::DeviceView;

use eval::Fault;
use value::Value;

/// Bytes of address space for compiling one expression: 10 KiB of operators, one nested in the other, take about a tenth.
const COMPILER_STACK: usize = 256 << 20;

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
    /// Evaluation on a device was ended: it goes over too much.
    #[error("evaluation costs more than {limit}; go over fewer elements", limit = cost::LIMIT)]
    TooExpensive,
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
    fn compile(problem: String) -> Self {
        Self::Compile { problem }
    }

    fn unsupported(construct: &str) -> Self {
        Self::Unsupported { construct: construct.to_owned() }
    }
}

/// An expression, ready to be evaluated on any number of devices.
#[derive(Debug)]
pub struct CompiledSelector {
    syntax: IdedExpr,
    checked: check::Checked,
    reads: Reads,
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

    /// Parsing and checking recurse as deep as the expression is nested, which is for its author to choose: they have a
    /// stack of their own. Evaluation recurses too, but only over what [`check`] has found shallow enough.
    fn compile(expression: &str) -> Result<Self, SelectorError> {
        let compiling = |expression: &str| {
            let syntax = parse::parse(expression)?;
            let checked = check::check(&syntax)?;
            let reads = Reads::of(&checked.code);
            Ok(Self { syntax, checked, reads })
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK);
            let thread = thread.spawn_scoped(scope, || compiling(expression));
            let compiled = thread.map(std::thread::ScopedJoinHandle::join);
            compiled.unwrap_or_else(|error| {
                Ok(Err(SelectorError::compile(format!("no thread to compile it: {error}"))))
            })
        })
        .unwrap_or_else(|_| Err(SelectorError::compile("the parser failed on it".to_owned())))
    }

    /// Whether the device is selected.
    ///
    /// # Errors
    /// Evaluation fails on this device, or gives no boolean.
    pub fn matches(&self, device: &DeviceView) -> Result<bool, SelectorError> {
        self.evaluate(device).0
    }

    /// The same, and the work that it took: pieces of the expression and of what it went over.
    pub(crate) fn evaluate(&self, device: &DeviceView) -> (Result<bool, SelectorError>, u64) {
        let fields = match device.fields() {
            Ok(fields) => fields,
            Err(error) => return (Err(error), 0),
        };
        let (value, work) = eval::evaluate(&self.checked.code, self.checked.variables, fields);
        let selected = match value {
            Ok(Value::Bool(selected)) => Ok(selected),
            Ok(_) => Err(SelectorError::NotBoolean),
            Err(Fault::Error(problem)) => Err(SelectorError::Runtime { problem }),
            Err(Fault::TooExpensive) => Err(SelectorError::TooExpensive),
        };
        (selected, work)
    }

    /// What of a device decides.
    pub(crate) fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Whether a device of the driver `driver` can be selected at all.
    pub fn verdict_on_driver(&self, driver: &str) -> DriverVerdict {
        driver::verdict(&self.syntax, driver)
    }
}
