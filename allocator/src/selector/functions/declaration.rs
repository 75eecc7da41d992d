//! Declarations of functions and their overloads.

use crate::selector::cost::Cost;
use crate::selector::types::Overload;
use crate::selector::value::Value;
use crate::selector::work::Work;

/// Result of an implementation; `None` if it does not accept arguments of these types.
pub(in crate::selector) type Outcome = Option<Result<Value, String>>;

/// Implementation of a function.
pub(super) type Implementation = fn(&[Value]) -> Outcome;

/// Declaration of a function by a library. Several libraries can add overloads to one name.
pub(in crate::selector) struct Declaration {
    pub(super) name: &'static str,
    pub(super) signatures: &'static [&'static str],
    pub(super) cost: Cost,
    pub(super) call: Implementation,
}

/// Declares a function of a library.
pub(super) const fn declare(
    name: &'static str,
    signatures: &'static [&'static str],
    cost: Cost,
    call: Implementation,
) -> Declaration {
    Declaration { name, signatures, cost, call }
}

/// A function with all its overloads.
#[derive(Debug)]
pub(in crate::selector) struct Function {
    pub(in crate::selector) name: &'static str,
    pub(in crate::selector) cost: Cost,
    pub(in crate::selector) work: Work,
    pub(super) overloads: Vec<Overload>,
    pub(super) implementations: Vec<Implementation>,
}

impl Function {
    pub(in crate::selector) fn overloads(&self) -> &[Overload] {
        &self.overloads
    }

    /// Calls the function; the target comes first.
    ///
    /// # Errors
    /// Returns the message of the failed call.
    pub(in crate::selector) fn call(&self, arguments: &[Value]) -> Result<Value, String> {
        let outcome =
            self.implementations.iter().find_map(|implementation| implementation(arguments));
        outcome.unwrap_or_else(|| {
            let types: Vec<&str> = arguments.iter().map(Value::type_name).collect();
            Err(format!("no such overload: {}({})", self.name, types.join(", ")))
        })
    }
}
