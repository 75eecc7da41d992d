//! Versions in selectors (k8s.io/apiserver/pkg/cel/library/semverlib.go).

use std::any::Any;

use cel::common::types::{CelBool, CelInt, CelString, Type};
use cel::common::value::{StaticVal, Val};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};
use semver::Version;

static TYPE: Type = Type::new_unspecified_type("kubernetes.Semver");

/// A version as a CEL value.
#[derive(Debug, Clone)]
pub(super) struct CelSemver(pub(super) Version);

impl Val for CelSemver {
    fn get_type(&self) -> &Type {
        &TYPE
    }
    fn cel_type() -> &'static Type {
        &TYPE
    }
    fn equals(&self, other: &dyn Val) -> bool {
        // Precedence ignores build metadata, and upstream compares by precedence.
        other.downcast_ref::<Self>().is_some_and(|o| o.0.cmp_precedence(&self.0).is_eq())
    }
    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(self.clone())
    }
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for CelSemver {}

pub(super) fn declare(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn parse: (CelString<'_>) -> Result<CelSemver>, name = "semver")?;
    add_overload!(env, fn parse_loose: (CelString<'_>, CelBool) -> Result<CelSemver>, name = "semver")?;
    add_overload!(env, fn is_semver: (CelString<'_>) -> CelBool, name = "isSemver")?;
    add_member_overload!(env, fn major: (CelSemver) -> CelInt)?;
    add_member_overload!(env, fn minor: (CelSemver) -> CelInt)?;
    add_member_overload!(env, fn patch: (CelSemver) -> CelInt)?;
    add_member_overload!(env, fn compare: (CelSemver, CelSemver) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn greater: (CelSemver, CelSemver) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn less: (CelSemver, CelSemver) -> CelBool, name = "isLessThan")
}

fn parse(text: &CelString<'_>) -> Result<CelSemver, ExecutionError> {
    Version::parse(text.inner()).map(CelSemver).map_err(|e| ExecutionError::function_error("semver", e))
}

/// `semver(text, true)`: a leading `v`, missing minor and patch, and leading zeros are put right first.
fn parse_loose(text: &CelString<'_>, normalize: &CelBool) -> Result<CelSemver, ExecutionError> {
    if !*normalize.inner() {
        return parse(text);
    }
    let text = text.inner();
    let text = text.strip_prefix('v').unwrap_or(text);
    let end = text.find(['-', '+']).unwrap_or(text.len());
    let (core, rest) = text.split_at(end);
    let mut parts: Vec<String> = core
        .splitn(3, '.')
        .map(|part| match part.trim_start_matches('0') {
            "" if !part.is_empty() => "0".to_owned(),
            trimmed => trimmed.to_owned(),
        })
        .collect();
    if parts.len() < 3 && !rest.is_empty() {
        return Err(ExecutionError::function_error(
            "semver",
            "short version cannot contain PreRelease/Build meta data",
        ));
    }
    parts.resize(3, "0".to_owned());
    parse(&format!("{}{rest}", parts.join(".")).as_str().into())
}

fn is_semver(text: &CelString<'_>) -> CelBool {
    Version::parse(text.inner()).is_ok().into()
}

fn major(v: &CelSemver) -> CelInt {
    i64::try_from(v.0.major).unwrap_or(i64::MAX).into()
}

fn minor(v: &CelSemver) -> CelInt {
    i64::try_from(v.0.minor).unwrap_or(i64::MAX).into()
}

fn patch(v: &CelSemver) -> CelInt {
    i64::try_from(v.0.patch).unwrap_or(i64::MAX).into()
}

fn compare(a: &CelSemver, b: &CelSemver) -> CelInt {
    (a.0.cmp_precedence(&b.0) as i64).into()
}

fn greater(a: &CelSemver, b: &CelSemver) -> CelBool {
    a.0.cmp_precedence(&b.0).is_gt().into()
}

fn less(a: &CelSemver, b: &CelSemver) -> CelBool {
    a.0.cmp_precedence(&b.0).is_lt().into()
}
