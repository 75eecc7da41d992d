//! Cache of compiled selectors by source, limited in bytes since tenants write selectors.
//!
//! Equal sources always have equal entries, so the cache is not visible in results.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::{CompiledSelector, SelectorError};

/// Maximum size, as counted by [`CompiledSelector::bytes`]. A cluster has a handful of classes, of
/// about 1 KiB each.
const MAX_BYTES: usize = 64 << 20;

/// Size of an entry without its source and code, in bytes.
const OVERHEAD: usize = 256;

pub(super) type Compiled = Result<Arc<CompiledSelector>, SelectorError>;

/// LRU cache of compiled selectors and compile errors.
#[derive(Debug, Default)]
pub(super) struct Cache {
    entries: HashMap<Box<str>, Entry>,
    bytes: usize,
    /// Number of look-ups and insertions so far.
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    compiled: Compiled,
    bytes: usize,
    used: u64,
}

/// Cache of this process.
static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);

impl Cache {
    /// Locks and returns the cache of this process.
    pub(super) fn of_process() -> MutexGuard<'static, Self> {
        CACHE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the entry of `expression`, if it is cached.
    pub(super) fn get(&mut self, expression: &str) -> Option<Compiled> {
        self.clock += 1;
        let entry = self.entries.get_mut(expression)?;
        entry.used = self.clock;
        Some(entry.compiled.clone())
    }

    /// Returns true if the expression is cached.
    pub(super) fn contains(&self, expression: &str) -> bool {
        self.entries.contains_key(expression)
    }

    /// Adds an entry, and evicts others if the size exceeds [`MAX_BYTES`].
    pub(super) fn insert(&mut self, expression: &str, compiled: Compiled) {
        self.clock += 1;
        let code = compiled.as_ref().map_or_else(|error| error.to_string().len(), |c| c.bytes());
        let entry = Entry { compiled, bytes: OVERHEAD + expression.len() + code, used: self.clock };
        self.bytes += entry.bytes;
        if let Some(old) = self.entries.insert(expression.into(), entry) {
            self.bytes -= old.bytes;
        }
        if self.bytes > MAX_BYTES {
            self.evict();
        }
    }

    /// Evicts the least recently used entries until half of the bytes are free, so that eviction is
    /// rare.
    fn evict(&mut self) {
        let mut used: Vec<(u64, usize)> =
            self.entries.values().map(|e| (e.used, e.bytes)).collect();
        used.sort_unstable_by_key(|(used, _)| std::cmp::Reverse(*used));
        let mut retained = 0;
        let newest = used.iter().take_while(|(_, bytes)| {
            retained += bytes;
            retained <= MAX_BYTES / 2
        });
        let oldest_retained = newest.last().map_or(u64::MAX, |(used, _)| *used);
        self.entries.retain(|_, entry| entry.used >= oldest_retained);
        self.bytes = self.entries.values().map(|entry| entry.bytes).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expression(n: usize) -> String {
        format!("{n} == 0 || [{}].size() > 0", "1,".repeat(4000))
    }

    #[test]
    fn cache_size_is_bounded_and_recent_entries_stay() {
        let mut cache = Cache::default();
        let compiled = CompiledSelector::compile(&expression(0)).map(Arc::new);
        let each = compiled.as_ref().unwrap().bytes();
        let class = "device.driver == 'gpu.tessera.dev'";
        cache.insert(class, CompiledSelector::compile(class).map(Arc::new));
        for n in 0..3 * MAX_BYTES / each {
            assert!(cache.get(class).is_some(), "used before each insertion");
            cache.insert(&expression(n), compiled.clone());
            assert!(cache.bytes <= MAX_BYTES);
            assert!(cache.get(&expression(n)).is_some());
        }
        assert!(cache.get(&expression(0)).is_none());
        let counted: usize = cache.entries.values().map(|entry| entry.bytes).sum();
        assert_eq!(cache.bytes, counted);
    }
}
