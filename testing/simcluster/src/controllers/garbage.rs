//! The garbage collector: deletes objects without an owner; foreground and orphan deletion.

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
type ObjectRef = (usize, Key);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Work {
    /// Check that its owners still exist.
    Dependent(ObjectRef),
    /// Delete it once its dependents are gone.
    Owner(ObjectRef),
}

/// Reason for a retry.
#[derive(Debug, thiserror::Error)]
enum SyncError {
    /// The owner may be deleted before a watch shows it; no event would report that
    /// (kubernetes/kubernetes#56121).
    #[error("owner {0} exists, but the watch has not reported it yet")]
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
        // Events have neither owners nor dependents.
        let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| kind.plural != "events").collect();
        let caches = kinds.iter().map(|_| Cache::new()).collect();
        Self { client, kinds, caches, work: WorkQueue::new() }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut events = self.watch();
        loop {
            let synced = self.caches.iter().all(Cache::is_synced);
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                event = events.recv() => {
                    let Some((kind, event)) = event else { return };
                    for change in self.caches[kind].apply(event) {
                        self.changed(kind, &change);
                    }
                }
                () = self.work.wait_until_due() => {}
                () = std::future::ready(()), if synced && !self.work.is_empty() => self.work_once().await,
            }
        }
    }

    /// Returns one stream of the events of all kinds.
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
            let target = (kind, change.key.clone());
            if !object.owner_references().is_empty() {
                self.work.add(Work::Dependent(target.clone()));
            }
            if waits_for_dependents(object) {
                self.work.add(Work::Owner(target));
            }
        }
        // After a relist, another object of the same name may replace a deleted one.
        let stays =
            |old: &DynamicObject| change.new.as_ref().is_some_and(|new| new.uid() == old.uid());
        if let Some(gone) = change.old.as_ref().filter(|old| !stays(old)) {
            for dependent in self.dependents(&gone.uid().unwrap_or_default()) {
                self.work.add(Work::Dependent(dependent));
            }
            for owner in gone.owner_references() {
                self.check_owner(&owner.uid);
            }
        }
    }

    fn check_owner(&mut self, uid: &str) {
        for (kind, cache) in self.caches.iter().enumerate() {
            let waiting = cache.values().find(|object| object.uid().as_deref() == Some(uid));
            if let Some(owner) = waiting.filter(|owner| waits_for_dependents(owner)) {
                self.work.add(Work::Owner((kind, informer::key(owner.as_ref()))));
            }
        }
    }

    fn dependents(&self, uid: &str) -> Vec<ObjectRef> {
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
            Work::Dependent(target) => self.sync_dependent(target).await,
            Work::Owner(target) => self.sync_owner(target).await.map_err(SyncError::from),
        };
        self.work.finish(work, done, "garbage collector");
    }

    fn api(&self, kind: &Kind, namespace: &str) -> Api<DynamicObject> {
        match kind.namespaced {
            true => Api::namespaced_with(self.client.clone(), namespace, &resource(kind)),
            false => Api::all_with(self.client.clone(), &resource(kind)),
        }
    }

    async fn sync_dependent(&self, target: &ObjectRef) -> Result<(), SyncError> {
        let (kind, key) = target;
        let Some(object) = self.caches[*kind].get(key) else { return Ok(()) };
        if object.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        for owner in object.owner_references() {
            // A kind that is not served cannot be looked up; its objects count as present.
            let Some(served) = find_by_kind(&owner.api_version, &owner.kind) else { return Ok(()) };
            let ignore_not_found = self.api(served, &key.0).get_opt(&owner.name).await?;
            let waits = |ignore_not_found: &DynamicObject| {
                has_finalizer(ignore_not_found, FOREGROUND)
                    && owner.block_owner_deletion == Some(true)
            };
            if ignore_not_found.is_some_and(|ignore_not_found| {
                ignore_not_found.uid().as_ref() == Some(&owner.uid) && !waits(&ignore_not_found)
            }) {
                let watched = self.is_watched(served, &key.0, owner);
                return watched
                    .then_some(())
                    .ok_or_else(|| SyncError::OwnerNotWatched(owner.name.clone()));
            }
        }
        Ok(self.delete(target, object).await?)
    }

    fn is_watched(&self, kind: &Kind, namespace: &str, owner: &OwnerReference) -> bool {
        // An owner of an unwatched kind is never shown by a watch, so waiting for it would not end.
        let Some(index) = self.kinds.iter().position(|watched| std::ptr::eq(*watched, kind)) else {
            return true;
        };
        let namespace = if kind.namespaced { namespace } else { "" };
        let known = self.caches[index].get(&(namespace.to_owned(), owner.name.clone()));
        known.is_some_and(|known| known.uid().as_ref() == Some(&owner.uid))
    }

    async fn delete(&self, target: &ObjectRef, object: &DynamicObject) -> Result<(), kube::Error> {
        let params = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            ..DeleteParams::default()
        };
        let params =
            params.preconditions(Preconditions { uid: object.uid(), resource_version: None });
        ignore_not_found(
            self.api(self.kinds[target.0], &target.1.0).delete(&target.1.1, &params).await,
        )
        .map(|_| ())
    }

    async fn sync_owner(&self, target: &ObjectRef) -> Result<(), kube::Error> {
        let (kind, key) = target;
        let Some(owner) = self.caches[*kind].get(key).filter(|owner| waits_for_dependents(owner))
        else {
            return Ok(());
        };
        let uid = owner.uid().unwrap_or_default();
        let orphan = has_finalizer(owner, ORPHAN);
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
            // The last dependent triggers this work again.
            return Ok(());
        }
        let left: Vec<&String> =
            owner.finalizers().iter().filter(|f| *f != FOREGROUND && *f != ORPHAN).collect();
        let patch =
            json!({"metadata": {"resourceVersion": owner.resource_version(), "finalizers": left}});
        let api = self.api(self.kinds[*kind], &key.0);
        ignore_not_found(api.patch(&key.1, &PatchParams::default(), &Patch::Merge(patch)).await)
            .map(|_| ())
    }

    /// Removes the owner from a dependent.
    async fn release(
        &self,
        target: &ObjectRef,
        object: &DynamicObject,
        uid: &str,
    ) -> Result<(), kube::Error> {
        let left: Vec<_> =
            object.owner_references().iter().filter(|owner| owner.uid != uid).collect();
        let patch = json!({"metadata": {"uid": object.uid(), "ownerReferences": left}});
        let api = self.api(self.kinds[target.0], &target.1.0);
        ignore_not_found(
            api.patch(&target.1.1, &PatchParams::default(), &Patch::Merge(patch)).await,
        )
        .map(|_| ())
    }
}

fn waits_for_dependents(object: &DynamicObject) -> bool {
    has_finalizer(object, FOREGROUND) || has_finalizer(object, ORPHAN)
}

/// Returns true if the object has this deletion finalizer.
fn has_finalizer(object: &DynamicObject, finalizer: &str) -> bool {
    object.metadata.deletion_timestamp.is_some()
        && object.finalizers().iter().any(|present| present == finalizer)
}

/// Treats a missing object as `None`.
fn ignore_not_found<T>(answer: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}
