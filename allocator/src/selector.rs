//! Selectors: CEL over one device.
//!
//! ```text
//! expression --parse--> syntax --check--> Code --evaluate(DeviceView)--> bool | SelectorError
//!                              (macros, types)   (costs)
//! ```
//!
//! The crate `cel` parses; checking and evaluating are our own, with the environment that
//! Kubernetes 1.37 gives to selectors and cel-go's semantics: types are checked before anything is
//! evaluated, logical operators absorb errors, and evaluation ends at the cost limit of a million.
//!
//! Times and durations, URLs and named formats say nothing about devices and are left out: an
//! expression with one of them does not compile and never matches.

mod cache;
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

use std::sync::Arc;

use tessera_api::names::DRIVER_NAME;

pub use driver::Drivers;
pub(crate) use reads::{Read, Reads};
pub use view::DeviceView;

use cache::Cache;
use eval::Fault;
use value::Value;

/// Bytes of address space for compiling one expression: 10 KiB of operators, one nested in the
/// other, take about a tenth.
const COMPILER_STACK: usize = 256 << 20;

/// Steps of a search that compiling one byte counts as: 10 KiB take about 25 ms, and a step .5 us.
const STEPS_PER_BYTE: u64 = 5;

/// Steps that compiling counts as besides: for the thread.
const STEPS_PER_PROGRAM: u64 = 200;

/// Bytes of the message of an error that are kept: the parser may have one for each byte of an
/// expression.
const MAX_PROBLEM_BYTES: usize = 512;

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
    #[error(
        "evaluation failed: {problem}; test for presence with has() or use .?attribute.orValue(...)"
    )]
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
    fn compile(mut problem: String) -> Self {
        problem.truncate(problem.floor_char_boundary(MAX_PROBLEM_BYTES));
        Self::Compile { problem }
    }

    fn unsupported(construct: &str) -> Self {
        Self::Unsupported { construct: construct.to_owned() }
    }
}

/// An expression, ready to be evaluated on any number of devices.
#[derive(Debug)]
pub struct CompiledSelector {
    checked: check::Checked,
    reads: Reads,
    drivers: Drivers,
}

impl CompiledSelector {
    /// Compiles `expression`, or takes it from those compiled before.
    ///
    /// # Errors
    /// The expression is too long, does not compile or uses what we do not know.
    pub fn cached(expression: &str) -> Result<Arc<Self>, SelectorError> {
        Self::cached_in(expression, &mut 0)
    }

    /// As [`cached`](Self::cached); compiling takes of `steps`, a look-up does not.
    pub(crate) fn cached_in(expression: &str, steps: &mut u64) -> Result<Arc<Self>, SelectorError> {
        if let Some(known) = Cache::of_process().get(expression) {
            return known;
        }
        let bytes = expression.len() as u64;
        *steps = steps.saturating_sub(STEPS_PER_PROGRAM + bytes.saturating_mul(STEPS_PER_BYTE));
        let compiled = Self::compile(expression).map(Arc::new);
        Cache::of_process().insert(expression, compiled.clone());
        compiled
    }

    /// Parsing and checking recurse as deep as the expression is nested, which is for its author to
    /// choose: they have a stack of their own. Evaluation recurses too, but only over what
    /// [`check`] has found shallow enough.
    fn compile(expression: &str) -> Result<Self, SelectorError> {
        let compiling = |expression: &str| {
            let syntax = parse::parse(expression)?;
            let checked = check::check(&syntax)?;
            let reads = Reads::of(&checked.code);
            let drivers = Drivers::of(&syntax, DRIVER_NAME);
            Ok(Self { checked, reads, drivers })
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

    /// Devices of which drivers can be selected at all.
    pub fn drivers(&self) -> Drivers {
        self.drivers
    }

    /// Memory that the selector takes, in bytes, roughly.
    fn bytes(&self) -> usize {
        self.checked.parts * std::mem::size_of::<code::Code>()
    }
}
