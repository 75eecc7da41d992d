//! Checked expression: the code that is evaluated.

use std::sync::Arc;

use super::functions::Function;
use super::value::Value;

/// A node of the code.
#[derive(Clone, Debug)]
pub(super) enum Code {
    Constant(Value),
    /// A variable of a comprehension, by index.
    Variable(usize),
    /// `of.field`, `has(of.field)` or `of.?field`.
    Select {
        of: Box<Code>,
        field: Arc<str>,
        access: Access,
    },
    /// `of[key]` or `of[?key]`.
    Index {
        of: Box<Code>,
        key: Box<Code>,
        optional: bool,
    },
    /// True if both are true. An error counts only if no operand is false.
    And(Box<[Code; 2]>),
    /// True if one is true. An error counts only if no operand is true.
    Or(Box<[Code; 2]>),
    /// A condition and its two branches, of which one is evaluated.
    Conditional(Box<[Code; 3]>),
    /// True unless the operand is false; an error counts as true. Used as a loop condition.
    NotStrictlyFalse(Box<Code>),
    /// `first.or(second)` or `first.orValue(second)`: the second is evaluated only if needed.
    OrElse {
        first: Box<Code>,
        second: Box<Code>,
        unwrap: bool,
    },
    Call {
        function: &'static Function,
        arguments: Vec<Code>,
    },
    /// Elements, each with a flag for optional ones.
    List(Vec<(Code, bool)>),
    /// A list of constants, which is not empty. It is not created anew by each evaluation.
    ConstantList(Value),
    /// Keys and values, with a flag for optional entries.
    Map(Vec<(Code, Code, bool)>),
    Fold(Box<Fold>),
}

impl Code {
    /// Returns the code with the same result and cost, without the creation of a constant list.
    pub(super) fn with_constant_list(self) -> Self {
        let Self::List(elements) = &self else { return self };
        let constant = |(code, is_optional): &(Self, bool)| match code {
            Self::Constant(Value::Device) => None,
            Self::Constant(value) => (!is_optional).then(|| value.clone()),
            _ => None,
        };
        match elements.iter().map(constant).collect::<Option<Vec<Value>>>() {
            Some(values) if !values.is_empty() => Self::ConstantList(Value::list(values)),
            _ => self,
        }
    }
}

/// Kind of a field selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Plain,
    Presence,
    Optional,
}

/// A comprehension: folds the elements of `range` while `condition` holds.
#[derive(Clone, Debug)]
pub(super) struct Fold {
    pub(super) range: Code,
    /// Variable of the element, or of the key of a map.
    pub(super) first: usize,
    /// Second variable: then `first` is the index or key, and this one the element or value.
    pub(super) second: Option<usize>,
    pub(super) accumulator: usize,
    pub(super) initial: Code,
    pub(super) condition: Code,
    pub(super) step: Code,
    pub(super) result: Code,
}
