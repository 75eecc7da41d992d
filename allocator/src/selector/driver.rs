//! Drivers whose devices a selector can match.
//!
//! A DeviceClass does not name a driver, but its selector usually does. Analyzing the expression
//! distinguishes claims for Tessera from claims for other drivers before devices are tested, and
//! without knowing the devices of other drivers.

use cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, operators};

/// A driver that does not exist. A selector that can match its devices does not require a
/// particular driver.
const UNKNOWN_DRIVER: &str = "unknown.invalid";

/// Drivers whose devices an expression can match, whatever their attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatchableDrivers {
    /// True for the Tessera driver.
    pub tessera: bool,
    /// True for a driver that the expression does not name.
    pub unnamed: bool,
    /// True for any driver other than Tessera, named or not.
    pub other: bool,
}

/// Three-valued result; `None` depends on more than the driver.
type Truth = Option<bool>;

impl MatchableDrivers {
    /// Analyzes `expr`; `ours` is the name of the Tessera driver.
    pub(super) fn of(expr: &IdedExpr, ours: &str) -> Self {
        let may = |driver: &str| truth(expr, driver) != Some(false);
        let unnamed = may(UNKNOWN_DRIVER);
        let mut named = Vec::new();
        strings(expr, &mut named);
        let others = unnamed || named.iter().any(|name| *name != ours && may(name));
        Self { tessera: may(ours), unnamed, other: others }
    }
}

/// Collects the strings in logical operators, comparisons and calls of an expression. They include
/// all driver names, and all prefixes and suffixes, each of which matches itself.
fn strings<'e>(expr: &'e IdedExpr, found: &mut Vec<&'e str>) {
    match &expr.expr {
        Expr::Literal(LiteralValue::String(text)) => found.push(text.inner()),
        Expr::Call(call) => {
            call.target.iter().for_each(|target| strings(target, found));
            call.args.iter().for_each(|argument| strings(argument, found));
        }
        Expr::List(list) => list.elements.iter().for_each(|element| strings(element, found)),
        _ => {}
    }
}

fn truth(expr: &IdedExpr, driver: &str) -> Truth {
    match &expr.expr {
        Expr::Literal(LiteralValue::Boolean(value)) => Some(*value.inner()),
        Expr::Call(call) => call_truth(call, driver),
        _ => None,
    }
}

fn call_truth(call: &CallExpr, driver: &str) -> Truth {
    let args = call.args.as_slice();
    match (call.func_name.as_str(), args) {
        (operators::LOGICAL_NOT, [a]) => truth(a, driver).map(|t| !t),
        (operators::LOGICAL_AND, [a, b]) => match (truth(a, driver), truth(b, driver)) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (Some(true), Some(true)) => Some(true),
            _ => None,
        },
        (operators::LOGICAL_OR, [a, b]) => match (truth(a, driver), truth(b, driver)) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            _ => None,
        },
        (operators::CONDITIONAL, [condition, yes, no]) => match truth(condition, driver) {
            Some(true) => truth(yes, driver),
            Some(false) => truth(no, driver),
            None => None,
        },
        (operators::EQUALS, [a, b]) => equality(a, b, driver),
        (operators::NOT_EQUALS, [a, b]) => equality(a, b, driver).map(|t| !t),
        (operators::IN, [a, b]) if is_driver(a) => match &b.expr {
            Expr::List(list) => {
                let known: Option<Vec<&str>> = list.elements.iter().map(string).collect();
                known.map(|values| values.contains(&driver))
            }
            _ => None,
        },
        ("startsWith", [prefix]) => on_driver(call, prefix, |p| driver.starts_with(p)),
        ("endsWith", [suffix]) => on_driver(call, suffix, |s| driver.ends_with(s)),
        _ => None,
    }
}

fn equality(a: &IdedExpr, b: &IdedExpr, driver: &str) -> Truth {
    let value = if is_driver(a) {
        string(b)
    } else if is_driver(b) {
        string(a)
    } else {
        None
    };
    value.map(|v| v == driver)
}

fn on_driver(call: &CallExpr, argument: &IdedExpr, holds: impl Fn(&str) -> bool) -> Truth {
    let target = call.target.as_deref()?;
    if is_driver(target) { string(argument).map(holds) } else { None }
}

fn is_driver(expr: &IdedExpr) -> bool {
    matches!(&expr.expr, Expr::Select(select)
        if select.field == "driver" && !select.test
            && matches!(&select.operand.expr, Expr::Ident(name) if name == "device"))
}

fn string(expr: &IdedExpr) -> Option<&str> {
    match &expr.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}
