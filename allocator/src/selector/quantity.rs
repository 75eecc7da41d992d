//! Quantities in selectors (k8s.io/apiserver/pkg/cel/library/quantity.go).

use std::any::Any;

use cel::common::types::{CelBool, CelDouble, CelInt, CelString, Type};
use cel::common::value::{StaticVal, Val};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};
use tessera_api::quantity::Quantity;

static TYPE: Type = Type::new_unspecified_type("kubernetes.Quantity");

/// A quantity as a CEL value.
#[derive(Debug, Clone, Copy)]
pub(super) struct CelQuantity(pub(super) Quantity);

impl Val for CelQuantity {
    fn get_type(&self) -> &Type {
        &TYPE
    }
    fn cel_type() -> &'static Type {
        &TYPE
    }
    fn equals(&self, other: &dyn Val) -> bool {
        other.downcast_ref::<Self>().is_some_and(|o| o.0 == self.0)
    }
    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(*self)
    }
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for CelQuantity {}

pub(super) fn declare(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn parse: (CelString<'_>) -> Result<CelQuantity>, name = "quantity")?;
    add_overload!(env, fn is_quantity: (CelString<'_>) -> CelBool, name = "isQuantity")?;
    add_member_overload!(env, fn sign: (CelQuantity) -> CelInt)?;
    add_member_overload!(env, fn is_integer: (CelQuantity) -> CelBool, name = "isInteger")?;
    add_member_overload!(env, fn as_integer: (CelQuantity) -> Result<CelInt>, name = "asInteger")?;
    add_member_overload!(env, fn as_float: (CelQuantity) -> CelDouble, name = "asApproximateFloat")?;
    add_member_overload!(env, fn compare: (CelQuantity, CelQuantity) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn greater: (CelQuantity, CelQuantity) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn less: (CelQuantity, CelQuantity) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn add: (CelQuantity, CelQuantity) -> Result<CelQuantity>)?;
    add_member_overload!(env, fn add_int: (CelQuantity, CelInt) -> Result<CelQuantity>, name = "add")?;
    add_member_overload!(env, fn sub: (CelQuantity, CelQuantity) -> Result<CelQuantity>)?;
    add_member_overload!(env, fn sub_int: (CelQuantity, CelInt) -> Result<CelQuantity>, name = "sub")
}

fn parse(text: &CelString<'_>) -> Result<CelQuantity, ExecutionError> {
    Quantity::parse(text.inner()).map(CelQuantity).map_err(|e| ExecutionError::function_error("quantity", e))
}

fn is_quantity(text: &CelString<'_>) -> CelBool {
    Quantity::parse(text.inner()).is_ok().into()
}

fn sign(q: &CelQuantity) -> CelInt {
    i64::try_from(q.0.nano().signum()).unwrap_or_default().into()
}

fn is_integer(q: &CelQuantity) -> CelBool {
    q.0.as_exact_i64().is_some().into()
}

fn as_integer(q: &CelQuantity) -> Result<CelInt, ExecutionError> {
    let exact = q.0.as_exact_i64();
    exact
        .map(CelInt::from)
        .ok_or_else(|| ExecutionError::function_error("asInteger", "cannot convert value to integer"))
}

fn as_float(q: &CelQuantity) -> CelDouble {
    (q.0.nano() as f64 / 1e9).into()
}

fn compare(a: &CelQuantity, b: &CelQuantity) -> CelInt {
    (a.0.cmp(&b.0) as i64).into()
}

fn greater(a: &CelQuantity, b: &CelQuantity) -> CelBool {
    (a.0 > b.0).into()
}

fn less(a: &CelQuantity, b: &CelQuantity) -> CelBool {
    (a.0 < b.0).into()
}

fn add(a: &CelQuantity, b: &CelQuantity) -> Result<CelQuantity, ExecutionError> {
    within_range("add", a.0.checked_add(b.0))
}

fn add_int(a: &CelQuantity, b: &CelInt) -> Result<CelQuantity, ExecutionError> {
    within_range("add", a.0.checked_add(Quantity::from_integer(*b.inner())))
}

fn sub(a: &CelQuantity, b: &CelQuantity) -> Result<CelQuantity, ExecutionError> {
    within_range("sub", a.0.checked_sub(b.0))
}

fn sub_int(a: &CelQuantity, b: &CelInt) -> Result<CelQuantity, ExecutionError> {
    within_range("sub", a.0.checked_sub(Quantity::from_integer(*b.inner())))
}

fn within_range(function: &str, result: Option<Quantity>) -> Result<CelQuantity, ExecutionError> {
    result
        .map(CelQuantity)
        .ok_or_else(|| ExecutionError::function_error(function, "the result is out of range"))
}
