//! Maps of keys to sets, without keys whose set is empty.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

/// Removes `value` from the set of `key`, and the key with its last value.
pub(crate) fn remove<K, V, Q>(map: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &Q)
where
    K: Ord,
    V: Ord + Borrow<Q>,
    Q: Ord + ?Sized,
{
    if let Some(values) = map.get_mut(key) {
        values.remove(value);
        if values.is_empty() {
            map.remove(key);
        }
    }
}
