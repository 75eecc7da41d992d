//! Steps that check events.

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Event as EventObject;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use super::Run;
use crate::scenario::{Event, seconds};
use crate::wait::{self, CheckResult};

impl Run<'_> {
    fn events_api(&self) -> Api<EventObject> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Checks at the end of the scenario that each unique event was reported once.
    pub(super) async fn check_events_are_unique(&self) -> anyhow::Result<()> {
        let events = self.events_api().list(&ListParams::default()).await;
        let events = events.context("cannot list events")?;
        for (step, name) in
            self.once.iter().flat_map(|step| step.on.names.iter().map(move |name| (step, name)))
        {
            let about = events.iter().filter(|event| is_about(event, &step.on.kind, name));
            let texts: Vec<_> =
                about.filter(|event| matches(event, step)).map(event_text).collect();
            anyhow::ensure!(
                texts.len() <= 1,
                "event on {} {name} was reported more than once: {texts:?}",
                step.on.kind
            );
        }
        Ok(())
    }

    pub(super) async fn event(&mut self, step: &Event) -> anyhow::Result<()> {
        if step.once {
            self.once.push(step.clone());
        }
        for name in &step.on.names {
            let events = self.events_api();
            let what = format!(
                "an event on {} {name} that contains {:?}",
                step.on.kind, step.message_contains
            );
            let check = |events: &[EventObject]| {
                let about: Vec<_> =
                    events.iter().filter(|event| is_about(event, &step.on.kind, name)).collect();
                let matching: Vec<_> = about.iter().filter(|event| matches(event, step)).collect();
                match matching[..] {
                    [] => CheckResult::Pending(
                        about.iter().map(|event| event_text(event)).collect::<Vec<_>>().join("; "),
                    ),
                    [_, _, ..] if step.once => {
                        let names =
                            matching.iter().map(|event| event.name_any()).collect::<Vec<_>>();
                        CheckResult::Impossible(format!("several events: {names:?}"))
                    }
                    _ => CheckResult::Done(()),
                }
            };
            wait::until(events, Default::default(), &what, seconds(step.within), check).await?;
        }
        Ok(())
    }
}

/// Not a field selector: kind and name are the only fields common to both event APIs.
fn is_about(event: &EventObject, kind: &str, name: &str) -> bool {
    event.involved_object.kind.as_deref() == Some(kind)
        && event.involved_object.name.as_deref() == Some(name)
}

fn matches(event: &EventObject, step: &Event) -> bool {
    let message = event.message.as_deref().unwrap_or_default();
    step.reason.as_deref().is_none_or(|reason| event.reason.as_deref() == Some(reason))
        && step.message_contains.iter().all(|part| message.contains(part))
}

fn event_text(event: &EventObject) -> String {
    format!(
        "{}: {}",
        event.reason.as_deref().unwrap_or_default(),
        event.message.as_deref().unwrap_or_default()
    )
}
