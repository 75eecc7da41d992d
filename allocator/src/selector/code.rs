//! An expression after all names, macros and types in it have been looked at: what is evaluated.

use std::sync::Arc;

use super::functions::Function;
use super::value::Value;

/// Code for a value.
#[derive(Clone, Debug)]
pub(super) enum Code {
    Constant(Value),
    /// A variable of a comprehension, by its place.
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
    /// All must be true. An error counts only if none is false.
    And(Box<[Code; 2]>),
    /// One must be true. An error counts only if none is true.
    Or(Box<[Code; 2]>),
    /// The condition and its two branches, of which one is evaluated.
    Conditional(Box<[Code; 3]>),
    /// Not false, and be it an error: goes on with a comprehension.
    NotStrictlyFalse(Box<Code>),
    /// `first.or(second)`, or `first.orValue(second)`: the second is evaluated only if it is
    /// needed.
    OrElse {
        first: Box<Code>,
        second: Box<Code>,
        unwrap: bool,
    },
    Call {
        function: &'static Function,
        arguments: Vec<Code>,
    },
    /// Elements, some of which may be optional.
    List(Vec<(Code, bool)>),
    /// Keys, values, and whether the entry is optional.
    Map(Vec<(Code, Code, bool)>),
    Fold(Box<Fold>),
}

/// How a field is selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Plain,
    Presence,
    Optional,
}

/// A comprehension: goes over `range` as long as `condition` holds and folds each element into the
/// accumulator.
#[derive(Clone, Debug)]
pub(super) struct Fold {
    pub(super) range: Code,
    /// Where the element goes, or the key of a map.
    pub(super) first: usize,
    /// With two variables: then `first` is the index or key, and this the element or value.
    pub(super) second: Option<usize>,
    pub(super) accumulator: usize,
    pub(super) initial: Code,
    pub(super) condition: Code,
    pub(super) step: Code,
    pub(super) result: Code,
}
