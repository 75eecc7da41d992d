//! The functions and macros that selectors may use.

use std::sync::{Arc, LazyLock};

use cel::common::ast::{ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue};
use cel::parser::{Macro, MacroExprHelper, ParseError};
use cel::{DeclarationError, Env};

use super::{quantity, semver, sets};

/// One environment for all selectors: it holds declarations only.
pub(super) static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    Arc::new(build().expect("invariant: no function is declared twice, checked by the tests"))
});

fn build() -> Result<Env, DeclarationError> {
    let mut env = Env::stdlib();
    env.add_extension(cel::extensions::strings)?;
    quantity::declare(&mut env)?;
    semver::declare(&mut env)?;
    sets::declare(&mut env)?;
    env.add_macro(Macro::receiver("bind", 3, bind))?;
    Ok(env)
}

/// Expands `cel.bind(x, value, body)` as cel-go does: a loop over nothing, whose accumulator is `x`.
fn bind(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Result<Option<IdedExpr>, ParseError> {
    let is_cel = matches!(target.as_ref().map(|t| &t.expr), Some(Expr::Ident(name)) if name == "cel");
    let (true, Ok([variable, value, body])) = (is_cel, <[IdedExpr; 3]>::try_from(std::mem::take(args)))
    else {
        let id = target.as_ref().map_or(0, |t| t.id);
        return Err(helper.new_error(id, "bind() is only known as cel.bind(variable, value, expression)"));
    };
    let Expr::Ident(name) = variable.expr else {
        return Err(helper.new_error(variable.id, "cel.bind() needs a plain name as its first argument"));
    };
    let comprehension = ComprehensionExpr {
        iter_range: helper.next_expr(Expr::List(ListExpr::new(Vec::new()))),
        iter_var: "#unused".to_owned(),
        iter_var2: None,
        loop_step: helper.next_expr(Expr::Ident(name.clone())),
        accu_var: name,
        accu_init: value,
        loop_cond: helper.next_expr(Expr::Literal(LiteralValue::Boolean(false.into()))),
        result: body,
    };
    Ok(Some(helper.next_expr(Expr::Comprehension(Box::new(comprehension)))))
}
