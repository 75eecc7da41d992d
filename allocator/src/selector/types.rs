//! CEL types that occur in selectors, and unification (checker/types.go of cel-go).

use std::fmt;

/// A CEL type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Type {
    /// Known at run time only.
    Dyn,
    Null,
    Bool,
    Int,
    Uint,
    Double,
    String,
    Bytes,
    List(Box<Type>),
    Map(Box<Type>, Box<Type>),
    Optional(Box<Type>),
    /// The type of a type.
    Meta,
    /// A type of Kubernetes' libraries, by name.
    Named(&'static str),
    /// The type of the variable `device`.
    Device,
    /// To be inferred: `A` and `B` of a signature, the element type of `[]`.
    Unknown(usize),
}

pub(super) const QUANTITY: Type = Type::Named("kubernetes.Quantity");
pub(super) const SEMVER: Type = Type::Named("kubernetes.Semver");
pub(super) const IP: Type = Type::Named("net.IP");
pub(super) const CIDR: Type = Type::Named("net.CIDR");

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dyn | Self::Unknown(_) => f.write_str("dyn"),
            Self::Null => f.write_str("null_type"),
            Self::Bool => f.write_str("bool"),
            Self::Int => f.write_str("int"),
            Self::Uint => f.write_str("uint"),
            Self::Double => f.write_str("double"),
            Self::String => f.write_str("string"),
            Self::Bytes => f.write_str("bytes"),
            Self::List(element) => write!(f, "list({element})"),
            Self::Map(key, value) => write!(f, "map({key}, {value})"),
            Self::Optional(value) => write!(f, "optional_type({value})"),
            Self::Meta => f.write_str("type"),
            Self::Named(name) => f.write_str(name),
            Self::Device => f.write_str("kubernetes.DRADevice"),
        }
    }
}

/// Inferred values of the unknown types.
#[derive(Debug, Default)]
pub(super) struct Unification {
    found: Vec<Option<Type>>,
    /// Inferred types in order, so that a failed attempt can be undone. (Copying the state per
    /// attempt made checking quadratic: 10 KiB of `1<1` took minutes.)
    learned: Vec<usize>,
}

/// A state that [`Unification::undo`] restores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    unknowns: usize,
    learned: usize,
}

impl Unification {
    /// Creates an unknown type.
    pub(super) fn fresh(&mut self) -> Type {
        self.found.push(None);
        Type::Unknown(self.found.len() - 1)
    }

    /// Returns a mark of the current state.
    pub(super) fn mark(&self) -> Mark {
        Mark { unknowns: self.found.len(), learned: self.learned.len() }
    }

    /// Restores the state of the mark.
    pub(super) fn undo(&mut self, mark: Mark) {
        for i in self.learned.drain(mark.learned..) {
            self.found[i] = None;
        }
        self.found.truncate(mark.unknowns);
    }

    /// Replaces unknown types by their inferred values.
    pub(super) fn resolve(&self, of: &Type) -> Type {
        match of {
            Type::Unknown(i) => match &self.found[*i] {
                Some(found) => self.resolve(found),
                None => of.clone(),
            },
            Type::List(element) => Type::List(Box::new(self.resolve(element))),
            Type::Map(key, value) => {
                Type::Map(Box::new(self.resolve(key)), Box::new(self.resolve(value)))
            }
            Type::Optional(value) => Type::Optional(Box::new(self.resolve(value))),
            other => other.clone(),
        }
    }

    /// Returns true if a value of type `given` is assignable to `wanted`, and records the inferred
    /// types.
    pub(super) fn admits(&mut self, wanted: &Type, given: &Type) -> bool {
        let mark = self.mark();
        let admitted = self.unify(wanted, given);
        if !admitted {
            self.undo(mark);
        }
        admitted
    }

    fn unify(&mut self, wanted: &Type, given: &Type) -> bool {
        match (self.resolve(wanted), self.resolve(given)) {
            (a, b) if a == b => true,
            (Type::Unknown(i), other) | (other, Type::Unknown(i)) => {
                if self.occurs(i, &other) {
                    return false;
                }
                self.found[i] = Some(other);
                self.learned.push(i);
                true
            }
            (Type::Dyn, _) | (_, Type::Dyn) => true,
            (Type::List(a), Type::List(b)) | (Type::Optional(a), Type::Optional(b)) => {
                self.unify(&a, &b)
            }
            (Type::Map(ka, va), Type::Map(kb, vb)) => self.unify(&ka, &kb) && self.unify(&va, &vb),
            // Optional and object types are nullable.
            (Type::Optional(_) | Type::Named(_), Type::Null)
            | (Type::Null, Type::Optional(_) | Type::Named(_)) => true,
            _ => false,
        }
    }

    fn occurs(&self, unknown: usize, within: &Type) -> bool {
        match within {
            Type::Unknown(i) => *i == unknown,
            Type::List(a) | Type::Optional(a) => self.occurs(unknown, &self.resolve(a)),
            Type::Map(a, b) => {
                self.occurs(unknown, &self.resolve(a)) || self.occurs(unknown, &self.resolve(b))
            }
            _ => false,
        }
    }
}

/// An overload of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Overload {
    /// True for `x.f(...)`; `x` is then the first parameter.
    pub(super) member: bool,
    pub(super) parameters: Vec<Type>,
    pub(super) result: Type,
}

impl Overload {
    /// Parses a signature: `(string, int) string`, `list(A).(A) bool`. `A` and `B` are the unknown
    /// types 0 and 1.
    ///
    /// # Panics
    /// Panics if the signature is invalid; all signatures are constants.
    pub(super) fn parse(signature: &str) -> Self {
        let mut reader = Reader { rest: signature };
        let receiver = (!reader.rest.starts_with('(')).then(|| reader.receiver());
        reader.expect("(");
        let mut parameters: Vec<Type> = receiver.clone().into_iter().collect();
        while !reader.accept(")") {
            parameters.push(reader.one());
            reader.accept(", ");
        }
        reader.expect(" ");
        let result = reader.one();
        assert!(reader.rest.is_empty(), "invariant: signature `{signature}` is valid");
        Self { member: receiver.is_some(), parameters, result }
    }

    /// Returns the overload with fresh unknown types.
    pub(super) fn instantiate(&self, unification: &mut Unification) -> Self {
        let own = [unification.fresh(), unification.fresh()];
        let put = |of: &Type| replace(of, &own);
        Self {
            member: self.member,
            parameters: self.parameters.iter().map(put).collect(),
            result: put(&self.result),
        }
    }
}

fn replace(of: &Type, own: &[Type; 2]) -> Type {
    match of {
        Type::Unknown(i) => own[*i].clone(),
        Type::List(a) => Type::List(Box::new(replace(a, own))),
        Type::Optional(a) => Type::Optional(Box::new(replace(a, own))),
        Type::Map(a, b) => Type::Map(Box::new(replace(a, own)), Box::new(replace(b, own))),
        other => other.clone(),
    }
}

struct Reader<'t> {
    rest: &'t str,
}

impl Reader<'_> {
    fn accept(&mut self, token: &str) -> bool {
        let found = self.rest.strip_prefix(token);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    fn expect(&mut self, token: &str) {
        assert!(self.accept(token), "invariant: `{token}` at `{}` of a signature", self.rest);
    }

    fn receiver(&mut self) -> Type {
        let receiver = self.one();
        self.expect(".");
        receiver
    }

    fn one(&mut self) -> Type {
        if self.accept("list(") {
            return Type::List(self.inner(")"));
        }
        if self.accept("map(") {
            let key = self.inner(", ");
            return Type::Map(key, self.inner(")"));
        }
        if self.accept("optional(") {
            return Type::Optional(self.inner(")"));
        }
        const NAMES: [(&str, Type); 15] = [
            ("quantity", QUANTITY),
            ("semver", SEMVER),
            ("ip", IP),
            ("cidr", CIDR),
            ("bool", Type::Bool),
            ("int", Type::Int),
            ("uint", Type::Uint),
            ("double", Type::Double),
            ("string", Type::String),
            ("bytes", Type::Bytes),
            ("dyn", Type::Dyn),
            ("null", Type::Null),
            ("type", Type::Meta),
            ("A", Type::Unknown(0)),
            ("B", Type::Unknown(1)),
        ];
        let found = NAMES.iter().find(|(name, _)| self.accept(name));
        found
            .unwrap_or_else(|| panic!("invariant: no type at `{}` of a signature", self.rest))
            .1
            .clone()
    }

    fn inner(&mut self, end: &str) -> Box<Type> {
        let inner = self.one();
        self.expect(end);
        Box::new(inner)
    }
}
