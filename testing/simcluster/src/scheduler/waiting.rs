//! Pods in PreBind that wait for binding conditions. Their claims are reserved, and they count on
//! their nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use crate::informer::Key;

/// The time between two looks at the conditions, as upstream.
const POLL: Duration = Duration::from_secs(5);

/// The time after which the wait fails, as upstream's default.
pub(super) const TIMEOUT: Duration = Duration::from_secs(600);

/// A pod that waits.
pub(super) struct WaitingPod {
    /// The pod, as if it was bound.
    pub(super) pod: Pod,
    pub(super) node: String,
    /// Its claims, as reserved.
    pub(super) claims: Vec<ResourceClaim>,
    pub(super) since: Instant,
    next_poll: Instant,
}

impl WaitingPod {
    /// Returns a pod that waits from now on for a node.
    pub(super) fn new(pod: &Pod, node: &str, claims: Vec<ResourceClaim>) -> Self {
        let mut pod = pod.clone();
        if let Some(spec) = &mut pod.spec {
            spec.node_name = Some(node.to_owned());
        }
        let now = Instant::now();
        Self { pod, node: node.to_owned(), claims, since: now, next_poll: now + POLL }
    }
}

/// The pods that wait.
#[derive(Default)]
pub(super) struct WaitingPods(pub(super) BTreeMap<Key, WaitingPod>);

impl WaitingPods {
    /// Waits until the conditions of a pod are to be looked at, and returns its key.
    pub(super) async fn next_poll(&mut self) -> Key {
        let next = self.0.iter().min_by_key(|(_, waiting)| waiting.next_poll);
        let Some((key, at)) = next.map(|(key, waiting)| (key.clone(), waiting.next_poll)) else {
            return std::future::pending().await;
        };
        tokio::time::sleep_until(at).await;
        if let Some(waiting) = self.0.get_mut(&key) {
            waiting.next_poll = Instant::now() + POLL;
        }
        key
    }
}
