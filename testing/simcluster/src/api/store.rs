//! The object store: current state and the changes that led to it.
//!
//! Every write takes the next revision. Readers get shared pointers; stored objects are never
//! changed in place. The log of each table is bounded, as etcd's is by compaction: a reader of
//! compacted changes gets 410 and lists again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::error::ApiError;
use super::meta;

/// Namespace (empty for cluster-scoped) and name.
pub(crate) type Key = (String, String);

/// Type of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeType {
    Added,
    Modified,
    Deleted,
}

/// One entry of the log.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) revision: u64,
    pub(crate) at: Instant,
    pub(crate) what: ChangeType,
    pub(crate) key: Key,
    /// The object after the change. For a deletion: its last state, with the revision of the
    /// deletion.
    pub(crate) object: Arc<Value>,
    /// The object before the change.
    pub(crate) previous: Option<Arc<Value>>,
}

/// Write requested by a transaction.
pub(crate) enum Write {
    /// Changes nothing; the result is the given object.
    Keep(Arc<Value>),
    /// Creates or replaces the object.
    Put(Value),
    /// Removes the object, whose last state is given.
    Remove(Value),
}

/// Result of a transaction.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) object: Arc<Value>,
    pub(crate) removed: bool,
    pub(crate) created: bool,
}

#[derive(Default)]
struct ResourceTable {
    objects: BTreeMap<Key, Arc<Value>>,
    changes: VecDeque<Arc<Change>>,
    /// Changes up to and including this revision are compacted.
    compacted: u64,
}

/// All objects at one revision. Transactions read it to check one object against another.
#[derive(Default)]
pub(crate) struct State {
    revision: u64,
    tables: HashMap<&'static str, ResourceTable>,
}

impl State {
    pub(crate) fn get(&self, table: &str, namespace: &str, name: &str) -> Option<&Arc<Value>> {
        self.tables.get(table)?.objects.get(&(namespace.to_owned(), name.to_owned()))
    }
}

pub(crate) struct Store {
    state: Mutex<State>,
    revision: watch::Sender<u64>,
    kept_changes: usize,
}

/// Objects and the revision at which they were read.
pub(crate) struct Listed {
    pub(crate) objects: Vec<Arc<Value>>,
    pub(crate) revision: u64,
}

impl Store {
    /// Creates a store. `kept_changes` limits the log of each table.
    pub(crate) fn new(kept_changes: usize) -> Self {
        // Clients interpret revision 0 as "any", so the initial state has revision 1.
        let state = State { revision: 1, ..State::default() };
        Self { state: Mutex::new(state), revision: watch::Sender::new(1), kept_changes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic inside a transaction leaves the state unchanged: writes happen after the closure
        // returned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a receiver of the newest revision.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    pub(crate) fn revision(&self) -> u64 {
        self.lock().revision
    }

    pub(crate) fn get(&self, table: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.lock().get(table, namespace, name).cloned()
    }

    /// Returns all objects of a table, ordered by namespace and name.
    pub(crate) fn list(&self, table: &str, namespace: Option<&str>) -> Listed {
        let state = self.lock();
        let objects = state
            .tables
            .get(table)
            .map(|table| select(&table.objects, namespace))
            .unwrap_or_default();
        Listed { objects, revision: state.revision }
    }

    /// Returns all objects of a table as of `revision`.
    ///
    /// # Errors
    /// Returns 410 if the revision is compacted, 504 if it is in the future.
    pub(crate) fn list_at(
        &self,
        table: &str,
        namespace: Option<&str>,
        revision: u64,
    ) -> Result<Listed, ApiError> {
        let state = self.lock();
        if revision > state.revision {
            return Err(ApiError::too_large_resource_version(revision, state.revision));
        }
        let Some(table) = state.tables.get(table) else {
            return Ok(Listed { objects: Vec::new(), revision });
        };
        if revision < table.compacted {
            return Err(ApiError::expired(revision, table.compacted));
        }
        let mut objects = table.objects.clone();
        for change in table.changes.iter().rev().take_while(|change| change.revision > revision) {
            match &change.previous {
                Some(previous) => objects.insert(change.key.clone(), previous.clone()),
                None => objects.remove(&change.key),
            };
        }
        Ok(Listed { objects: select(&objects, namespace), revision })
    }

    /// Returns the changes of a table after `revision`, and the revision up to which they are
    /// complete.
    ///
    /// # Errors
    /// Returns 410 if some of them are compacted.
    pub(crate) fn changes_after(
        &self,
        table: &str,
        revision: u64,
    ) -> Result<(Vec<Arc<Change>>, u64), ApiError> {
        let state = self.lock();
        let Some(table) = state.tables.get(table) else {
            return Ok((Vec::new(), revision.max(state.revision)));
        };
        if revision < table.compacted {
            return Err(ApiError::expired(revision, table.compacted));
        }
        let from = table.changes.partition_point(|change| change.revision <= revision);
        let changes = table.changes.iter().skip(from).cloned().collect();
        // A client may request a future revision; the position must not decrease.
        Ok((changes, revision.max(state.revision)))
    }

    /// Compacts all changes so far: resuming from before a table's last change gets 410.
    ///
    /// Watches that have seen all changes continue.
    pub(crate) fn compact(&self) {
        for table in self.lock().tables.values_mut() {
            table.compacted = table.changes.back().map_or(table.compacted, |last| last.revision);
            table.changes.clear();
        }
    }

    /// Compacts all changes and expires all revisions so far: running watches end with 410 as well.
    pub(crate) fn expire(&self) {
        let mut state = self.lock();
        state.revision += 1;
        let revision = state.revision;
        for table in state.tables.values_mut() {
            table.changes.clear();
            table.compacted = revision;
        }
        drop(state);
        self.revision.send_modify(|newest| *newest = revision.max(*newest));
    }

    /// Takes the next revision without a write and returns it.
    pub(crate) fn skip_revision(&self) -> u64 {
        let mut state = self.lock();
        state.revision += 1;
        let revision = state.revision;
        drop(state);
        self.revision.send_modify(|newest| *newest = revision.max(*newest));
        revision
    }

    /// Reads one object, decides, and writes, atomically.
    pub(crate) fn transact(
        &self,
        table: &'static str,
        key: &Key,
        decide: impl FnOnce(&State, Option<&Arc<Value>>) -> Result<Write, ApiError>,
    ) -> Result<Written, ApiError> {
        let mut state = self.lock();
        let current = state.tables.get(table).and_then(|table| table.objects.get(key)).cloned();
        let (mut object, removed) = match decide(&state, current.as_ref())? {
            Write::Keep(object) => return Ok(Written { object, removed: false, created: false }),
            Write::Put(object) => (object, false),
            Write::Remove(object) => (object, true),
        };
        state.revision += 1;
        let revision = state.revision;
        meta::set_resource_version(&mut object, revision);
        let object = Arc::new(object);
        let created = current.is_none();
        let what = match (removed, created) {
            (true, _) => ChangeType::Deleted,
            (false, true) => ChangeType::Added,
            (false, false) => ChangeType::Modified,
        };
        let table = state.tables.entry(table).or_default();
        if removed {
            table.objects.remove(key);
        } else {
            table.objects.insert(key.clone(), object.clone());
        }
        let change = Change {
            revision,
            at: Instant::now(),
            what,
            key: key.clone(),
            object: object.clone(),
            previous: current,
        };
        table.changes.push_back(Arc::new(change));
        while table.changes.len() > self.kept_changes {
            table.compacted =
                table.changes.pop_front().map_or(table.compacted, |gone| gone.revision);
        }
        drop(state);
        // Two writers may arrive here in either order; the revision must not decrease.
        self.revision.send_modify(|newest| *newest = revision.max(*newest));
        Ok(Written { object, removed, created })
    }
}

fn select(objects: &BTreeMap<Key, Arc<Value>>, namespace: Option<&str>) -> Vec<Arc<Value>> {
    objects
        .iter()
        .filter(|((inside, _), _)| namespace.is_none_or(|namespace| namespace == inside))
        .map(|(_, object)| object.clone())
        .collect()
}
