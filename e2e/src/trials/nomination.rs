//! Trial of nominations: pods are nominated for the node of their devices before they are bound, by
//! the controller.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::pod_watch::{PodEvent, PodWatch};
use super::test_bed::TestBed;
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

const PODS: usize = 8;

pub(super) async fn precedes_binding(test_bed: TestBed) -> TrialOutcome {
    let share = serde_json::json!({"memory": "2Gi", "cores": "5"});
    test_bed.create_template("share", DRIVER, share).await?;
    let mut watch = PodWatch::new(test_bed.pods());
    // The list comes before the pods: on a busy machine most of them are bound when all are
    // created, and a bound pod has no nomination.
    let listed = watch.next().await?;
    anyhow::ensure!(matches!(listed, PodEvent::Listed(pods) if pods.is_empty()), "foreign pods");
    let names: Vec<String> = (0..PODS).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        test_bed.create_holder(name, "share").await?;
    }
    let mut nominated = BTreeMap::new();
    let mut bound = BTreeMap::new();
    while bound.len() < PODS {
        let pods = match watch.next().await? {
            PodEvent::Changed(pod) => vec![pod],
            PodEvent::Listed(pods) => pods,
            PodEvent::Deleted(pod) => anyhow::bail!("pod {} was deleted", pod.name_any()),
        };
        for pod in &pods {
            match (node_of(pod), nomination_by_controller(pod)) {
                (Some(node), _) => drop(bound.insert(pod.name_any(), node)),
                (None, Some(node)) => drop(nominated.insert(pod.name_any(), node)),
                (None, None) => {}
            }
        }
    }
    println!("    {} of {PODS} pods were nominated before they were bound", nominated.len());
    // A write may come too late for single pods: no allocation waits for it.
    anyhow::ensure!(nominated.len() > PODS / 2, "few pods were nominated: {nominated:?}");
    for (pod, node) in &nominated {
        anyhow::ensure!(bound.get(pod) == Some(node), "{pod} is not on {node}: {bound:?}");
    }
    test_bed.delete(&names).await?;
    Ok(Outcome::Passed(vec![]))
}

fn nomination_by_controller(pod: &Pod) -> Option<String> {
    let node = pod.status.as_ref()?.nominated_node_name.clone()?;
    let mut managers = pod.metadata.managed_fields.iter().flatten();
    let is_own = managers.any(|entry| {
        entry.manager.as_deref() == Some("tessera-controller")
            && entry.subresource.as_deref() == Some("status")
    });
    is_own.then_some(node)
}

fn node_of(pod: &Pod) -> Option<String> {
    pod.spec.as_ref()?.node_name.clone()
}
