//! Parsing with the crate `cel`; no other module calls its parser.

use cel::Env;
use cel::common::ast::IdedExpr;

use super::error::SelectorError;

/// Maximum length of an expression, in bytes, as in upstream.
const MAX_BYTES: usize = 10 * 1024;

/// Maximum nesting, as in the parser of cel-go.
const MAX_DEPTH: u16 = 250;

/// Parses an expression. Macros stay calls.
///
/// # Errors
/// Returns an error if it is too long, too deeply nested or not valid.
pub(super) fn parse(expression: &str) -> Result<IdedExpr, SelectorError> {
    if expression.len() > MAX_BYTES {
        let problem = format!("expression has {} bytes (limit {MAX_BYTES})", expression.len());
        return Err(SelectorError::compile(problem));
    }
    let parser =
        Env::default().parser().enable_optional_syntax(true).enable_ident_escape_syntax(true);
    let parsed = parser.max_recursion_depth(MAX_DEPTH).parse(expression);
    parsed.map_err(|errors| SelectorError::compile(errors.to_string()))
}
