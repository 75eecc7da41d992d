//! What a function means to the interceptor.

/// Whether the interceptor stands before a function, and what for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Takes memory of a GPU, gives it back, or makes another's last as long as it is held here.
    Memory,
    /// Starts work on the multiprocessors.
    Launch,
    /// Says how much memory there is, or who holds it.
    Tells,
    /// Hands out functions.
    Resolves,
    /// Begins or ends a context.
    Context,
    /// Waits for the GPU, which is when pools release memory that they keep.
    Waits,
    /// Nobody stands before it.
    Passes,
}

/// A function, by the name that its forms share, and its class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classified {
    /// See [`Symbol::base`](crate::Symbol::base).
    pub base: &'static str,
    /// Its class.
    pub class: Class,
    /// What it does; of one that [passes](Class::Passes), why it may.
    pub why: &'static str,
}

/// The class of every function, in the order of `classes.txt`.
pub const CLASSES: &[Classified] = include!(concat!(env!("OUT_DIR"), "/classes.rs"));

impl Class {
    /// As `classes.txt` calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Launch => "launch",
            Self::Tells => "tells",
            Self::Resolves => "resolves",
            Self::Context => "context",
            Self::Waits => "waits",
            Self::Passes => "passes",
        }
    }

    /// Whether each form of such a function needs a hook.
    pub const fn is_hooked(self) -> bool {
        !matches!(self, Self::Passes)
    }
}

/// The class of a function; `None` for a function that is not in `classes.txt`.
pub const fn class_of(base: &str) -> Option<Classified> {
    let mut at = 0;
    while at < CLASSES.len() {
        if crate::compare(CLASSES[at].base.as_bytes(), base.as_bytes()) == 0 {
            return Some(CLASSES[at]);
        }
        at += 1;
    }
    None
}
