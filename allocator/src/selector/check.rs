//! Type checker: expands macros, resolves names and infers types, and returns [`Code`].
//!
//! An expression that upstream does not compile must never match a device, even if the other
//! operand of a logical operator would decide. So types are checked once per expression, by the
//! rules of cel-go (checker/checker.go).

use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, ListExpr, LiteralValue, MapExpr,
    SelectExpr, operators,
};

use super::code::{Access, Code, Fold};
use super::error::SelectorError;
use super::functions::{self, Function};
use super::macros;
use super::types::{QUANTITY, Type, Unification};
use super::value::Value;

/// Namespaces of functions: `sets.contains(a, b)` is not a call on a variable `sets`.
const NAMESPACES: &[&str] = &["cel", "format", "ip", "lists", "optional", "sets", "strings"];

/// Type names that are valid as values, for `type(x) == string`.
const TYPE_NAMES: &[&str] = &[
    "bool",
    "bytes",
    "double",
    "int",
    "list",
    "map",
    "null_type",
    "optional_type",
    "string",
    "type",
    "uint",
];

/// Maximum nesting; deeper code could exhaust the stack of the evaluator.
const MAX_DEPTH: usize = 256;

/// Maximum number of nodes. Macros that repeat their target (`optMap`, `sortBy`) double it with
/// each call in a chain. An expression of 10 KiB without them has a twentieth of this.
const MAX_PARTS: usize = 100_000;

/// Checked code, with the number of its variables.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) code: Code,
    pub(super) variables: usize,
    /// Approximate number of nodes of the code.
    pub(super) parts: usize,
}

/// Checks a selector.
///
/// # Errors
/// Returns an error if the expression is invalid in the environment or cannot evaluate to a
/// boolean.
pub(super) fn check(expr: &IdedExpr) -> Result<Checked, SelectorError> {
    let mut checker = Checker::default();
    let (code, found) = checker.expr(&expr.expr)?;
    let found = checker.types.resolve(&found);
    match found {
        // An unknown type is resolved at run time.
        Type::Bool | Type::Dyn | Type::Unknown(_) => {
            Ok(Checked { code, variables: checker.variables, parts: checker.parts })
        }
        other => Err(SelectorError::compile(format!(
            "must evaluate to bool or the unknown type, not {other}"
        ))),
    }
}

#[derive(Default)]
struct Checker {
    scope: Vec<(String, usize, Type)>,
    variables: usize,
    types: Unification,
    /// Nesting depth of calls whose arguments may have mixed types.
    mixed: usize,
    depth: usize,
    parts: usize,
}

type Typed = Result<(Code, Type), SelectorError>;

impl Checker {
    fn expr(&mut self, expr: &Expr) -> Typed {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(SelectorError::compile(format!("nesting exceeds {MAX_DEPTH} levels")));
        }
        self.parts += 1;
        if self.parts > MAX_PARTS {
            let problem =
                format!("expression has more than {MAX_PARTS} nodes after macro expansion");
            return Err(SelectorError::compile(problem));
        }
        let typed = self.expr_within(expr);
        self.depth -= 1;
        typed
    }

    fn expr_within(&mut self, expr: &Expr) -> Typed {
        match expr {
            Expr::Unspecified => Err(SelectorError::compile("empty expression".to_owned())),
            Expr::Literal(literal) => Ok(constant(literal)),
            Expr::Ident(name) => self.ident(name),
            Expr::Select(select) => self.select(select),
            Expr::List(list) => self.list(list),
            Expr::Map(map) => self.map(map),
            Expr::Struct(s) => {
                Err(SelectorError::compile(format!("undeclared reference to '{}'", s.type_name)))
            }
            Expr::Call(call) => match macros::expand(call)? {
                Some(expanded) => self.expr(&expanded),
                None => self.call(call),
            },
            Expr::Comprehension(comprehension) => self.comprehension(comprehension),
        }
    }

    fn ident(&self, name: &str) -> Typed {
        if let Some((_, index, found)) = self.scope.iter().rev().find(|(known, ..)| known == name) {
            return Ok((Code::Variable(*index), found.clone()));
        }
        match name {
            "device" => Ok((Code::Constant(Value::Device), Type::Device)),
            name if TYPE_NAMES.contains(&name) => {
                Ok((Code::Constant(Value::Type(name.into())), Type::Meta))
            }
            name => Err(SelectorError::compile(format!("undeclared reference to '{name}'"))),
        }
    }

    fn select(&mut self, select: &SelectExpr) -> Typed {
        let access = if select.test { Access::Presence } else { Access::Plain };
        self.field(&select.operand.expr, &select.field, access)
    }

    fn field(&mut self, of: &Expr, field: &str, access: Access) -> Typed {
        let (of, container) = self.expr(of)?;
        let container = self.types.resolve(&container);
        let (inner, wrapped) = match container {
            Type::Optional(inner) => (self.types.resolve(&inner), true),
            other => (other, false),
        };
        let found = field_type(&inner, field)?;
        let code = Code::Select { of: Box::new(of), field: field.into(), access };
        let found = match access {
            Access::Presence => Type::Bool,
            Access::Plain if !wrapped => found,
            _ => Type::Optional(Box::new(found)),
        };
        Ok((code, found))
    }

    fn list(&mut self, list: &ListExpr) -> Typed {
        let mut joined = None;
        let mut elements = Vec::with_capacity(list.elements.len());
        for (i, element) in list.elements.iter().enumerate() {
            let optional = list.optional_indices.contains(&i);
            let (code, found) = self.entry(&element.expr, optional)?;
            self.join(&mut joined, found)?;
            elements.push((code, optional));
        }
        let element = joined.unwrap_or_else(|| self.types.fresh());
        Ok((Code::List(elements), Type::List(Box::new(element))))
    }

    fn map(&mut self, map: &MapExpr) -> Typed {
        let (mut keys, mut values) = (None, None);
        let mut entries = Vec::with_capacity(map.entries.len());
        for entry in &map.entries {
            let EntryExpr::MapEntry(entry) = &entry.expr else {
                return Err(SelectorError::compile("expected a key but found a field".to_owned()));
            };
            let (key, key_type) = self.expr(&entry.key.expr)?;
            self.join(&mut keys, key_type)?;
            let (value, value_type) = self.entry(&entry.value.expr, entry.optional)?;
            self.join(&mut values, value_type)?;
            entries.push((key, value, entry.optional));
        }
        let key = keys.unwrap_or_else(|| self.types.fresh());
        let value = values.unwrap_or_else(|| self.types.fresh());
        Ok((Code::Map(entries), Type::Map(Box::new(key), Box::new(value))))
    }

    /// Checks an element or a value; an optional one must have an optional type.
    fn entry(&mut self, expr: &Expr, optional: bool) -> Typed {
        let (code, found) = self.expr(expr)?;
        if !optional {
            return Ok((code, found));
        }
        let inner = self.types.fresh();
        if !self.types.admits(&Type::Optional(Box::new(inner.clone())), &found) {
            return Err(SelectorError::compile(
                "optional element is not of an optional type".to_owned(),
            ));
        }
        Ok((code, inner))
    }

    /// Merges element types. Lists and maps have values of one type (`dyn` is a type of its own),
    /// except in arguments of `format`.
    fn join(&mut self, joined: &mut Option<Type>, next: Type) -> Result<(), SelectorError> {
        let Some(known) = joined else {
            *joined = Some(next);
            return Ok(());
        };
        let alike = self.types.admits(known, &next);
        let (one, other) = (self.types.resolve(known), self.types.resolve(&next));
        if alike && one == other {
            return Ok(());
        }
        if self.mixed == 0 {
            return Err(SelectorError::compile(format!(
                "expected type '{one}' but found '{other}'"
            )));
        }
        *known = Type::Dyn;
        Ok(())
    }

    fn call(&mut self, call: &CallExpr) -> Typed {
        match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::LOGICAL_AND, [a, b]) => self.logical(a, b, Code::And),
            (operators::LOGICAL_OR, [a, b]) => self.logical(a, b, Code::Or),
            (operators::CONDITIONAL, [condition, yes, no]) => self.conditional(condition, yes, no),
            (operators::NOT_STRICTLY_FALSE, [a]) => {
                Ok((Code::NotStrictlyFalse(Box::new(self.boolean(a)?)), Type::Bool))
            }
            (operators::INDEX, [of, key]) => self.index(of, key, false),
            (operators::OPT_INDEX, [of, key]) => self.index(of, key, true),
            (operators::OPT_SELECT, [of, field]) => match &field.expr {
                Expr::Literal(LiteralValue::String(field)) => {
                    self.field(&of.expr, field.inner(), Access::Optional)
                }
                _ => Err(SelectorError::compile("`.?` requires a field name".to_owned())),
            },
            _ => self.function(call),
        }
    }

    fn logical(&mut self, a: &IdedExpr, b: &IdedExpr, code: fn(Box<[Code; 2]>) -> Code) -> Typed {
        let operands = [self.boolean(a)?, self.boolean(b)?];
        Ok((code(Box::new(operands)), Type::Bool))
    }

    fn boolean(&mut self, expr: &IdedExpr) -> Result<Code, SelectorError> {
        let (code, found) = self.expr(&expr.expr)?;
        if self.types.admits(&Type::Bool, &found) {
            Ok(code)
        } else {
            let found = self.types.resolve(&found);
            Err(SelectorError::compile(format!("expected type 'bool' but found '{found}'")))
        }
    }

    fn conditional(&mut self, condition: &IdedExpr, yes: &IdedExpr, no: &IdedExpr) -> Typed {
        let condition = self.boolean(condition)?;
        let (yes, found) = self.expr(&yes.expr)?;
        let (no, other) = self.expr(&no.expr)?;
        if !self.types.admits(&found, &other) {
            return Err(self.no_overload("_?_:_", &[Type::Bool, found, other]));
        }
        let found = if self.types.resolve(&other) == Type::Dyn { Type::Dyn } else { found };
        Ok((Code::Conditional(Box::new([condition, yes, no])), found))
    }

    fn index(&mut self, of: &IdedExpr, key: &IdedExpr, optional: bool) -> Typed {
        let (of, container) = self.expr(&of.expr)?;
        let (key, key_type) = self.expr(&key.expr)?;
        let (inner, wrapped) = match self.types.resolve(&container) {
            Type::Optional(inner) => (self.types.resolve(&inner), true),
            other => (other, false),
        };
        let element = match &inner {
            Type::Dyn | Type::Unknown(_) => Some(Type::Dyn),
            Type::List(element) => {
                self.types.admits(&Type::Int, &key_type).then(|| (**element).clone())
            }
            Type::Map(wanted, value) => {
                self.types.admits(wanted, &key_type).then(|| (**value).clone())
            }
            _ => None,
        };
        let Some(element) = element else {
            return Err(
                self.no_overload(if optional { "_[?_]" } else { "_[_]" }, &[container, key_type])
            );
        };
        let found = if optional || wrapped { Type::Optional(Box::new(element)) } else { element };
        Ok((Code::Index { of: Box::new(of), key: Box::new(key), optional }, found))
    }

    fn function(&mut self, call: &CallExpr) -> Typed {
        let (name, target) = self.qualified(call);
        let mixes = usize::from(name == "format");
        self.mixed += mixes;
        let mut arguments = Vec::with_capacity(call.args.len() + 1);
        let mut given = Vec::with_capacity(call.args.len() + 1);
        for expr in target.into_iter().chain(&call.args) {
            let (code, found) = self.expr(&expr.expr)?;
            arguments.push(code);
            given.push(found);
        }
        self.mixed -= mixes;
        let function = functions::find(&name)?;
        let result = self.resolve_overload(function, target.is_some(), &given)?;
        functions::check_literals(function, &arguments)?;
        Ok((lazily(function, arguments), result))
    }

    /// Returns the full function name and the target of the call.
    fn qualified<'c>(&self, call: &'c CallExpr) -> (String, Option<&'c IdedExpr>) {
        let target = call.target.as_deref();
        if let Some(IdedExpr { expr: Expr::Ident(namespace), .. }) = target
            && NAMESPACES.contains(&namespace.as_str())
            && !self.scope.iter().any(|(known, ..)| known == namespace)
        {
            return (format!("{namespace}.{}", call.func_name), None);
        }
        (call.func_name.clone(), target)
    }

    /// Returns the result type of the matching overloads; `dyn` if they differ.
    fn resolve_overload(
        &mut self,
        function: &Function,
        member: bool,
        given: &[Type],
    ) -> Result<Type, SelectorError> {
        let mut result: Option<Type> = None;
        for overload in function.overloads() {
            if overload.member != member || overload.parameters.len() != given.len() {
                continue;
            }
            let mark = self.types.mark();
            let overload = overload.instantiate(&mut self.types);
            if !overload
                .parameters
                .iter()
                .zip(given)
                .all(|(wanted, given)| self.types.admits(wanted, given))
            {
                self.types.undo(mark);
                continue;
            }
            let next = self.types.resolve(&overload.result);
            result = Some(match result {
                Some(known) if known != next => Type::Dyn,
                _ => next,
            });
        }
        result.ok_or_else(|| self.no_overload(function.name, given))
    }

    fn no_overload(&self, function: &str, given: &[Type]) -> SelectorError {
        let given: Vec<String> = given.iter().map(|g| self.types.resolve(g).to_string()).collect();
        SelectorError::compile(format!(
            "found no matching overload for '{function}' applied to '({})'",
            given.join(", ")
        ))
    }

    fn comprehension(&mut self, c: &ComprehensionExpr) -> Typed {
        let (range, range_type) = self.expr(&c.iter_range.expr)?;
        let (initial, accumulated) = self.expr(&c.accu_init.expr)?;
        let (key, element) = match self.types.resolve(&range_type) {
            Type::List(element) => (Type::Int, *element),
            Type::Map(key, value) if c.iter_var2.is_some() => (*key, *value),
            Type::Map(key, _) => (Type::Dyn, *key),
            Type::Dyn | Type::Unknown(_) => (Type::Dyn, Type::Dyn),
            other => {
                let problem = format!(
                    "expression of type '{other}' cannot be range of a comprehension (must be list, map, or dynamic)"
                );
                return Err(SelectorError::compile(problem));
            }
        };
        let depth = self.scope.len();
        let accumulator = self.declare(&c.accu_var, accumulated.clone());
        let (first, second) = match &c.iter_var2 {
            Some(second) => (self.declare(&c.iter_var, key), Some(self.declare(second, element))),
            None => (self.declare(&c.iter_var, element), None),
        };
        let condition = self.boolean(&c.loop_cond)?;
        let (step, stepped) = self.expr(&c.loop_step.expr)?;
        if !self.types.admits(&accumulated, &stepped) {
            return Err(self.no_overload("a comprehension", &[accumulated, stepped]));
        }
        // The result expression sees the accumulator only.
        self.scope.truncate(depth + 1);
        let (result, found) = self.expr(&c.result.expr)?;
        self.scope.truncate(depth);
        let range = range.with_constant_list();
        let fold = Fold { range, first, second, accumulator, initial, condition, step, result };
        Ok((Code::Fold(Box::new(fold)), found))
    }

    fn declare(&mut self, name: &str, of: Type) -> usize {
        let index = self.scope.len();
        self.variables = self.variables.max(index + 1);
        self.scope.push((name.to_owned(), index, of));
        index
    }
}

fn constant(literal: &LiteralValue) -> (Code, Type) {
    let (value, found) = match literal {
        LiteralValue::Boolean(b) => (Value::Bool(*b.inner()), Type::Bool),
        LiteralValue::Bytes(b) => (Value::Bytes(b.inner().into()), Type::Bytes),
        LiteralValue::Double(d) => (Value::Double(*d.inner()), Type::Double),
        LiteralValue::Int(i) => (Value::Int(*i.inner()), Type::Int),
        LiteralValue::Null => (Value::Null, Type::Null),
        LiteralValue::String(s) => (Value::string(s.inner()), Type::String),
        LiteralValue::UInt(u) => (Value::Uint(*u.inner()), Type::Uint),
    };
    (Code::Constant(value), found)
}

/// Returns the type of a field of a container.
fn field_type(container: &Type, field: &str) -> Result<Type, SelectorError> {
    let by_domain = |of: Type| {
        let inner = Type::Map(Box::new(Type::String), Box::new(of));
        Type::Map(Box::new(Type::String), Box::new(inner))
    };
    match (container, field) {
        (Type::Device, "driver") => Ok(Type::String),
        (Type::Device, "allowMultipleAllocations") => Ok(Type::Bool),
        (Type::Device, "attributes") => Ok(by_domain(Type::Dyn)),
        (Type::Device, "capacity") => Ok(by_domain(QUANTITY)),
        (Type::Device, _) => Err(SelectorError::compile(format!("undefined field '{field}'"))),
        (Type::Map(_, value), _) => Ok((**value).clone()),
        (Type::Dyn | Type::Unknown(_), _) => Ok(Type::Dyn),
        (other, _) => {
            Err(SelectorError::compile(format!("type '{other}' does not support field selection")))
        }
    }
}

/// Compiles a call; `or` and `orValue` of an optional evaluate their argument only if needed.
fn lazily(function: &'static Function, mut arguments: Vec<Code>) -> Code {
    let unwrap = function.name == "orValue";
    if (unwrap || function.name == "or") && arguments.len() == 2 {
        let second = Box::new(arguments.remove(1));
        return Code::OrElse { first: Box::new(arguments.remove(0)), second, unwrap };
    }
    let arguments = arguments.into_iter().map(Code::with_constant_list).collect();
    Code::Call { function, arguments }
}
