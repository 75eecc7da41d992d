//! Device selectors: CEL expressions over one device.
//!
//! ```text
//! expression --parse--> syntax --check--> Code --evaluate(DeviceView)--> bool | SelectorError
//!                              (macros, types)   (costs)
//! ```
//!
//! The crate `cel` parses. Checking and evaluation are implemented here, with the environment of
//! Kubernetes 1.37 for selectors and the semantics of cel-go: types are checked before evaluation,
//! logical operators absorb errors, and evaluation stops at a cost of 1,000,000.
//!
//! Times, durations, URLs and named formats are not supported, since they do not apply to devices.
//! An expression that uses them does not compile and never matches.

mod cache;
mod check;
mod code;
mod cost;
mod driver;
mod error;
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

pub use driver::DriverCondition;
pub use error::{EvaluationLimit, SelectorError};
pub(crate) use reads::{Read, Reads};
pub use view::DeviceView;

use cache::Cache;
use eval::EvalError;
use value::Value;

/// Stack size for compiling one expression, in bytes of address space. Nested operators in 10 KiB
/// of source use about a tenth.
const COMPILER_STACK: usize = 256 << 20;

/// Steps of a search charged per compiled byte: 10 KiB take about 25 ms, a step 0.5 us.
const STEPS_PER_BYTE: u64 = 5;

/// Size of a selector in bytes beyond which compiling takes more than a millisecond.
const LONG_SELECTOR: usize = 400;

/// Steps charged per compilation for starting the thread.
const STEPS_PER_PROGRAM: u64 = 200;

/// A compiled expression that can be evaluated on any device.
#[derive(Debug)]
pub struct CompiledSelector {
    checked: check::Checked,
    reads: Reads,
    drivers: DriverCondition,
}

impl CompiledSelector {
    /// Compiles `expression`, or returns the cached program.
    ///
    /// # Errors
    /// Returns an error if the expression is too long, does not compile or uses an unsupported
    /// construct.
    pub fn cached(expression: &str) -> Result<Arc<Self>, SelectorError> {
        Self::cached_in(expression, &mut 0)
    }

    /// Returns true if compiling the expression takes more than a millisecond and it is not
    /// compiled.
    pub(crate) fn is_long_and_uncompiled(expression: &str) -> bool {
        expression.len() > LONG_SELECTOR && !Cache::of_process().contains(expression)
    }

    /// Returns the steps that are charged for compiling `expression`.
    pub fn compile_steps(expression: &str) -> u64 {
        STEPS_PER_PROGRAM + (expression.len() as u64).saturating_mul(STEPS_PER_BYTE)
    }

    /// Like [`cached`](Self::cached), and charges `steps` for compiling. A cache hit is free.
    pub(crate) fn cached_in(expression: &str, steps: &mut u64) -> Result<Arc<Self>, SelectorError> {
        if let Some(known) = Cache::of_process().get(expression) {
            return known;
        }
        *steps = steps.saturating_sub(Self::compile_steps(expression));
        let compiled = Self::compile(expression).map(Arc::new);
        Cache::of_process().insert(expression, compiled.clone());
        compiled
    }

    /// Compiles an expression on a thread with a large stack.
    ///
    /// Parsing and checking recurse as deep as the expression is nested. Evaluation recurses too,
    /// but [`check`] limits its depth.
    fn compile(expression: &str) -> Result<Self, SelectorError> {
        let compiling = |expression: &str| {
            let syntax = parse::parse(expression)?;
            let checked = check::check(&syntax)?;
            let reads = Reads::of(&checked.code);
            let drivers = DriverCondition::of(&syntax);
            Ok(Self { checked, reads, drivers })
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK);
            let thread = thread.spawn_scoped(scope, || compiling(expression));
            let compiled = thread.map(std::thread::ScopedJoinHandle::join);
            compiled.unwrap_or_else(|error| {
                Ok(Err(SelectorError::compile(format!("cannot start compiler thread: {error}"))))
            })
        })
        .unwrap_or_else(|_| Err(SelectorError::compile("the parser panicked".to_owned())))
    }

    /// Returns true if the device matches.
    ///
    /// # Errors
    /// Returns an error if evaluation fails on this device or the result is not a boolean.
    pub fn matches(&self, device: &DeviceView) -> Result<bool, SelectorError> {
        self.evaluate(device).0
    }

    /// Like [`matches`](Self::matches). Also returns the work: evaluated nodes of the expression
    /// and visited elements.
    pub(crate) fn evaluate(&self, device: &DeviceView) -> (Result<bool, SelectorError>, u64) {
        let fields = match device.fields() {
            Ok(fields) => fields,
            Err(error) => return (Err(error), 0),
        };
        let (value, work) = eval::evaluate(&self.checked.code, self.checked.variables, fields);
        let selected = match value {
            Ok(Value::Bool(selected)) => Ok(selected),
            Ok(_) => Err(SelectorError::NotBoolean),
            Err(EvalError::Error(problem)) => Err(SelectorError::Runtime { problem }),
            Err(EvalError::TooExpensive(limit)) => Err(SelectorError::TooExpensive(limit)),
        };
        (selected, work)
    }

    /// Returns the properties of a device that determine the result.
    pub(crate) fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Returns the drivers whose devices the selector can match.
    pub fn drivers(&self) -> &DriverCondition {
        &self.drivers
    }

    /// Returns the approximate memory size, in bytes.
    fn bytes(&self) -> usize {
        self.checked.parts
            * (std::mem::size_of::<code::Code>() + driver::DriverCondition::BYTES_OF_PART)
    }
}
