//! Pods that kube-controller-manager before 1.37 leaves without one of their claims.
//!
//! Where its view of the claims lags, it lists a part of a pod's claims in the pod's status and
//! drops the others, then the others and drops those, in turn for ever
//! (kubernetes/kubernetes#138407, mended by #138408 in 1.37 and not in 1.36.3). Such a pod is never
//! scheduled, whoever allocates its claims. What helps is what `kubectl tessera explain` tells
//! people: deleting it.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;

use super::bench::{Bench, uid};
use super::placement::node_name;
use super::pod_watch::{PodWatch, Seen};

/// The last minor version of Kubernetes 1 that does it.
const LAST_MINOR: u32 = 36;

/// So many pods may be given up in one trial: seen were up to four of 250. A trial that deletes
/// more of them tries little else.
const MOST: usize = 20;

/// Whether pods of several claims from templates may never get them all.
async fn are_to_be_expected(bench: &Bench) -> anyhow::Result<bool> {
    let version = bench.client.apiserver_version().await?;
    // Some distributions have a plus sign behind it.
    let minor: u32 = version.minor.trim_end_matches('+').parse()?;
    Ok(minor <= LAST_MINOR)
}

/// The trial's outcome; while it goes on, pods that have lost a claim are deleted where that is to
/// be expected.
pub(super) async fn given_up_during<T>(
    bench: &Bench,
    trial: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    if !are_to_be_expected(bench).await? {
        return trial.await;
    }
    tokio::select! {
        Err(error) = give_up(bench) => Err(error),
        outcome = trial => outcome,
    }
}

/// Ends only with an error.
async fn give_up(bench: &Bench) -> anyhow::Result<Infallible> {
    let mut listed = BTreeMap::<String, BTreeSet<String>>::new();
    let mut given_up = BTreeSet::new();
    let mut watch = PodWatch::of(bench.pods());
    loop {
        match watch.next().await? {
            Seen::There(pod) => {
                let now = listed_claims(&pod);
                let before = listed.insert(uid(&pod), now.clone()).unwrap_or_default();
                if is_waiting(&pod) && !before.is_subset(&now) && given_up.insert(uid(&pod)) {
                    let name = pod.name_any();
                    println!(
                        "    kube-controller-manager has dropped a claim of {name} from its status: it is deleted"
                    );
                    anyhow::ensure!(
                        given_up.len() <= MOST,
                        "more than {MOST} pods have lost a claim"
                    );
                    bench.delete_if_there(&name, &DeleteParams::default().grace_period(0)).await?;
                }
            }
            Seen::Gone(pod) => drop(listed.remove(&uid(&pod))),
            // Who still loses claims is seen with the next change.
            Seen::All(_) => listed.clear(),
        }
    }
}

fn is_waiting(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && node_name(pod).is_none()
}

fn listed_claims(pod: &Pod) -> BTreeSet<String> {
    let statuses =
        pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    statuses.map(|status| status.name.clone()).collect()
}
