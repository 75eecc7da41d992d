//! What is wrong with an expression before any device is looked at.
//!
//! The API server type-checks selectors; our interpreter is dynamic and would only notice a mistake on the branch that
//! is evaluated. So names are checked here, once per expression: an expression that upstream would not compile must
//! never match a device, whatever its other operand says.

use cel::common::ast::{EntryExpr, Expr, IdedExpr, LiteralValue};

use super::SelectorError;

/// Comprehensions nested deeper than this are refused: the interpreter has no cost limit, and three loops over the 120
/// elements that fit into a literal already pass upstream's limit of a million.
const MAX_COMPREHENSION_DEPTH: usize = 2;

/// Fields of the variable `device` (dynamic-resource-allocation/cel/compile.go).
const DEVICE_FIELDS: [&str; 4] = ["driver", "attributes", "capacity", "allowMultipleAllocations"];

/// Functions that our environment knows, by how they are called.
const MEMBER_FUNCTIONS: &[&str] = &[
    "add",
    "asApproximateFloat",
    "asInteger",
    "charAt",
    "compareTo",
    "contains",
    "endsWith",
    "format",
    "hasValue",
    "includes",
    "indexOf",
    "isGreaterThan",
    "isInteger",
    "isLessThan",
    "join",
    "lastIndexOf",
    "lowerAscii",
    "major",
    "matches",
    "minor",
    "or",
    "orValue",
    "patch",
    "replace",
    "reverse",
    "sign",
    "size",
    "split",
    "startsWith",
    "sub",
    "substring",
    "trim",
    "upperAscii",
    "value",
];

const GLOBAL_FUNCTIONS: &[&str] = &[
    "bool",
    "double",
    "dyn",
    "int",
    "isQuantity",
    "isSemver",
    "matches",
    "quantity",
    "semver",
    "size",
    "string",
    "type",
    "uint",
];

/// Functions called through a namespace, such as `sets.contains(a, b)`.
const NAMESPACED_FUNCTIONS: &[(&str, &[&str])] = &[
    ("optional", &["of", "none", "ofNonZeroValue"]),
    ("sets", &["contains", "equivalent", "intersects"]),
    ("strings", &["quote"]),
];

/// Types that may be named as values, for `type(x) == string`.
const TYPE_NAMES: &[&str] = &["bool", "bytes", "double", "int", "list", "map", "null_type", "string", "uint"];

/// Checks identifiers, device fields, functions and nesting of `expr`.
pub(super) fn check(expr: &IdedExpr) -> Result<(), SelectorError> {
    Scope { variables: Vec::new(), depth: 0 }.expr(expr)
}

struct Scope {
    variables: Vec<String>,
    depth: usize,
}

impl Scope {
    fn expr(&mut self, expr: &IdedExpr) -> Result<(), SelectorError> {
        match &expr.expr {
            Expr::Unspecified => Err(SelectorError::unsupported("an empty expression")),
            Expr::Literal(_) => Ok(()),
            Expr::Ident(name) => self.ident(name),
            Expr::Select(select) => {
                if let Expr::Ident(name) = &select.operand.expr
                    && name == "device"
                    && !self.variables.iter().any(|v| v == name)
                    && !DEVICE_FIELDS.contains(&select.field.as_str())
                {
                    return Err(SelectorError::Compile {
                        problem: format!("device has no field `{}`", select.field),
                    });
                }
                self.expr(&select.operand)
            }
            Expr::List(list) => list.elements.iter().try_for_each(|e| self.expr(e)),
            Expr::Map(map) => map.entries.iter().try_for_each(|entry| match &entry.expr {
                EntryExpr::MapEntry(e) => self.expr(&e.key).and_then(|()| self.expr(&e.value)),
                EntryExpr::StructField(_) => Err(SelectorError::unsupported("struct literals")),
            }),
            Expr::Struct(_) => Err(SelectorError::unsupported("struct literals")),
            Expr::Call(call) => {
                let arguments = &call.args;
                self.function(&call.func_name, call.target.as_deref(), arguments.len())?;
                // The target of a namespaced function is a name, not a value.
                if let Some(target) = call.target.as_deref()
                    && !is_namespace(target)
                {
                    self.expr(target)?;
                }
                arguments.iter().try_for_each(|a| self.expr(a))
            }
            Expr::Comprehension(c) => {
                if c.iter_var2.is_some() {
                    return Err(SelectorError::unsupported("comprehensions over two variables"));
                }
                self.expr(&c.iter_range)?;
                self.expr(&c.accu_init)?;
                let loops = !is_bind(&c.loop_cond);
                self.depth += usize::from(loops);
                if self.depth > MAX_COMPREHENSION_DEPTH {
                    return Err(SelectorError::unsupported("comprehensions nested more than two deep"));
                }
                self.variables.push(c.accu_var.clone());
                self.variables.push(c.iter_var.clone());
                let inner =
                    [&c.loop_cond, &c.loop_step, &c.result].into_iter().try_for_each(|e| self.expr(e));
                self.variables.truncate(self.variables.len() - 2);
                self.depth -= usize::from(loops);
                inner
            }
        }
    }

    fn ident(&self, name: &str) -> Result<(), SelectorError> {
        let known =
            name == "device" || self.variables.iter().any(|v| v == name) || TYPE_NAMES.contains(&name);
        if known {
            Ok(())
        } else {
            Err(SelectorError::Compile { problem: format!("undeclared reference to `{name}`") })
        }
    }

    fn function(&self, name: &str, target: Option<&IdedExpr>, arguments: usize) -> Result<(), SelectorError> {
        if is_operator(name) {
            return Ok(());
        }
        let known = match target {
            None => GLOBAL_FUNCTIONS.contains(&name),
            Some(IdedExpr { expr: Expr::Ident(namespace), .. }) if is_namespace_name(namespace) => {
                NAMESPACED_FUNCTIONS.iter().any(|(ns, names)| ns == namespace && names.contains(&name))
            }
            Some(_) => MEMBER_FUNCTIONS.contains(&name),
        };
        if known {
            Ok(())
        } else {
            Err(SelectorError::Unsupported {
                construct: format!("the function `{name}` with {arguments} arguments"),
            })
        }
    }
}

fn is_operator(name: &str) -> bool {
    name.starts_with('_') || name.starts_with('@') || matches!(name, "!_" | "-_")
}

fn is_namespace(expr: &IdedExpr) -> bool {
    matches!(&expr.expr, Expr::Ident(name) if is_namespace_name(name))
}

fn is_namespace_name(name: &str) -> bool {
    NAMESPACED_FUNCTIONS.iter().any(|(ns, _)| *ns == name)
}

/// `cel.bind` expands to a comprehension that never loops.
fn is_bind(loop_cond: &IdedExpr) -> bool {
    matches!(&loop_cond.expr, Expr::Literal(LiteralValue::Boolean(b)) if !*b.inner())
}
