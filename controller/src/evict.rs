//! Evictions: first all of them as a dry run, so that none is carried out if the API server refuses
//! one. A PodDisruptionBudget that allows some but not all of them lets a later one fail.

use kube::Client;
use tessera_runtime::cluster::{self, EvictionAnswer, PodEviction};

use crate::commit::REQUEST_TIMEOUT;
use crate::core::effect::{Evictions, PodReference};
use crate::core::event::{Event, EvictionOutcome};
use crate::fault;
use crate::leadership::Tenure;

/// Evicts the pods one by one until an eviction does not succeed or the tenure is over. `client`
/// does not repeat refused requests.
pub async fn evict(client: Client, tenure: Tenure, evictions: Evictions) -> Event {
    let Evictions { purpose, victims } = evictions;
    fault::point_async("evictions-decided").await;
    let mut outcomes = Vec::new();
    for is_dry_run in [true, false] {
        for victim in &victims {
            let outcome = if tenure.is_over() {
                EvictionOutcome::Failed { message: "another replica leads".to_owned() }
            } else {
                evict_pod(&client, victim, is_dry_run).await
            };
            let is_end =
                matches!(outcome, EvictionOutcome::Refused { .. } | EvictionOutcome::Failed { .. });
            if !is_dry_run || is_end {
                outcomes.push((victim.clone(), outcome));
            }
            if is_end {
                return Event::EvictionsEnded { purpose, outcomes };
            }
            if !is_dry_run {
                fault::point_async("eviction-written").await;
            }
        }
    }
    Event::EvictionsEnded { purpose, outcomes }
}

async fn evict_pod(client: &Client, pod: &PodReference, is_dry_run: bool) -> EvictionOutcome {
    let eviction = PodEviction {
        namespace: pod.namespace.as_str(),
        name: pod.name.as_str(),
        uid: pod.uid.as_str(),
        // With 0 the claim would be free before the kubelet has unprepared it.
        grace_period: None,
        is_dry_run,
    };
    match tokio::time::timeout(REQUEST_TIMEOUT, cluster::evict(client, eviction)).await {
        Ok(EvictionAnswer::Evicted) => EvictionOutcome::Evicted,
        Ok(EvictionAnswer::Gone) => EvictionOutcome::Gone,
        Ok(EvictionAnswer::Refused(message)) => EvictionOutcome::Refused { message },
        Ok(EvictionAnswer::Failed(error)) => EvictionOutcome::Failed { message: error.to_string() },
        Err(_) => EvictionOutcome::Failed { message: "no answer".to_owned() },
    }
}
