//! Classes of functions for the interceptor.

/// Class of a function: the reason for a hook, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Allocates or frees GPU memory, or keeps memory of another process alive.
    Memory,
    /// Launches work on the multiprocessors.
    Launch,
    /// Reports memory, or the processes that hold it.
    Reports,
    /// Returns functions.
    Resolves,
    /// Creates or destroys a context.
    Context,
    /// Synchronizes, at which pools release memory that they keep.
    Waits,
    /// Not hooked.
    Passes,
}

/// A function by the name that its forms share, and its class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classified {
    /// See [`Symbol::base`](crate::Symbol::base).
    pub base: &'static str,
    /// Its class.
    pub class: Class,
    /// Its effect; of one that [passes](Class::Passes), the reason.
    pub why: &'static str,
}

/// The class of every function, in the order of `classes.txt`.
pub const CLASSES: &[Classified] = include!(concat!(env!("OUT_DIR"), "/classes.rs"));

impl Class {
    /// Returns its name in `classes.txt`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Launch => "launch",
            Self::Reports => "reports",
            Self::Resolves => "resolves",
            Self::Context => "context",
            Self::Waits => "waits",
            Self::Passes => "passes",
        }
    }

    /// Returns true if each form of such a function needs a hook.
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
