//! From source to syntax: the crate `cel` parses; this module is the only one that calls it.

use cel::Env;
use cel::common::ast::IdedExpr;

use super::SelectorError;

/// Upstream's limit on the length of an expression.
const MAX_BYTES: usize = 10 * 1024;

/// Deeper nesting is refused, as by cel-go (its parser's limit).
const MAX_DEPTH: u16 = 250;

/// Parses an expression. Macros are left as calls.
///
/// # Errors
/// It is too long or too deep, or is none.
pub(super) fn parse(expression: &str) -> Result<IdedExpr, SelectorError> {
    if expression.len() > MAX_BYTES {
        let problem = format!("it has {} bytes, the limit is {MAX_BYTES}", expression.len());
        return Err(SelectorError::compile(problem));
    }
    let parser =
        Env::default().parser().enable_optional_syntax(true).enable_ident_escape_syntax(true);
    let parsed = parser.max_recursion_depth(MAX_DEPTH).parse(expression);
    parsed.map_err(|errors| SelectorError::compile(errors.to_string()))
}
