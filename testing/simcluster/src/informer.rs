//! A local copy of one resource, updated by a watch.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use futures::StreamExt;
use kube::api::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

/// Namespace (empty for cluster-scoped) and name.
pub(crate) type Key = (String, String);

/// Returns the key of an object.
pub(crate) fn key<K: ResourceExt>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// Creation, change or deletion of an object.
pub(crate) struct Change<K> {
    pub(crate) key: Key,
    pub(crate) old: Option<Arc<K>>,
    pub(crate) new: Option<Arc<K>>,
}

/// Number of events buffered for a busy reader before the watch blocks.
const EVENT_BUFFER: usize = 256;

/// Watches all objects of a kind. The watch ends when the receiver is dropped.
pub(crate) fn watch<K>(api: Api<K>) -> mpsc::Receiver<Event<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(EVENT_BUFFER);
    tokio::spawn(async move {
        let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = sender.closed() => return,
            };
            match event {
                Some(Ok(event)) => {
                    if sender.send(event).await.is_err() {
                        return;
                    }
                }
                // The watcher resumes by itself.
                Some(Err(error)) => tracing::debug!(%error, "watch interrupted"),
                None => return,
            }
        }
    });
    receiver
}

/// Objects of one kind, ordered by key, and the watch that updates them.
pub(crate) struct Informer<K> {
    events: mpsc::Receiver<Event<K>>,
    cache: Cache<K>,
}

impl<K> Informer<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Watches all objects of this kind.
    pub(crate) fn start(api: Api<K>) -> Self {
        Self { events: watch(api), cache: Cache::new() }
    }

    /// Waits for the next changes. Cancel safe.
    pub(crate) async fn next(&mut self) -> Vec<Change<K>> {
        match self.events.recv().await {
            Some(event) => self.cache.apply(event),
            // The watch ends only with its runtime.
            None => std::future::pending().await,
        }
    }

    /// Returns true once the first list is complete.
    pub(crate) fn is_synced(&self) -> bool {
        self.cache.is_synced
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<K>> {
        self.cache.objects.get(key)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &Arc<K>> {
        self.cache.objects.values()
    }

    /// Returns the objects of a namespace. Scans of all objects cost more than what is measured
    /// beside thousands of waiting pods.
    pub(crate) fn in_namespace<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = &'a Arc<K>> {
        let from = (namespace.to_owned(), String::new());
        let objects = self.cache.objects.range(from..);
        objects.take_while(move |(key, _)| key.0 == namespace).map(|(_, object)| object)
    }

    /// Stores the result of a write, so that the next decision sees it. Older events in flight do
    /// not overwrite it.
    pub(crate) fn assume(&mut self, object: K) {
        self.cache.objects.insert(key(&object), Arc::new(object));
    }
}

/// Objects reported by a watch so far.
pub(crate) struct Cache<K> {
    objects: BTreeMap<Key, Arc<K>>,
    /// Objects of the list in progress.
    listed: BTreeMap<Key, Arc<K>>,
    is_synced: bool,
}

impl<K: ResourceExt> Cache<K> {
    pub(crate) fn new() -> Self {
        Self { objects: BTreeMap::new(), listed: BTreeMap::new(), is_synced: false }
    }

    pub(crate) fn is_synced(&self) -> bool {
        self.is_synced
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<K>> {
        self.objects.get(key)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &Arc<K>> {
        self.objects.values()
    }

    /// Applies an event and returns the resulting changes.
    pub(crate) fn apply(&mut self, event: Event<K>) -> Vec<Change<K>> {
        match event {
            Event::Init => {
                self.listed.clear();
                Vec::new()
            }
            Event::InitApply(object) => {
                self.listed.insert(key(&object), Arc::new(object));
                Vec::new()
            }
            Event::InitDone => {
                self.is_synced = true;
                let listed = std::mem::take(&mut self.listed);
                self.replace(listed)
            }
            Event::Apply(object) => {
                let (key, new) = (key(&object), Arc::new(object));
                if self.objects.get(&key).is_some_and(|known| is_older(new.as_ref(), known)) {
                    return Vec::new();
                }
                let old = self.objects.insert(key.clone(), new.clone());
                vec![Change { key, old, new: Some(new) }]
            }
            Event::Delete(object) => {
                let key = key(&object);
                // The event has the last state.
                let old = self.objects.remove(&key).map(|_| Arc::new(object));
                vec![Change { key, old, new: None }]
            }
        }
    }

    fn replace(&mut self, listed: BTreeMap<Key, Arc<K>>) -> Vec<Change<K>> {
        let before = std::mem::replace(&mut self.objects, listed);
        let gone = before.iter().filter(|(key, _)| !self.objects.contains_key(*key));
        let gone =
            gone.map(|(key, old)| Change { key: key.clone(), old: Some(old.clone()), new: None });
        let same = |old: Option<&Arc<K>>, new: &K| {
            old.is_some_and(|old| {
                old.resource_version() == new.resource_version() && old.uid() == new.uid()
            })
        };
        let come = self.objects.iter().filter(|(key, new)| !same(before.get(*key), new));
        let come = come.map(|(key, new)| Change {
            key: key.clone(),
            old: before.get(key).cloned(),
            new: Some(new.clone()),
        });
        gone.chain(come).collect()
    }
}

/// Returns true if `object` is an earlier state of the same object. Resource versions are ordered
/// since Kubernetes 1.35.
fn is_older<K: ResourceExt>(object: &K, known: &K) -> bool {
    let version =
        |object: &K| object.resource_version().and_then(|version| version.parse::<u64>().ok());
    object.uid() == known.uid() && version(object) < version(known)
}
