//! Deletion of pods that kube-controller-manager before 1.37 leaves without one of their claims.
//!
//! With a stale view of the claims, it lists some of a pod's claims in the pod's status and drops
//! the others, then the reverse, indefinitely (kubernetes/kubernetes#138407, fixed by #138408 in
//! 1.37, not in 1.36.3). Such a pod is never scheduled, with any allocator. The workaround is to
//! delete the pod, as `kubectl tessera explain` recommends.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;

use super::placement::node_name;
use super::pod_watch::{PodEvent, PodWatch};
use super::test_bed::{TestBed, uid};

/// Last affected minor version of Kubernetes 1.
const LAST_AFFECTED_MINOR: u32 = 36;

/// Maximum number of pods deleted in one trial; up to four of 250 were observed. More deletions
/// would leave little to test.
const MAX_DELETED: usize = 20;

/// Returns true if the cluster's version is affected.
async fn is_affected(test_bed: &TestBed) -> anyhow::Result<bool> {
    Ok(test_bed.minor_version().await? <= LAST_AFFECTED_MINOR)
}

/// Runs the trial, and deletes pods that have lost a claim if the cluster's version is affected.
pub(super) async fn delete_affected_during<T>(
    test_bed: &TestBed,
    trial: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    if !is_affected(test_bed).await? {
        return trial.await;
    }
    tokio::select! {
        Err(error) = delete_affected(test_bed) => Err(error),
        outcome = trial => outcome,
    }
}

/// Deletes affected pods until an error occurs.
async fn delete_affected(test_bed: &TestBed) -> anyhow::Result<Infallible> {
    let mut listed = BTreeMap::<String, BTreeSet<String>>::new();
    let mut deleted = BTreeSet::new();
    let mut watch = PodWatch::new(test_bed.pods());
    loop {
        match watch.next().await? {
            PodEvent::Changed(pod) => {
                let now = listed_claims(&pod);
                let before = listed.insert(uid(&pod), now.clone()).unwrap_or_default();
                if is_pending(&pod) && !before.is_subset(&now) && deleted.insert(uid(&pod)) {
                    let name = pod.name_any();
                    println!(
                        "    kube-controller-manager dropped a claim from the status of pod {name}; deleting the pod"
                    );
                    anyhow::ensure!(
                        deleted.len() <= MAX_DELETED,
                        "more than {MAX_DELETED} pods have lost a claim"
                    );
                    test_bed
                        .delete_if_exists(&name, &DeleteParams::default().grace_period(0))
                        .await?;
                }
            }
            PodEvent::Deleted(pod) => drop(listed.remove(&uid(&pod))),
            // Pods that lose a claim later are detected at their next change.
            PodEvent::Listed(_) => listed.clear(),
        }
    }
}

fn is_pending(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && node_name(pod).is_none()
}

fn listed_claims(pod: &Pod) -> BTreeSet<String> {
    let statuses =
        pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    statuses.map(|status| status.name.clone()).collect()
}
