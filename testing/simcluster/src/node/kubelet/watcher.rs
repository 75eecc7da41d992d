//! The pods of this node: one worker for each, and what is left of those that are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Shared;
use super::worker::{Input, Worker};

/// Watches this node's pods. Runs until dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    let api: Api<Pod> = Api::all(shared.client.clone());
    let config = watcher::Config::default().fields(&format!("spec.nodeName={}", shared.node));
    let mut stream = Box::pin(watcher(api, config).default_backoff());
    let mut desk = Desk {
        shared: shared.clone(),
        workers: BTreeMap::new(),
        tasks: JoinSet::new(),
        listed: None,
    };
    let mut tidy =
        tokio::time::interval(shared.sync_period.max(std::time::Duration::from_millis(10)));
    let mut synced = false;
    loop {
        tokio::select! {
            event = stream.try_next() => match event {
                Ok(Some(event)) => synced |= desk.take(event),
                Ok(None) => return,
                Err(error) => tracing::debug!(%error, "watching pods; trying again"),
            },
            Some(ended) = desk.tasks.join_next() => match ended {
                Ok(uid) => desk.forget(&uid),
                Err(error) => tracing::error!(%error, "a pod's worker died"),
            },
            _ = tidy.tick() => if synced { desk.tidy() },
        }
    }
}

struct Desk {
    shared: Arc<Shared>,
    workers: BTreeMap<String, watch::Sender<Input>>,
    tasks: JoinSet<String>,
    /// UIDs seen in a listing that is under way.
    listed: Option<BTreeSet<String>>,
}

impl Desk {
    /// Hands an event to its worker. True at the end of a listing.
    fn take(&mut self, event: watcher::Event<Pod>) -> bool {
        match event {
            watcher::Event::Init => self.listed = Some(BTreeSet::new()),
            watcher::Event::InitApply(pod) => {
                if let Some(listed) = &mut self.listed {
                    listed.extend(pod.uid());
                }
                self.present(pod);
            }
            watcher::Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                self.workers
                    .iter()
                    .filter(|(uid, _)| !listed.contains(*uid))
                    .for_each(|(_, worker)| gone(worker));
                self.tidy();
                return true;
            }
            watcher::Event::Apply(pod) => self.present(pod),
            watcher::Event::Delete(pod) => {
                if let Some(worker) = pod.uid().and_then(|uid| self.workers.get(&uid)) {
                    gone(worker);
                }
            }
        }
        false
    }

    fn present(&mut self, pod: Pod) {
        let Some(uid) = pod.uid() else { return };
        let key = (pod.namespace().unwrap_or_default(), pod.name_any());
        self.shared.pods.lock().unwrap_or_else(PoisonError::into_inner).insert(key, uid.clone());
        let pod = Arc::new(pod);
        match self.workers.get(&uid) {
            // A worker that has just ended is forgotten in a moment; nothing about its pod can be
            // new.
            Some(worker) => drop(worker.send(Input::Present(pod))),
            None => self.start(uid, Input::Present(pod)),
        }
    }

    fn start(&mut self, uid: String, input: Input) {
        let (sender, receiver) = watch::channel(input);
        let worker = Worker::new(self.shared.clone(), uid.clone(), receiver);
        self.tasks.spawn(async move {
            let uid = worker.uid().to_owned();
            worker.run().await;
            uid
        });
        self.workers.insert(uid, sender);
    }

    fn forget(&mut self, uid: &str) {
        self.workers.remove(uid);
        self.shared.pods.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, of| of != uid);
        self.shared.events.forget(uid);
    }

    /// Ends what belongs to pods that nobody knows any more: they went away while there was no
    /// kubelet.
    fn tidy(&mut self) {
        let mut orphans = self.shared.claims.users();
        orphans.extend(self.shared.runtime.pods());
        for uid in orphans {
            if !self.workers.contains_key(&uid) {
                tracing::info!(uid, "cleaning up after a pod that is gone");
                self.start(uid, Input::Gone(None));
            }
        }
    }
}

fn gone(worker: &watch::Sender<Input>) {
    worker.send_if_modified(|input| match input {
        Input::Present(pod) => {
            *input = Input::Gone(Some(pod.clone()));
            true
        }
        Input::Gone(_) => false,
    });
}
