//! Evaluation costs, in units of cel-go (interpreter/runtimecost.go; for the functions of
//! Kubernetes, apiserver/pkg/cel/library/cost.go).

use super::value::Value;

/// Cost limit of an evaluation on one device (`CELSelectorExpressionMaxCost`).
pub(super) const LIMIT: u64 = 1_000_000;

/// Cost of creating a list or a map.
pub(super) const LIST: u64 = 10;
pub(super) const MAP: u64 = 30;

/// Number of characters that cost one unit.
const CHARACTERS: u64 = 10;

/// Number of characters of a regular expression that count as one element.
const REGEX_CHARACTERS: u64 = 4;

/// Cost model of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cost {
    One,
    /// The length of the shorter value.
    Comparison,
    /// The length of both strings.
    Concatenation,
    /// The length of the argument at this position, times a factor.
    Characters(usize, u64),
    /// The number of elements of the argument at this position.
    Elements(usize),
    /// A match of a string with a regular expression.
    Regex,
    /// A search for a substring.
    Substring,
    /// The length of the result.
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
