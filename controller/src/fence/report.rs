//! Events about restored rules.

use std::time::Duration;

use k8s_openapi::api::resource::v1::DeviceTaintRule;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource, ResourceExt};
use tessera_api::events;

use crate::commit::REQUEST_TIMEOUT;

/// The difference of a rule from the wanted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Damage {
    /// It does not exist.
    Missing,
    /// Its spec is another.
    Changed,
}

/// Publishes events.
pub(super) struct Reports {
    client: Client,
    reporter: Reporter,
}

impl Reports {
    pub(super) fn new(client: Client, identity: &str) -> Self {
        let reporter = Reporter {
            controller: events::Reporter::Controller.name().to_owned(),
            instance: Some(identity.to_owned()),
        };
        Self { client, reporter }
    }

    /// Reports a restored rule, which was damaged for this long.
    pub(super) async fn restored(&self, rule: &DeviceTaintRule, damage: Damage, gap: Duration) {
        let (name, seconds) = (rule.name_any(), gap.as_secs_f64());
        let state = match damage {
            Damage::Missing => "did not exist",
            Damage::Changed => "had another content",
        };
        let note = format!(
            "DeviceTaintRule {name} {state} for {seconds:.1} s and is restored. In that time only \
             the policy tessera-allocation kept kube-scheduler from the devices. To let \
             kube-scheduler allocate them, set `mode: stock` in the chart, or remove the \
             driver from `managedDrivers`."
        );
        tracing::warn!(name, seconds, ?damage, "restored the DeviceTaintRule");
        let event = Event {
            type_: EventType::Warning,
            reason: events::FENCE_RESTORED.name().to_owned(),
            note: Some(note),
            action: "Restoring".to_owned(),
            secondary: None,
        };
        let regarding = rule.object_ref(&());
        // A recorder would put a new text into the series of an old event.
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        let publish = recorder.publish(&event, &regarding);
        match tokio::time::timeout(REQUEST_TIMEOUT, publish).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(name, error, "cannot publish event");
            }
            Err(_) => tracing::warn!(name, "cannot publish event: no answer"),
        }
    }
}
