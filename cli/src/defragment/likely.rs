//! The requests that the pods of a cluster have most, and if one more pod with each fits.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Serialize;
use tessera_allocator::model::{PendingPod, Request};

use super::{Defragmentation, DefragmentationResult, moves_for};
use crate::explain::PlanView;
use crate::output::Table;

/// A request of many pods, and the moves after which one more such pod fits.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LikelyRequest {
    /// Number of pods with the request.
    pub pods: usize,
    /// The result for one more pod, which is named after one of them.
    #[serde(flatten)]
    pub found: Defragmentation,
}

/// Returns the most frequent requests of the pods that have devices or wait for some, at most this
/// number. Pods with the same requests in their claims count as one request; pods of groups are
/// left out.
pub fn likely_requests(view: &PlanView<'_>, most: usize) -> Vec<LikelyRequest> {
    let holders = view.index.holders();
    let running = holders.values().flat_map(|holders| &holders.pods);
    let running = running.filter_map(|holder| view.index.replacement_of(&holder.pod));
    let waiting = view.work.pending.iter().filter(|pod| !pod.is_group()).cloned();
    let mut requests: HashMap<Vec<Arc<[Request]>>, (usize, PendingPod)> = HashMap::new();
    for pod in running.chain(waiting) {
        let key: Vec<_> = pod.pending_claims().map(|claim| Arc::clone(&claim.requests)).collect();
        if key.is_empty() {
            continue;
        }
        let name = |pod: &PendingPod| (pod.namespace.clone(), pod.name.clone());
        let (count, first) = requests.entry(key).or_insert_with(|| (0, pod.clone()));
        *count += 1;
        if name(&pod) < name(first) {
            *first = pod;
        }
    }
    let mut requests: Vec<(usize, PendingPod)> = requests.into_values().collect();
    let order = |(count, pod): &(usize, PendingPod)| {
        (std::cmp::Reverse(*count), pod.namespace.clone(), pod.name.clone())
    };
    requests.sort_by_cached_key(order);
    requests.truncate(most);
    let request = |(pods, pod)| LikelyRequest { pods, found: moves_for(view, &pod, &holders) };
    requests.into_iter().map(request).collect()
}

/// Returns the requests as text.
#[must_use]
pub fn requests_text(requests: &[LikelyRequest], headers: bool) -> String {
    if requests.is_empty() {
        return "no pod has devices of Tessera or waits for some\n".to_owned();
    }
    let columns = ["LIKE POD", "PODS", "ONE MORE", "NODE", "MOVES"];
    let mut table = Table::new(headers.then_some(&columns[..])).align_right(&[1]);
    for LikelyRequest { pods, found } in requests {
        let result = match found.result {
            DefragmentationResult::Fits => "fits",
            DefragmentationResult::FitsAfterMoves => "after moves",
            DefragmentationResult::DoesNotFit => "does not fit",
        };
        let moves = found.moves.iter().map(|one| format!("{}/{}", one.namespace, one.pod));
        let moves = moves.collect::<Vec<_>>().join(",");
        table.row(vec![
            format!("{}/{}", found.namespace, found.pod),
            pods.to_string(),
            result.to_owned(),
            found.node.clone().unwrap_or_else(|| "-".to_owned()),
            if moves.is_empty() { "-".to_owned() } else { moves },
        ]);
    }
    table.render()
}
