//! The one owner of objects: current state, and the changes that led to it.
//!
//! Every write takes the next revision. Readers get shared pointers; nothing stored is ever changed
//! in place. The log of each shelf is bounded, as etcd's is by compaction: who asks for what is
//! gone gets 410 and lists anew.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::error::ApiError;
use super::meta;

/// Namespace (empty for cluster-scoped) and name.
pub(crate) type Key = (String, String);

/// What happened to an object.
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
    /// The object after the change; for a deletion its last state, with the revision of the
    /// deletion.
    pub(crate) object: Arc<Value>,
    /// The object before the change.
    pub(crate) previous: Option<Arc<Value>>,
}

/// What a transaction wants done.
pub(crate) enum Write {
    /// Nothing changes; the answer is the current object or the given one.
    Keep(Arc<Value>),
    /// The object is created or replaced.
    Put(Value),
    /// The object goes; its last state is this.
    Remove(Value),
}

/// What a transaction did.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) object: Arc<Value>,
    pub(crate) removed: bool,
    pub(crate) created: bool,
}

#[derive(Default)]
struct Shelf {
    objects: BTreeMap<Key, Arc<Value>>,
    changes: VecDeque<Arc<Change>>,
    /// Changes up to and including this revision are no longer kept.
    compacted: u64,
}

/// Everything, as of one moment. A transaction sees it to check one object against another.
#[derive(Default)]
pub(crate) struct State {
    revision: u64,
    shelves: HashMap<&'static str, Shelf>,
}

impl State {
    pub(crate) fn get(&self, shelf: &str, namespace: &str, name: &str) -> Option<&Arc<Value>> {
        self.shelves.get(shelf)?.objects.get(&(namespace.to_owned(), name.to_owned()))
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
    /// `kept_changes` bounds the log of each shelf.
    pub(crate) fn new(kept_changes: usize) -> Self {
        // Revision 0 means "any" to clients, so that the first state of the world is 1.
        let state = State { revision: 1, ..State::default() };
        Self { state: Mutex::new(state), revision: watch::Sender::new(1), kept_changes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic inside a transaction leaves the state as it was: writes happen after the closure
        // returned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the newest revision.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    pub(crate) fn revision(&self) -> u64 {
        self.lock().revision
    }

    pub(crate) fn get(&self, shelf: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.lock().get(shelf, namespace, name).cloned()
    }

    /// Everything on a shelf now, in the order of namespace and name.
    pub(crate) fn list(&self, shelf: &str, namespace: Option<&str>) -> Listed {
        let state = self.lock();
        let objects = state
            .shelves
            .get(shelf)
            .map(|shelf| select(&shelf.objects, namespace))
            .unwrap_or_default();
        Listed { objects, revision: state.revision }
    }

    /// Everything on a shelf as it was at `revision`.
    ///
    /// # Errors
    /// 410 when the log no longer reaches back that far, 504 when it has not happened yet.
    pub(crate) fn list_at(
        &self,
        shelf: &str,
        namespace: Option<&str>,
        revision: u64,
    ) -> Result<Listed, ApiError> {
        let state = self.lock();
        if revision > state.revision {
            return Err(ApiError::too_large_resource_version(revision, state.revision));
        }
        let Some(shelf) = state.shelves.get(shelf) else {
            return Ok(Listed { objects: Vec::new(), revision });
        };
        if revision < shelf.compacted {
            return Err(ApiError::expired(revision, shelf.compacted));
        }
        let mut objects = shelf.objects.clone();
        for change in shelf.changes.iter().rev().take_while(|change| change.revision > revision) {
            match &change.previous {
                Some(previous) => objects.insert(change.key.clone(), previous.clone()),
                None => objects.remove(&change.key),
            };
        }
        Ok(Listed { objects: select(&objects, namespace), revision })
    }

    /// Changes of a shelf after `revision`, and the revision up to which that is complete.
    ///
    /// # Errors
    /// 410 when some of them are no longer kept.
    pub(crate) fn changes_after(
        &self,
        shelf: &str,
        revision: u64,
    ) -> Result<(Vec<Arc<Change>>, u64), ApiError> {
        let state = self.lock();
        let Some(shelf) = state.shelves.get(shelf) else {
            return Ok((Vec::new(), revision.max(state.revision)));
        };
        if revision < shelf.compacted {
            return Err(ApiError::expired(revision, shelf.compacted));
        }
        let from = shelf.changes.partition_point(|change| change.revision <= revision);
        let changes = shelf.changes.iter().skip(from).cloned().collect();
        // A client may ask for a revision that is still to come; it must not go back.
        Ok((changes, revision.max(state.revision)))
    }

    /// Forgets all changes so far: who continues from before a shelf's last change gets 410.
    /// Watches that have seen everything go on.
    pub(crate) fn compact(&self) {
        for shelf in self.lock().shelves.values_mut() {
            shelf.compacted = shelf.changes.back().map_or(shelf.compacted, |last| last.revision);
            shelf.changes.clear();
        }
    }

    /// Forgets all changes and makes every revision handed out so far too old: running watches end
    /// with 410 as well.
    pub(crate) fn expire(&self) {
        let mut state = self.lock();
        state.revision += 1;
        let revision = state.revision;
        for shelf in state.shelves.values_mut() {
            shelf.changes.clear();
            shelf.compacted = revision;
        }
        drop(state);
        self.revision.send_modify(|newest| *newest = revision.max(*newest));
    }

    /// Goes on by one revision, as when something else is written; gives it.
    pub(crate) fn skip_revision(&self) -> u64 {
        let mut state = self.lock();
        state.revision += 1;
        let revision = state.revision;
        drop(state);
        self.revision.send_modify(|newest| *newest = revision.max(*newest));
        revision
    }

    /// Reads one object, decides, and writes, as one step.
    pub(crate) fn transact(
        &self,
        shelf: &'static str,
        key: &Key,
        decide: impl FnOnce(&State, Option<&Arc<Value>>) -> Result<Write, ApiError>,
    ) -> Result<Written, ApiError> {
        let mut state = self.lock();
        let current = state.shelves.get(shelf).and_then(|shelf| shelf.objects.get(key)).cloned();
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
        let shelf = state.shelves.entry(shelf).or_default();
        if removed {
            shelf.objects.remove(key);
        } else {
            shelf.objects.insert(key.clone(), object.clone());
        }
        let change = Change {
            revision,
            at: Instant::now(),
            what,
            key: key.clone(),
            object: object.clone(),
            previous: current,
        };
        shelf.changes.push_back(Arc::new(change));
        while shelf.changes.len() > self.kept_changes {
            shelf.compacted =
                shelf.changes.pop_front().map_or(shelf.compacted, |gone| gone.revision);
        }
        drop(state);
        // Two writers may get here in either order; the revision must not go back.
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
