//! Maps of keys to sets of values. As a rule a set has one value, for which a `BTreeSet` would take
//! 190 bytes more.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Bound;

use litemap::LiteMap;

/// A map of keys to sets of values, without keys whose set is empty.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Multimap<K: Ord, V: Ord>(BTreeMap<K, LiteMap<V, ()>>);

impl<K: Ord, V: Ord> Default for Multimap<K, V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord, V: Ord> Multimap<K, V> {
    /// Adds `value` to the set of `key`.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        let values = self.0.entry(key).or_insert_with(|| LiteMap::with_capacity(1));
        values.insert(value, ());
    }

    /// Removes `value` from the set of `key`, and the key with its last value.
    pub(crate) fn remove<Q>(&mut self, key: &K, value: &Q)
    where
        V: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        if let Some(values) = self.0.get_mut(key) {
            values.remove(value);
            if values.is_empty() {
                self.0.remove(key);
            }
        }
    }

    /// Returns the values of `key`, in order.
    pub(crate) fn get<'s, Q>(&'s self, key: &Q) -> impl Iterator<Item = &'s V> + use<'s, K, V, Q>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        self.0.get(key).into_iter().flat_map(LiteMap::keys)
    }

    pub(crate) fn contains(&self, key: &K, value: &V) -> bool {
        self.0.get(key).is_some_and(|values| values.contains_key(value))
    }

    pub(crate) fn contains_key(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// Returns the keys after this one, or all of them, in order.
    pub(crate) fn keys_after(&self, key: Option<&K>) -> impl Iterator<Item = &K> {
        let from = key.map_or(Bound::Unbounded, Bound::Excluded);
        self.0.range::<K, _>((from, Bound::Unbounded)).map(|(key, _)| key)
    }
}
