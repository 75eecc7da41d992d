//! Macros: calls that are replaced by other expressions (parser/macro.go of cel-go and its
//! extensions).

use cel::common::ast::{
    CallExpr, ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue, MapExpr, SelectExpr,
    operators,
};

use super::error::SelectorError;

/// A name that no variable of an expression can have.
const ACCUMULATOR: &str = "@result";

/// Expands a macro; `None` if the call is not a macro.
///
/// The parser expands none, so exactly the macros of upstream's environment are known (`existsOne`
/// exists with two variables only).
///
/// # Errors
/// Returns an error if the arguments are invalid for the macro.
pub(super) fn expand(call: &CallExpr) -> Result<Option<Expr>, SelectorError> {
    let (function, arguments) = (call.func_name.as_str(), call.args.as_slice());
    let Some(target) = call.target.as_deref() else {
        return if let ("has", [field]) = (function, arguments) {
            has(field).map(Some)
        } else {
            Ok(None)
        };
    };
    let is_cel = matches!(&target.expr, Expr::Ident(name) if name == "cel");
    let expanded = match (function, arguments) {
        ("bind", [variable, value, body]) if is_cel => Some(bind(name(variable)?, value, body)),
        ("optMap" | "optFlatMap", [variable, body]) => {
            Some(opt_map(target, name(variable)?, body, function == "optFlatMap"))
        }
        ("sortBy", [variable, key]) => Some(sort_by(target, name(variable)?, key)),
        (_, [variable, rest @ ..]) => match over_elements(function, variable, rest) {
            Some(steps) => Some(steps.over(target, name(variable)?, None)),
            None => over_pairs(function, target, variable, rest)?,
        },
        _ => None,
    };
    Ok(expanded)
}

/// Expands `has(a.b)`.
fn has(field: &IdedExpr) -> Result<Expr, SelectorError> {
    match &field.expr {
        Expr::Select(select) if !select.test => {
            Ok(Expr::Select(SelectExpr { test: true, ..select.clone() }))
        }
        _ => Err(SelectorError::compile("invalid argument to has() macro".to_owned())),
    }
}

/// Parts of a comprehension.
struct Steps {
    initial: Expr,
    condition: Expr,
    step: Expr,
    result: Expr,
}

impl Steps {
    fn all(predicate: &IdedExpr) -> Self {
        Self {
            initial: boolean(true),
            condition: call(operators::NOT_STRICTLY_FALSE, [accumulator()]),
            step: call(operators::LOGICAL_AND, [accumulator(), predicate.expr.clone()]),
            result: accumulator(),
        }
    }

    fn exists(predicate: &IdedExpr) -> Self {
        let not = call(operators::LOGICAL_NOT, [accumulator()]);
        Self {
            initial: boolean(false),
            condition: call(operators::NOT_STRICTLY_FALSE, [not]),
            step: call(operators::LOGICAL_OR, [accumulator(), predicate.expr.clone()]),
            result: accumulator(),
        }
    }

    fn exists_one(predicate: &IdedExpr) -> Self {
        let found = call(operators::ADD, [accumulator(), integer(1)]);
        let result = call(operators::EQUALS, [accumulator(), integer(1)]);
        Self {
            initial: integer(0),
            condition: boolean(true),
            step: conditional(Some(predicate), found),
            result,
        }
    }

    /// Appends the elements that pass the filter to a list.
    fn append(filter: Option<&IdedExpr>, element: &IdedExpr) -> Self {
        let step = call(operators::ADD, [accumulator(), list(vec![element.expr.clone()])]);
        Self::gather(list(Vec::new()), conditional(filter, step))
    }

    fn gather(initial: Expr, step: Expr) -> Self {
        Self { initial, condition: boolean(true), step, result: accumulator() }
    }

    fn over(self, range: &IdedExpr, first: &str, second: Option<&str>) -> Expr {
        let Self { initial, condition, step, result } = self;
        let range = range.clone();
        fold(Fold {
            range,
            first,
            second,
            accumulator: ACCUMULATOR,
            initial,
            condition,
            step,
            result,
        })
    }
}

/// Returns comprehensions over the elements of a list or the keys of a map.
fn over_elements(function: &str, variable: &IdedExpr, rest: &[IdedExpr]) -> Option<Steps> {
    match (function, rest) {
        ("all", [predicate]) => Some(Steps::all(predicate)),
        ("exists", [predicate]) => Some(Steps::exists(predicate)),
        ("exists_one", [predicate]) => Some(Steps::exists_one(predicate)),
        ("map", [filter @ .., transform]) if filter.len() <= 1 => {
            Some(Steps::append(filter.first(), transform))
        }
        ("filter", [predicate]) => Some(Steps::append(Some(predicate), variable)),
        _ => None,
    }
}

/// Returns comprehensions over index and element of a list, or key and value of a map.
fn over_pairs(
    function: &str,
    target: &IdedExpr,
    first: &IdedExpr,
    rest: &[IdedExpr],
) -> Result<Option<Expr>, SelectorError> {
    let insert = |arguments: Vec<Expr>| {
        let args = std::iter::once(accumulator()).chain(arguments).map(node).collect();
        Expr::Call(CallExpr { func_name: "cel.@mapInsert".to_owned(), target: None, args })
    };
    let empty = || Expr::Map(MapExpr::default());
    let (second, steps) = match (function, rest) {
        ("all", [second, predicate]) => (second, Steps::all(predicate)),
        ("exists", [second, predicate]) => (second, Steps::exists(predicate)),
        ("existsOne" | "exists_one", [second, predicate]) => (second, Steps::exists_one(predicate)),
        ("transformList", [second, filter @ .., transform]) if filter.len() <= 1 => {
            (second, Steps::append(filter.first(), transform))
        }
        ("transformMap", [second, filter @ .., transform]) if filter.len() <= 1 => {
            let step = insert(vec![first.expr.clone(), transform.expr.clone()]);
            (second, Steps::gather(empty(), conditional(filter.first(), step)))
        }
        ("transformMapEntry", [second, filter @ .., transform]) if filter.len() <= 1 => {
            let step = insert(vec![transform.expr.clone()]);
            (second, Steps::gather(empty(), conditional(filter.first(), step)))
        }
        _ => return Ok(None),
    };
    let (first, second) = (name(first)?, name(second)?);
    if first == second {
        return Err(SelectorError::compile(format!(
            "{function}() declares the variable `{first}` twice"
        )));
    }
    Ok(Some(steps.over(target, first, Some(second))))
}

/// Expands `cel.bind(x, value, body)` to a loop over an empty list with accumulator `x`.
fn bind(variable: &str, value: &IdedExpr, body: &IdedExpr) -> Expr {
    fold(Fold {
        range: node(list(Vec::new())),
        first: "#unused",
        second: None,
        accumulator: variable,
        initial: value.expr.clone(),
        condition: boolean(false),
        step: Expr::Ident(variable.to_owned()),
        result: body.expr.clone(),
    })
}

/// Expands `x.optMap(v, body)`: the optional of `body` with the value of `x` as `v`, if `x` has a
/// value.
fn opt_map(target: &IdedExpr, variable: &str, body: &IdedExpr, flat: bool) -> Expr {
    let value = node(member(target, "value"));
    let bound = bind(variable, &value, body);
    let some = if flat { bound } else { call("optional.of", [bound]) };
    call(operators::CONDITIONAL, [member(target, "hasValue"), some, call("optional.none", [])])
}

/// Expands `x.sortBy(v, key)`: the elements sorted by their keys (ext/lists.go of cel-go).
fn sort_by(target: &IdedExpr, variable: &str, key: &IdedExpr) -> Expr {
    let keys = Steps::append(None, key).over(target, variable, None);
    call("@sortByAssociatedKeys", [target.expr.clone(), keys])
}

struct Fold<'a> {
    range: IdedExpr,
    first: &'a str,
    second: Option<&'a str>,
    accumulator: &'a str,
    initial: Expr,
    condition: Expr,
    step: Expr,
    result: Expr,
}

fn fold(fold: Fold<'_>) -> Expr {
    Expr::Comprehension(Box::new(ComprehensionExpr {
        iter_range: fold.range,
        iter_var: fold.first.to_owned(),
        iter_var2: fold.second.map(str::to_owned),
        accu_var: fold.accumulator.to_owned(),
        accu_init: node(fold.initial),
        loop_cond: node(fold.condition),
        loop_step: node(fold.step),
        result: node(fold.result),
    }))
}

fn conditional(filter: Option<&IdedExpr>, step: Expr) -> Expr {
    match filter {
        Some(filter) => call(operators::CONDITIONAL, [filter.expr.clone(), step, accumulator()]),
        None => step,
    }
}

fn name(variable: &IdedExpr) -> Result<&str, SelectorError> {
    match &variable.expr {
        Expr::Ident(name) => Ok(name),
        _ => {
            Err(SelectorError::compile("the variable of a macro must be an identifier".to_owned()))
        }
    }
}

fn node(expr: Expr) -> IdedExpr {
    IdedExpr { id: 0, expr }
}

fn accumulator() -> Expr {
    Expr::Ident(ACCUMULATOR.to_owned())
}

fn boolean(value: bool) -> Expr {
    Expr::Literal(LiteralValue::Boolean(value.into()))
}

fn integer(value: i64) -> Expr {
    Expr::Literal(LiteralValue::Int(value.into()))
}

fn list(elements: Vec<Expr>) -> Expr {
    Expr::List(ListExpr::new(elements.into_iter().map(node).collect()))
}

fn call<const N: usize>(function: &str, arguments: [Expr; N]) -> Expr {
    let args = arguments.into_iter().map(node).collect();
    Expr::Call(CallExpr { func_name: function.to_owned(), target: None, args })
}

fn member(target: &IdedExpr, function: &str) -> Expr {
    let target = Some(Box::new(target.clone()));
    Expr::Call(CallExpr { func_name: function.to_owned(), target, args: Vec::new() })
}
