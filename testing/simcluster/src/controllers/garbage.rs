//! The garbage collector: what is left without an owner goes; foreground and orphan deletion.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{
    Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy,
};
use kube::runtime::watcher::Event;
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::namespace::resource;
use crate::api::{KINDS, Kind, find_by_kind};
use crate::informer::{self, Cache, Change, Key};
use crate::queue::WorkQueue;

const FOREGROUND: &str = "foregroundDeletion";
const ORPHAN: &str = "orphan";

/// An object, by the index of its kind and its key.
type Place = (usize, Key);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Work {
    /// Whether its owners still exist.
    Dependent(Place),
    /// It waits for its dependents before it goes.
    Owner(Place),
}

/// Why a piece of work has to be done again.
#[derive(Debug, thiserror::Error)]
enum SyncError {
    /// Its owner may go before a watch shows it; no event would tell that it went
    /// (kubernetes/kubernetes#56121).
    #[error("the owner {0} is there, but no watch has shown it yet")]
    OwnerNotWatched(String),
    #[error(transparent)]
    Api(#[from] kube::Error),
}

pub(super) struct Controller {
    client: Client,
    kinds: Vec<&'static Kind>,
    caches: Vec<Cache<DynamicObject>>,
    work: WorkQueue<Work>,
}

impl Controller {
    pub(super) fn new(client: Client) -> Self {
        // Events own nothing and are owned by nobody.
        let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| kind.plural != "events").collect();
        let caches = kinds.iter().map(|_| Cache::new()).collect();
        Self { client, kinds, caches, work: WorkQueue::new() }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut events = self.watch();
        loop {
            let synced = self.caches.iter().all(Cache::synced);
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                event = events.recv() => {
                    let Some((kind, event)) = event else { return };
                    for change in self.caches[kind].take(event) {
                        self.changed(kind, &change);
                    }
                }
                () = self.work.due() => {}
                () = std::future::ready(()), if synced && !self.work.is_empty() => self.work_once().await,
            }
        }
    }

    /// One stream of the events of all kinds.
    fn watch(&self) -> mpsc::Receiver<(usize, Event<DynamicObject>)> {
        let (sender, receiver) = mpsc::channel(1);
        for (index, kind) in self.kinds.iter().enumerate() {
            let mut events = informer::watch(Api::<DynamicObject>::all_with(
                self.client.clone(),
                &resource(kind),
            ));
            let sender = sender.clone();
            tokio::spawn(async move {
                while let Some(event) = events.recv().await {
                    if sender.send((index, event)).await.is_err() {
                        return;
                    }
                }
            });
        }
        receiver
    }

    fn changed(&mut self, kind: usize, change: &Change<DynamicObject>) {
        if let Some(object) = &change.new {
            let place = (kind, change.key.clone());
            if !object.owner_references().is_empty() {
                self.work.add(Work::Dependent(place.clone()));
            }
            if waits_for_dependents(object) {
                self.work.add(Work::Owner(place));
            }
        }
        // After a list, in the place of what is gone there may be another of that name.
        let stays =
            |old: &DynamicObject| change.new.as_ref().is_some_and(|new| new.uid() == old.uid());
        if let Some(gone) = change.old.as_ref().filter(|old| !stays(old)) {
            for dependent in self.dependents(&gone.uid().unwrap_or_default()) {
                self.work.add(Work::Dependent(dependent));
            }
            for owner in gone.owner_references() {
                self.owner_may_go(&owner.uid);
            }
        }
    }

    fn owner_may_go(&mut self, uid: &str) {
        for (kind, cache) in self.caches.iter().enumerate() {
            let waiting = cache.values().find(|object| object.uid().as_deref() == Some(uid));
            if let Some(owner) = waiting.filter(|owner| waits_for_dependents(owner)) {
                self.work.add(Work::Owner((kind, informer::key(owner.as_ref()))));
            }
        }
    }

    fn dependents(&self, uid: &str) -> Vec<Place> {
        let owned =
            |object: &DynamicObject| object.owner_references().iter().any(|owner| owner.uid == uid);
        let places = self.caches.iter().enumerate().flat_map(|(kind, cache)| {
            cache
                .values()
                .filter(|object| owned(object))
                .map(move |object| (kind, informer::key(object.as_ref())))
        });
        places.collect()
    }

    async fn work_once(&mut self) {
        let Some(work) = self.work.pop() else { return };
        let done = match &work {
            Work::Dependent(place) => self.sync_dependent(place).await,
            Work::Owner(place) => self.sync_owner(place).await.map_err(SyncError::from),
        };
        self.work.settle(work, done, "garbage collector");
    }

    fn api(&self, kind: &Kind, namespace: &str) -> Api<DynamicObject> {
        match kind.namespaced {
            true => Api::namespaced_with(self.client.clone(), namespace, &resource(kind)),
            false => Api::all_with(self.client.clone(), &resource(kind)),
        }
    }

    async fn sync_dependent(&self, place: &Place) -> Result<(), SyncError> {
        let (kind, key) = place;
        let Some(object) = self.caches[*kind].get(key) else { return Ok(()) };
        if object.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        for owner in object.owner_references() {
            // A kind that is not served here cannot be looked up; its objects count as present.
            let Some(served) = find_by_kind(&owner.api_version, &owner.kind) else { return Ok(()) };
            let found = self.api(served, &key.0).get_opt(&owner.name).await?;
            let waits = |found: &DynamicObject| {
                has(found, FOREGROUND) && owner.block_owner_deletion == Some(true)
            };
            if found.is_some_and(|found| found.uid().as_ref() == Some(&owner.uid) && !waits(&found))
            {
                let watched = self.is_watched(served, &key.0, owner);
                return watched
                    .then_some(())
                    .ok_or_else(|| SyncError::OwnerNotWatched(owner.name.clone()));
            }
        }
        Ok(self.delete(place, object).await?)
    }

    fn is_watched(&self, kind: &Kind, namespace: &str, owner: &OwnerReference) -> bool {
        // No watch will ever show an owner of a kind that is not watched: to ask again would never
        // end.
        let Some(index) = self.kinds.iter().position(|watched| std::ptr::eq(*watched, kind)) else {
            return true;
        };
        let namespace = if kind.namespaced { namespace } else { "" };
        let known = self.caches[index].get(&(namespace.to_owned(), owner.name.clone()));
        known.is_some_and(|known| known.uid().as_ref() == Some(&owner.uid))
    }

    async fn delete(&self, place: &Place, object: &DynamicObject) -> Result<(), kube::Error> {
        let params = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            ..DeleteParams::default()
        };
        let params =
            params.preconditions(Preconditions { uid: object.uid(), resource_version: None });
        found(self.api(self.kinds[place.0], &place.1.0).delete(&place.1.1, &params).await)
            .map(|_| ())
    }

    async fn sync_owner(&self, place: &Place) -> Result<(), kube::Error> {
        let (kind, key) = place;
        let Some(owner) = self.caches[*kind].get(key).filter(|owner| waits_for_dependents(owner))
        else {
            return Ok(());
        };
        let uid = owner.uid().unwrap_or_default();
        let orphan = has(owner, ORPHAN);
        let dependents = self.dependents(&uid);
        for dependent in &dependents {
            let Some(object) = self.caches[dependent.0].get(&dependent.1) else { continue };
            if orphan {
                self.release(dependent, object, &uid).await?;
            } else if object.metadata.deletion_timestamp.is_none() {
                self.delete(dependent, object).await?;
            }
        }
        if !orphan && !dependents.is_empty() {
            // The last of them wakes this work again.
            return Ok(());
        }
        let left: Vec<&String> =
            owner.finalizers().iter().filter(|f| *f != FOREGROUND && *f != ORPHAN).collect();
        let patch =
            json!({"metadata": {"resourceVersion": owner.resource_version(), "finalizers": left}});
        let api = self.api(self.kinds[*kind], &key.0);
        found(api.patch(&key.1, &PatchParams::default(), &Patch::Merge(patch)).await).map(|_| ())
    }

    /// Takes the owner out of a dependent.
    async fn release(
        &self,
        place: &Place,
        object: &DynamicObject,
        uid: &str,
    ) -> Result<(), kube::Error> {
        let left: Vec<_> =
            object.owner_references().iter().filter(|owner| owner.uid != uid).collect();
        let patch = json!({"metadata": {"uid": object.uid(), "ownerReferences": left}});
        let api = self.api(self.kinds[place.0], &place.1.0);
        found(api.patch(&place.1.1, &PatchParams::default(), &Patch::Merge(patch)).await)
            .map(|_| ())
    }
}

fn waits_for_dependents(object: &DynamicObject) -> bool {
    has(object, FOREGROUND) || has(object, ORPHAN)
}

/// Whether the object is being deleted in this way.
fn has(object: &DynamicObject, way: &str) -> bool {
    object.metadata.deletion_timestamp.is_some()
        && object.finalizers().iter().any(|finalizer| finalizer == way)
}

/// What is not there any more needs nothing.
fn found<T>(answer: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}
