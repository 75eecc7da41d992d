//! What evaluating costs, in cel-go's units (interpreter/runtimecost.go; for the functions of
//! Kubernetes, apiserver/pkg/cel/library/cost.go).

use super::value::Value;

/// Evaluation on one device ends with an error beyond this (`CELSelectorExpressionMaxCost`).
pub(super) const LIMIT: u64 = 1_000_000;

/// Making a list, making a map.
pub(super) const LIST: u64 = 10;
pub(super) const MAP: u64 = 30;

/// Looking at so many characters costs one unit.
const CHARACTERS: u64 = 10;

/// So many characters of a regular expression are taken for one element of it.
const REGEX_CHARACTERS: u64 = 4;

/// What a call costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cost {
    One,
    /// The shorter of two values is looked at.
    Comparison,
    /// Both strings are copied.
    Concatenation,
    /// The argument at this position is looked at, so many times.
    Characters(usize, u64),
    /// Every element of the argument at this position is looked at.
    Elements(usize),
    /// A string against a regular expression.
    Regex,
    /// One string in another.
    Substring,
    /// The result is made, character by character.
    Result,
}

impl Cost {
    pub(super) fn of(self, arguments: &[Value], result: Option<&Value>) -> u64 {
        let size = |i: usize| arguments.get(i).map_or(1, Value::size);
        match self {
            Self::One => 1,
            Self::Comparison => size(0).min(size(1)).div_ceil(CHARACTERS),
            Self::Concatenation => match arguments.first() {
                Some(Value::String(_) | Value::Bytes(_)) => {
                    (size(0) + size(1)).div_ceil(CHARACTERS)
                }
                _ => 1,
            },
            Self::Characters(i, times) => (size(i) * times).div_ceil(CHARACTERS),
            Self::Elements(i) => size(i),
            Self::Regex => (size(0) + 1).div_ceil(CHARACTERS) * size(1).div_ceil(REGEX_CHARACTERS),
            Self::Substring => size(0).div_ceil(CHARACTERS) * size(1).div_ceil(CHARACTERS),
            Self::Result => (result.map_or(1, Value::size) * 2).div_ceil(CHARACTERS),
        }
    }
}
