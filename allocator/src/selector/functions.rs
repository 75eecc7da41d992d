//! The functions and operators that selectors can call: what Kubernetes' CEL environment of 1.37
//! has for stored expressions (k8s.io/apiserver/pkg/cel/environment/base.go).
//!
//! Left out, and refused by name: times and durations, URLs, named formats and the authorizer,
//! which say nothing about devices.

mod lists;
mod network;
mod operators;
mod optionals;
mod quantities;
mod strings;
mod versions;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::SelectorError;
use super::code::Code;
use super::cost::Cost;
use super::types::Overload;
use super::value::Value;

/// What a function gives: none if it is not for arguments of these types.
pub(super) type Outcome = Option<Result<Value, String>>;

type Implementation = fn(&[Value]) -> Outcome;

/// A function as its library declares it. Libraries may add overloads to one name.
pub(super) struct Declaration {
    name: &'static str,
    signatures: &'static [&'static str],
    cost: Cost,
    call: Implementation,
}

const fn declare(
    name: &'static str,
    signatures: &'static [&'static str],
    cost: Cost,
    call: Implementation,
) -> Declaration {
    Declaration { name, signatures, cost, call }
}

/// A function with all its overloads.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: &'static str,
    pub(super) cost: Cost,
    overloads: Vec<Overload>,
    implementations: Vec<Implementation>,
}

impl Function {
    pub(super) fn overloads(&self) -> &[Overload] {
        &self.overloads
    }

    /// Calls it; what it is called on comes first.
    ///
    /// # Errors
    /// What went wrong.
    pub(super) fn call(&self, arguments: &[Value]) -> Result<Value, String> {
        let outcome =
            self.implementations.iter().find_map(|implementation| implementation(arguments));
        outcome.unwrap_or_else(|| {
            let types: Vec<&str> = arguments.iter().map(Value::type_name).collect();
            Err(format!("no such overload: {}({})", self.name, types.join(", ")))
        })
    }
}

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
            overloads: Vec::new(),
            implementations: Vec::new(),
        });
        function.overloads.extend(declaration.signatures.iter().map(|s| Overload::parse(s)));
        function.implementations.push(declaration.call);
    }
    functions
});

/// Functions of upstream's environment that are left out.
const LEFT_OUT: &[&str] = &["authorizer", "duration", "format.named", "isURL", "timestamp", "url"];

/// The function of that name; its namespace belongs to the name.
///
/// # Errors
/// There is none, or it is one of those left out.
pub(super) fn find(name: &str) -> Result<&'static Function, SelectorError> {
    if let Some(function) = FUNCTIONS.get(name) {
        return Ok(function);
    }
    if LEFT_OUT.contains(&name) || name.starts_with("format.") {
        return Err(SelectorError::unsupported(&format!("the function {name}()")));
    }
    Err(SelectorError::compile(format!("undeclared reference to '{name}'")))
}

/// Conversions of literals are made before anything is evaluated.
const CONVERSIONS: &[&str] = &["bool", "bytes", "double", "int", "string", "uint"];

/// Checks literal arguments, which cannot become right at run time.
///
/// # Errors
/// One is wrong.
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
