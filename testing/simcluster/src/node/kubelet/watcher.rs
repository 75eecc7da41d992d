//! Watches the pods of this node and runs one worker for each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Shared;
use super::worker::{PodUpdate, Worker};

/// Watches this node's pods. Runs until dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    let api: Api<Pod> = Api::all(shared.client.clone());
    let config = watcher::Config::default().fields(&format!("spec.nodeName={}", shared.node));
    let mut stream = Box::pin(watcher(api, config).default_backoff());
    let mut workers = PodWorkers {
        shared: shared.clone(),
        workers: BTreeMap::new(),
        tasks: JoinSet::new(),
        listed: None,
    };
    let mut interval =
        tokio::time::interval(shared.sync_period.max(std::time::Duration::from_millis(10)));
    let mut synced = false;
    loop {
        tokio::select! {
            event = stream.try_next() => match event {
                Ok(Some(event)) => synced |= workers.handle(event),
                Ok(None) => return,
                Err(error) => tracing::debug!(%error, "pod watch failed; retrying"),
            },
            Some(ended) = workers.tasks.join_next() => match ended {
                Ok(uid) => workers.remove(&uid),
                Err(error) => tracing::error!(%error, "pod worker panicked"),
            },
            _ = interval.tick() => if synced { workers.clean_up_orphans() },
        }
    }
}

struct PodWorkers {
    shared: Arc<Shared>,
    workers: BTreeMap<String, watch::Sender<PodUpdate>>,
    tasks: JoinSet<String>,
    /// UIDs seen in the list in progress.
    listed: Option<BTreeSet<String>>,
}

impl PodWorkers {
    /// Passes an event to its worker. Returns true at the end of a list.
    fn handle(&mut self, event: watcher::Event<Pod>) -> bool {
        match event {
            watcher::Event::Init => self.listed = Some(BTreeSet::new()),
            watcher::Event::InitApply(pod) => {
                if let Some(listed) = &mut self.listed {
                    listed.extend(pod.uid());
                }
                self.update(pod);
            }
            watcher::Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                self.workers
                    .iter()
                    .filter(|(uid, _)| !listed.contains(*uid))
                    .for_each(|(_, worker)| mark_deleted(worker));
                self.clean_up_orphans();
                return true;
            }
            watcher::Event::Apply(pod) => self.update(pod),
            watcher::Event::Delete(pod) => {
                if let Some(worker) = pod.uid().and_then(|uid| self.workers.get(&uid)) {
                    mark_deleted(worker);
                }
            }
        }
        false
    }

    fn update(&mut self, pod: Pod) {
        let Some(uid) = pod.uid() else { return };
        let key = (pod.namespace().unwrap_or_default(), pod.name_any());
        self.shared.pods.lock().unwrap_or_else(PoisonError::into_inner).insert(key, uid.clone());
        let pod = Arc::new(pod);
        match self.workers.get(&uid) {
            // This worker has just ended and is removed in a moment; its pod cannot change any
            // more.
            Some(worker) => drop(worker.send(PodUpdate::Present(pod))),
            None => self.start(uid, PodUpdate::Present(pod)),
        }
    }

    fn start(&mut self, uid: String, input: PodUpdate) {
        let (sender, receiver) = watch::channel(input);
        let worker = Worker::new(self.shared.clone(), uid.clone(), receiver);
        self.tasks.spawn(async move {
            let uid = worker.uid().to_owned();
            worker.run().await;
            uid
        });
        self.workers.insert(uid, sender);
    }

    fn remove(&mut self, uid: &str) {
        self.workers.remove(uid);
        self.shared.pods.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, of| of != uid);
        self.shared.events.forget(uid);
    }

    /// Starts clean-up for pods that were deleted while no kubelet ran.
    fn clean_up_orphans(&mut self) {
        let mut orphans = self.shared.claims.users();
        orphans.extend(self.shared.runtime.pods());
        for uid in orphans {
            if !self.workers.contains_key(&uid) {
                tracing::info!(uid, "cleaning up deleted pod");
                self.start(uid, PodUpdate::Gone(None));
            }
        }
    }
}

fn mark_deleted(worker: &watch::Sender<PodUpdate>) {
    worker.send_if_modified(|input| match input {
        PodUpdate::Present(pod) => {
            *input = PodUpdate::Gone(Some(pod.clone()));
            true
        }
        PodUpdate::Gone(_) => false,
    });
}
