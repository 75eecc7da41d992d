//! Evaluation of [`Code`] on one device, with the semantics and costs of cel-go.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::code::{Access, Code, Fold};
use super::cost;
use super::error::EvaluationLimit;
use super::functions::Function;
use super::value::{Key, Map, Value};
use super::view::Fields;
use super::work;

/// Error of an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EvalError {
    /// An error that a logical operator can absorb.
    Error(String),
    /// A limit is exceeded; the evaluation stops.
    TooExpensive(EvaluationLimit),
}

/// Evaluates `code` with this number of variables. The second element is work plus cost.
///
/// # Errors
/// See [`EvalError`].
pub(super) fn evaluate(
    code: &Code,
    variables: usize,
    device: &Fields,
) -> (Result<Value, EvalError>, u64) {
    let mut evaluator =
        Evaluator { device, variables: vec![Ok(Value::Null); variables], cost: 0, work: 0 };
    let value = evaluator.value(code);
    (value, evaluator.work.saturating_add(evaluator.cost))
}

struct Evaluator<'a> {
    device: &'a Fields,
    variables: Vec<Evaluated>,
    cost: u64,
    /// Actual work, see [`work`].
    work: u64,
}

type Evaluated = Result<Value, EvalError>;

fn error(problem: impl Into<String>) -> EvalError {
    EvalError::Error(problem.into())
}

impl Evaluator<'_> {
    fn add_cost(&mut self, cost: u64) -> Result<(), EvalError> {
        self.cost = self.cost.saturating_add(cost);
        if self.cost > cost::LIMIT {
            return Err(EvalError::TooExpensive(EvaluationLimit::Cost));
        }
        Ok(())
    }

    fn add_work(&mut self, work: u64) -> Result<(), EvalError> {
        self.work = self.work.saturating_add(work);
        if self.work > work::LIMIT {
            return Err(EvalError::TooExpensive(EvaluationLimit::Work));
        }
        Ok(())
    }

    fn value(&mut self, code: &Code) -> Evaluated {
        match code {
            Code::Constant(Value::Device) => {
                self.add_cost(1)?;
                Ok(Value::Device)
            }
            Code::Constant(value) => Ok(value.clone()),
            Code::Variable(index) => {
                self.add_cost(1)?;
                self.variables[*index].clone()
            }
            Code::Select { of, field, access } => self.select(of, field, *access),
            Code::Index { of, key, optional } => self.index(of, key, *optional),
            Code::And(operands) => self.logical(operands, false),
            Code::Or(operands) => self.logical(operands, true),
            Code::Conditional(parts) => self.conditional(parts),
            Code::NotStrictlyFalse(of) => self.not_strictly_false(of),
            Code::OrElse { first, second, unwrap } => self.or_else(first, second, *unwrap),
            Code::Call { function, arguments } => match arguments.as_slice() {
                // Without an allocation: most calls are operators.
                [a] => {
                    let arguments = [self.value(a)?];
                    self.call(function, &arguments)
                }
                [a, b] => {
                    let arguments = [self.value(a)?, self.value(b)?];
                    self.call(function, &arguments)
                }
                arguments => {
                    let arguments = arguments.iter().map(|a| self.value(a));
                    let arguments = arguments.collect::<Result<Vec<_>, _>>()?;
                    self.call(function, &arguments)
                }
            },
            Code::List(elements) => self.list(elements),
            Code::ConstantList(list) => {
                self.add_cost(cost::LIST)?;
                Ok(list.clone())
            }
            Code::Map(entries) => self.map(entries),
            Code::Fold(fold) => self.fold(fold),
        }
    }

    fn call(&mut self, function: &Function, arguments: &[Value]) -> Evaluated {
        self.add_work(function.work.of(arguments))?;
        let result = function.call(arguments);
        self.add_work(result.as_ref().map_or(0, work::extent))?;
        self.add_cost(function.cost.of(arguments, result.as_ref().ok()))?;
        result.map_err(EvalError::Error)
    }

    fn select(&mut self, of: &Code, field: &Arc<str>, access: Access) -> Evaluated {
        let container = self.value(of)?;
        self.add_cost(1)?;
        let key = Value::String(Arc::clone(field));
        match (container, access) {
            (Value::Optional(None), Access::Presence) => Ok(Value::Bool(false)),
            (Value::Optional(None), _) => Ok(Value::Optional(None)),
            (Value::Optional(Some(inner)), Access::Presence) => {
                Ok(Value::Bool(self.lookup(&inner, &key)?.is_some()))
            }
            (Value::Optional(Some(inner)), _) => Ok(optional(self.lookup(&inner, &key)?)),
            (container, Access::Presence) => {
                // As upstream, a domain without attributes is present: its default is an empty map.
                Ok(Value::Bool(self.lookup(&container, &key)?.is_some()))
            }
            (container, Access::Optional) => Ok(optional(self.lookup(&container, &key)?)),
            (container, Access::Plain) => {
                self.lookup(&container, &key)?.ok_or_else(|| error(format!("no such key: {field}")))
            }
        }
    }

    fn index(&mut self, of: &Code, key: &Code, is_optional: bool) -> Evaluated {
        let container = self.value(of)?;
        let key = self.value(key)?;
        self.add_cost(1)?;
        match container {
            Value::Optional(None) => Ok(Value::Optional(None)),
            Value::Optional(Some(inner)) => Ok(optional(self.lookup(&inner, &key)?)),
            container if is_optional => Ok(optional(self.lookup(&container, &key)?)),
            container => {
                let found = self.lookup(&container, &key)?;
                found.ok_or_else(|| error(format!("no such key: {}", display_key(&key))))
            }
        }
    }

    /// Returns the value for the key, if present.
    fn lookup(&self, container: &Value, key: &Value) -> Result<Option<Value>, EvalError> {
        match (container, key) {
            (Value::Device, Value::String(field)) => Ok(self.device.field(field)),
            (Value::Map(map), key) if Key::of(key).is_some() => Ok(map.get(key)),
            (Value::List(list), key) => {
                let Some(Key::Number(i)) = Key::of(key) else {
                    return Err(error(format!(
                        "unsupported index type '{}' in list",
                        key.type_name()
                    )));
                };
                Ok(usize::try_from(i).ok().and_then(|i| list.get(i)).cloned())
            }
            (container, key) => Err(error(format!(
                "no such overload: {}[{}]",
                container.type_name(),
                key.type_name()
            ))),
        }
    }

    /// Evaluates a logical operator. `decisive` is the absorbing value: false for `&&`, true for
    /// `||`. Without it, an error of either operand is the result.
    fn logical(&mut self, operands: &[Code; 2], decisive: bool) -> Evaluated {
        let mut failed = None;
        for operand in operands {
            match self.value(operand) {
                Ok(Value::Bool(value)) if value == decisive => return Ok(Value::Bool(decisive)),
                Ok(Value::Bool(_)) => {}
                Ok(other) => {
                    failed.get_or_insert_with(|| {
                        error(format!("no such overload: {} instead of bool", other.type_name()))
                    });
                }
                Err(error @ EvalError::TooExpensive(_)) => return Err(error),
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        }
        failed.map_or(Ok(Value::Bool(!decisive)), Err)
    }

    fn conditional(&mut self, [condition, yes, no]: &[Code; 3]) -> Evaluated {
        match self.value(condition)? {
            Value::Bool(true) => self.value(yes),
            Value::Bool(false) => self.value(no),
            other => Err(error(format!("no such overload: {} as condition", other.type_name()))),
        }
    }

    fn not_strictly_false(&mut self, of: &Code) -> Evaluated {
        let value = self.value(of);
        self.add_cost(1)?;
        match value {
            Ok(Value::Bool(false)) => Ok(Value::Bool(false)),
            Err(error @ EvalError::TooExpensive(_)) => Err(error),
            _ => Ok(Value::Bool(true)),
        }
    }

    fn or_else(&mut self, first: &Code, second: &Code, unwrap: bool) -> Evaluated {
        let value = self.value(first)?;
        self.add_cost(1)?;
        match (value, unwrap) {
            (Value::Optional(Some(inner)), true) => Ok(inner.as_ref().clone()),
            (Value::Optional(Some(inner)), false) => Ok(Value::Optional(Some(inner))),
            (Value::Optional(None), _) => self.value(second),
            (other, _) => {
                Err(error(format!("no such overload: {} instead of optional", other.type_name())))
            }
        }
    }

    fn list(&mut self, elements: &[(Code, bool)]) -> Evaluated {
        let mut list = Vec::with_capacity(elements.len());
        for (code, is_optional) in elements {
            let value = self.value(code)?;
            match (value, is_optional) {
                (value, false) => list.push(value),
                (Value::Optional(inner), true) => {
                    list.extend(inner.map(|value| value.as_ref().clone()))
                }
                (other, true) => {
                    return Err(error(format!(
                        "{} instead of optional as an element",
                        other.type_name()
                    )));
                }
            }
        }
        self.add_cost(cost::LIST)?;
        Ok(Value::list(list))
    }

    fn map(&mut self, entries: &[(Code, Code, bool)]) -> Evaluated {
        let mut map = Map::default();
        for (key, value, is_optional) in entries {
            let (key, value) = (self.value(key)?, self.value(value)?);
            let value = match (value, is_optional) {
                (value, false) => value,
                (Value::Optional(Some(inner)), true) => inner.as_ref().clone(),
                (Value::Optional(None), true) => continue,
                (other, true) => {
                    return Err(error(format!(
                        "{} instead of optional as an entry",
                        other.type_name()
                    )));
                }
            };
            let key = Key::of(&key)
                .ok_or_else(|| error(format!("unsupported key type: {}", key.type_name())))?;
            map.entries.insert(key, value);
        }
        self.add_cost(cost::MAP)?;
        Ok(Value::Map(Arc::new(map)))
    }

    fn fold(&mut self, fold: &Fold) -> Evaluated {
        let range = self.value(&fold.range)?;
        self.variables[fold.accumulator] = self.absorbable(&fold.initial)?;
        self.add_work(work::extent(&range))?;
        match &range {
            Value::List(list) => {
                for (index, element) in (0..).zip(list.iter()) {
                    let pair = (Value::Int(index), element.clone());
                    if self.iterate(fold, pair, false)?.is_break() {
                        break;
                    }
                }
            }
            Value::Map(map) => {
                for (key, value) in &map.entries {
                    if self.iterate(fold, (key.value(), value.clone()), true)?.is_break() {
                        break;
                    }
                }
            }
            other => return Err(error(format!("cannot iterate over {}", other.type_name()))),
        }
        self.value(&fold.result)
    }

    /// Evaluates one iteration over an index and an element of a list, or over a key and a value of
    /// a map. With one variable, only the element or the key is used.
    fn iterate(
        &mut self,
        fold: &Fold,
        (key, element): (Value, Value),
        is_map: bool,
    ) -> Result<ControlFlow<()>, EvalError> {
        match fold.second {
            Some(second) => {
                self.variables[fold.first] = Ok(key);
                self.variables[second] = Ok(element);
            }
            None => self.variables[fold.first] = Ok(if is_map { key } else { element }),
        }
        // An error does not end the loop: a later element can absorb it.
        if matches!(self.absorbable(&fold.condition)?, Ok(Value::Bool(false))) {
            return Ok(ControlFlow::Break(()));
        }
        self.variables[fold.accumulator] = self.absorbable(&fold.step)?;
        Ok(ControlFlow::Continue(()))
    }

    /// Evaluates to a value or an absorbable error.
    fn absorbable(&mut self, code: &Code) -> Result<Evaluated, EvalError> {
        match self.value(code) {
            Err(error @ EvalError::TooExpensive(_)) => Err(error),
            evaluated => Ok(evaluated),
        }
    }
}

fn optional(found: Option<Value>) -> Value {
    found.map_or(Value::Optional(None), Value::some)
}

fn display_key(key: &Value) -> String {
    match key {
        Value::String(s) => s.to_string(),
        Value::Int(i) => i.to_string(),
        other => other.type_name().to_owned(),
    }
}
