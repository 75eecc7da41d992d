//! `sets.contains`, `sets.equivalent`, `sets.intersects` (cel-go's ext.Sets) and `includes` (Kubernetes' lists).

use cel::common::types::{CelBool, DYN_TYPE, Kind, LIST_TYPE};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError};

pub(super) fn declare(env: &mut Env) -> Result<(), DeclarationError> {
    let lists = || vec![LIST_TYPE, LIST_TYPE];
    env.add_overload("sets.contains", "list_sets_contains_list", lists(), contains)?;
    env.add_overload("sets.equivalent", "list_sets_equivalent_list", lists(), equivalent)?;
    env.add_overload("sets.intersects", "list_sets_intersects_list", lists(), intersects)?;
    env.add_member_overload("includes", "list_includes_dyn_dyn", DYN_TYPE, vec![DYN_TYPE], includes_value)
}

fn contains<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let (outer, inner) = (elements(&args[0])?, elements(&args[1])?);
    Ok(boolean(includes(&outer, &inner)))
}

fn equivalent<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let (a, b) = (elements(&args[0])?, elements(&args[1])?);
    Ok(boolean(includes(&a, &b) && includes(&b, &a)))
}

fn intersects<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let (a, b) = (elements(&args[0])?, elements(&args[1])?);
    Ok(boolean(b.iter().any(|y| a.iter().any(|x| x.equals(y.as_ref())))))
}

/// `x.includes(y)`: the list `x` holds `y`, or `x` is `y` (Kubernetes' list library, for attributes that may become lists).
fn includes_value<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let (target, value) = (&args[0], &args[1]);
    let held = match target.get_type().kind() {
        Kind::List => elements(target)?.iter().any(|x| x.equals(value.as_ref())),
        _ => target.equals(value.as_ref()),
    };
    Ok(boolean(held))
}

fn includes<'v>(outer: &[Box<dyn Val + 'v>], inner: &[Box<dyn Val + 'v>]) -> bool {
    inner.iter().all(|y| outer.iter().any(|x| x.equals(y.as_ref())))
}

fn elements<'v>(list: &CowVal<'_, 'v>) -> Result<Vec<Box<dyn Val + 'v>>, ExecutionError> {
    let iterable = list.as_iterable().ok_or_else(|| ExecutionError::function_error("sets", "not a list"))?;
    let mut items = iterable.iter();
    let mut elements = Vec::new();
    while let Some(item) = items.next() {
        elements.push(item.clone_as_boxed());
    }
    Ok(elements)
}

fn boolean<'b, 'v>(value: bool) -> CowVal<'b, 'v> {
    CowVal::owned(CelBool::from(value))
}
