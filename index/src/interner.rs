//! One copy of values that many objects have: pods of one Deployment, claims of one template.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

/// The least number of values before unused ones are removed.
const FIRST_PURGE: usize = 64;

/// Values that are kept once. Memory and time are those of the values in use: unused ones are
/// removed whenever their number could have doubled.
#[derive(Debug)]
pub(crate) struct Interner<T: ?Sized> {
    values: HashSet<Arc<T>>,
    purge_at: usize,
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { values: HashSet::new(), purge_at: FIRST_PURGE }
    }
}

impl<T: Hash + Eq + ?Sized> Interner<T> {
    /// Returns the copy that is kept of an equal value.
    pub(crate) fn intern(&mut self, value: Arc<T>) -> Arc<T> {
        if let Some(known) = self.values.get(&value) {
            return Arc::clone(known);
        }
        if self.values.len() >= self.purge_at {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.purge_at = FIRST_PURGE.max(2 * self.values.len());
        }
        self.values.insert(Arc::clone(&value));
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_kept_once() {
        let mut interner = Interner::<str>::default();
        let first = interner.intern("a".into());
        assert!(Arc::ptr_eq(&first, &interner.intern("a".into())));
        assert!(!Arc::ptr_eq(&first, &interner.intern("b".into())));
    }

    #[test]
    fn unused_values_are_removed() {
        let mut interner = Interner::<str>::default();
        let kept = interner.intern("kept".into());
        for number in 0..10_000 {
            interner.intern(number.to_string().into());
        }
        assert!(interner.values.len() <= 2 * FIRST_PURGE, "{}", interner.values.len());
        assert!(Arc::ptr_eq(&kept, &interner.intern("kept".into())));
    }
}
