//! Drivers whose devices a selector can match.
//!
//! A DeviceClass does not name a driver, but its selector usually does. Analyzing the expression
//! distinguishes claims for managed drivers from claims for others before devices are tested, and
//! without knowing the devices of other drivers.

use cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, operators};

/// A driver that does not exist. A selector that can match its devices does not require a
/// particular driver.
const UNKNOWN_DRIVER: &str = "unknown.invalid";

/// The drivers whose devices an expression can match, whatever their attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverCondition {
    test: Test,
    /// Names in the expression of drivers whose devices it can match.
    named: Box<[Box<str>]>,
    matches_unnamed: bool,
}

/// The part of an expression that depends on nothing but the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    /// It depends on more than the driver.
    Unknown,
    Constant(bool),
    Not(Box<Test>),
    And(Box<(Test, Test)>),
    Or(Box<(Test, Test)>),
    Conditional(Box<(Test, Test, Test)>),
    Equals(Box<str>),
    OneOf(Box<[Box<str>]>),
    StartsWith(Box<str>),
    EndsWith(Box<str>),
}

impl DriverCondition {
    /// Memory for a part of the expression, in bytes.
    pub(super) const BYTES_OF_PART: usize = std::mem::size_of::<Test>();

    /// Analyzes an expression.
    pub(super) fn of(expr: &IdedExpr) -> Self {
        let test = test(expr);
        let may = |driver: &str| test.holds(driver) != Some(false);
        let matches_unnamed = may(UNKNOWN_DRIVER);
        let mut strings = Vec::new();
        collect_strings(expr, &mut strings);
        strings.sort_unstable();
        strings.dedup();
        let named = strings.into_iter().filter(|name| may(name)).map(Box::from).collect();
        Self { test, named, matches_unnamed }
    }

    /// Returns true if the expression can match devices of the driver.
    pub fn may_match(&self, driver: &str) -> bool {
        self.test.holds(driver) != Some(false)
    }

    /// Returns true if the expression can match devices of a driver that it does not name.
    pub fn matches_unnamed(&self) -> bool {
        self.matches_unnamed
    }

    /// Returns the strings in the expression that would be matched as names of drivers.
    pub fn named(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(Box::as_ref)
    }
}

impl Test {
    /// Returns the result for devices of the driver; `None` if it depends on more.
    fn holds(&self, driver: &str) -> Option<bool> {
        match self {
            Self::Unknown => None,
            Self::Constant(value) => Some(*value),
            Self::Not(a) => a.holds(driver).map(|holds| !holds),
            Self::And(both) => match (both.0.holds(driver), both.1.holds(driver)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (Some(true), Some(true)) => Some(true),
                _ => None,
            },
            Self::Or(both) => match (both.0.holds(driver), both.1.holds(driver)) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            },
            Self::Conditional(parts) => match parts.0.holds(driver) {
                Some(true) => parts.1.holds(driver),
                Some(false) => parts.2.holds(driver),
                None => None,
            },
            Self::Equals(name) => Some(**name == *driver),
            Self::OneOf(names) => Some(names.iter().any(|name| **name == *driver)),
            Self::StartsWith(prefix) => Some(driver.starts_with(&**prefix)),
            Self::EndsWith(suffix) => Some(driver.ends_with(&**suffix)),
        }
    }
}

/// Collects the strings in logical operators, comparisons and calls of an expression. They include
/// all driver names, and all prefixes and suffixes, each of which matches itself.
fn collect_strings<'e>(expr: &'e IdedExpr, found: &mut Vec<&'e str>) {
    match &expr.expr {
        Expr::Literal(LiteralValue::String(text)) => found.push(text.inner()),
        Expr::Call(call) => {
            call.target.iter().for_each(|target| collect_strings(target, found));
            call.args.iter().for_each(|argument| collect_strings(argument, found));
        }
        Expr::List(list) => {
            list.elements.iter().for_each(|element| collect_strings(element, found))
        }
        _ => {}
    }
}

/// Returns the part of the expression that depends on nothing but the driver. Parts without any are
/// joined, so that the test is not larger than what it tests.
fn test(expr: &IdedExpr) -> Test {
    match &expr.expr {
        Expr::Literal(LiteralValue::Boolean(value)) => Test::Constant(*value.inner()),
        Expr::Call(call) => call_test(call),
        _ => Test::Unknown,
    }
}

fn call_test(call: &CallExpr) -> Test {
    let args = call.args.as_slice();
    match (call.func_name.as_str(), args) {
        (operators::LOGICAL_NOT, [a]) => negation(test(a)),
        (operators::LOGICAL_AND, [a, b]) => match (test(a), test(b)) {
            (Test::Unknown, Test::Unknown) => Test::Unknown,
            both => Test::And(Box::new(both)),
        },
        (operators::LOGICAL_OR, [a, b]) => match (test(a), test(b)) {
            (Test::Unknown, Test::Unknown) => Test::Unknown,
            both => Test::Or(Box::new(both)),
        },
        (operators::CONDITIONAL, [condition, yes, no]) => match test(condition) {
            Test::Unknown => Test::Unknown,
            condition => Test::Conditional(Box::new((condition, test(yes), test(no)))),
        },
        (operators::EQUALS, [a, b]) => equality(a, b),
        (operators::NOT_EQUALS, [a, b]) => negation(equality(a, b)),
        (operators::IN, [a, b]) if is_driver(a) => match &b.expr {
            Expr::List(list) => {
                let known: Option<Box<[Box<str>]>> =
                    list.elements.iter().map(|element| string(element).map(Box::from)).collect();
                known.map_or(Test::Unknown, Test::OneOf)
            }
            _ => Test::Unknown,
        },
        ("startsWith", [prefix]) => on_driver(call, prefix, Test::StartsWith),
        ("endsWith", [suffix]) => on_driver(call, suffix, Test::EndsWith),
        _ => Test::Unknown,
    }
}

fn negation(test: Test) -> Test {
    if test == Test::Unknown { Test::Unknown } else { Test::Not(Box::new(test)) }
}

fn equality(a: &IdedExpr, b: &IdedExpr) -> Test {
    let value = if is_driver(a) {
        string(b)
    } else if is_driver(b) {
        string(a)
    } else {
        None
    };
    value.map_or(Test::Unknown, |value| Test::Equals(value.into()))
}

fn on_driver(call: &CallExpr, argument: &IdedExpr, condition: fn(Box<str>) -> Test) -> Test {
    let is_of_driver = call.target.as_deref().is_some_and(is_driver);
    let value = string(argument).filter(|_| is_of_driver);
    value.map_or(Test::Unknown, |value| condition(value.into()))
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
