//! Functions and operators of selectors.
//!
//! They are those of the CEL environment of Kubernetes 1.37 for stored expressions
//! (k8s.io/apiserver/pkg/cel/environment/base.go).
//!
//! Times, durations, URLs, named formats and the authorizer are refused by name, since they do not
//! apply to devices.

mod declaration;
mod lists;
mod network;
mod operators;
mod optionals;
mod quantities;
mod strings;
mod versions;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::code::Code;
use super::error::SelectorError;
use super::types::Overload;
use super::value::Value;
use super::work::Work;

pub(super) use declaration::Function;

static FUNCTIONS: LazyLock<BTreeMap<&'static str, Function>> = LazyLock::new(|| {
    let libraries = [
        operators::FUNCTIONS,
        strings::FUNCTIONS,
        lists::FUNCTIONS,
        optionals::FUNCTIONS,
        quantities::FUNCTIONS,
        versions::FUNCTIONS,
        network::FUNCTIONS,
    ];
    let mut functions: BTreeMap<&'static str, Function> = BTreeMap::new();
    for declaration in libraries.into_iter().flatten() {
        let function = functions.entry(declaration.name).or_insert_with(|| Function {
            name: declaration.name,
            cost: declaration.cost,
            work: Work::of_function(declaration.name),
            overloads: Vec::new(),
            implementations: Vec::new(),
        });
        function.overloads.extend(declaration.signatures.iter().map(|s| Overload::parse(s)));
        function.implementations.push(declaration.call);
    }
    functions
});

/// Functions of upstream's environment that are not supported.
const UNSUPPORTED: &[&str] =
    &["authorizer", "duration", "format.named", "isURL", "timestamp", "url"];

/// Returns the function with this name, which includes its namespace.
///
/// # Errors
/// Returns an error if it does not exist or is not supported.
pub(super) fn find(name: &str) -> Result<&'static Function, SelectorError> {
    if let Some(function) = FUNCTIONS.get(name) {
        return Ok(function);
    }
    if UNSUPPORTED.contains(&name) || name.starts_with("format.") {
        return Err(SelectorError::unsupported(&format!("the function {name}()")));
    }
    Err(SelectorError::compile(format!("undeclared reference to '{name}'")))
}

/// Conversions, which are checked on literals before evaluation.
const CONVERSIONS: &[&str] = &["bool", "bytes", "double", "int", "string", "uint"];

/// Checks literal arguments, whose errors are known before evaluation.
///
/// # Errors
/// Returns an error if an argument is invalid.
pub(super) fn check_literals(function: &Function, arguments: &[Code]) -> Result<(), SelectorError> {
    match (function.name, arguments) {
        ("matches", [_, Code::Constant(Value::String(pattern))]) => {
            strings::regex(pattern).map(drop).map_err(SelectorError::compile)
        }
        ("format", [Code::Constant(Value::String(pattern)), Code::List(values)]) => {
            strings::check_format(pattern, values).map_err(SelectorError::compile)
        }
        (name, [Code::Constant(value)]) if CONVERSIONS.contains(&name) => {
            function.call(std::slice::from_ref(value)).map(drop).map_err(SelectorError::compile)
        }
        _ => Ok(()),
    }
}
