//! Steps about events.

use k8s_openapi::api::core::v1::Event as EventObject;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use super::{Run, StepError, api};
use crate::scenario::{Event, seconds};
use crate::wait::{self, Verdict};

impl Run<'_> {
    fn events_api(&self) -> Api<EventObject> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// At the end of the scenario: what was to be said once was not said again since.
    pub(super) async fn still_once(&self) -> Result<(), StepError> {
        let events = self.events_api().list(&ListParams::default()).await;
        let events = events.map_err(|error| api("list events", error))?;
        for (step, name) in
            self.once.iter().flat_map(|step| step.on.names.iter().map(move |name| (step, name)))
        {
            let about = events.iter().filter(|event| is_about(event, &step.on.kind, name));
            let said: Vec<_> = about.filter(|event| holds(event, step)).map(words).collect();
            if said.len() > 1 {
                let of = format!("events on {} {name}", step.on.kind);
                return Err(StepError::Differs {
                    of,
                    difference: format!("said more than once: {said:?}"),
                });
            }
        }
        Ok(())
    }

    pub(super) async fn event(&mut self, step: &Event) -> Result<(), StepError> {
        if step.once {
            self.once.push(step.clone());
        }
        for name in &step.on.names {
            let events = self.events_api();
            let what = format!("an event on {} {name} that says {:?}", step.on.kind, step.says);
            let judge = |events: &[EventObject]| {
                let about: Vec<_> =
                    events.iter().filter(|event| is_about(event, &step.on.kind, name)).collect();
                let matching: Vec<_> = about.iter().filter(|event| holds(event, step)).collect();
                match matching[..] {
                    [] => Verdict::NotYet(
                        about.iter().map(|event| words(event)).collect::<Vec<_>>().join("; "),
                    ),
                    [_, _, ..] if step.once => {
                        let names =
                            matching.iter().map(|event| event.name_any()).collect::<Vec<_>>();
                        Verdict::Hopeless(format!("there are several: {names:?}"))
                    }
                    _ => Verdict::Done(()),
                }
            };
            wait::until(events, Default::default(), &what, seconds(step.within), judge).await?;
        }
        Ok(())
    }
}

/// By hand and not by a field selector: names and kinds are all that both event APIs agree on.
fn is_about(event: &EventObject, kind: &str, name: &str) -> bool {
    event.involved_object.kind.as_deref() == Some(kind)
        && event.involved_object.name.as_deref() == Some(name)
}

fn holds(event: &EventObject, step: &Event) -> bool {
    let message = event.message.as_deref().unwrap_or_default();
    step.reason.as_deref().is_none_or(|reason| event.reason.as_deref() == Some(reason))
        && step.says.iter().all(|part| message.contains(part))
}

fn words(event: &EventObject) -> String {
    format!(
        "{}: {}",
        event.reason.as_deref().unwrap_or_default(),
        event.message.as_deref().unwrap_or_default()
    )
}
