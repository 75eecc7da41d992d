//! The step that measures how soon a waiting claim gets the room that others leave.

use std::collections::BTreeSet;
use std::time::Instant;

use futures::TryStreamExt;
use kube::ResourceExt;
use kube::api::DeleteParams;
use kube::runtime::{WatchStreamExt, watcher};

use super::{Figure, Run, StepError, api};
use crate::leftovers::holds_device;
use crate::scenario::{Room, seconds};
use crate::wait::WaitError;

impl Run<'_> {
    /// Both ends of the measurement come from one watch: the event in which the last claim of the
    /// deleted pods lost its devices, and the one in which the waiting claim got its own.
    pub(super) async fn room(&mut self, step: &Room) -> Result<(), StepError> {
        let waiting = self.claim_name(&step.allocates.pods[0], &step.allocates.claim).await?;
        let mut stream =
            Box::pin(watcher(self.claims_api(), watcher::Config::default()).default_backoff());
        let mut holding = BTreeSet::new();
        let mut freed = None;
        let mut asked = false;
        let measure = async {
            loop {
                let event = match stream.try_next().await {
                    Ok(Some(event)) => event,
                    Ok(None) => unreachable!("invariant: a watcher never ends"),
                    Err(error) => {
                        tracing::debug!(%error, "watching claims; trying again");
                        continue;
                    }
                };
                match event {
                    watcher::Event::InitDone if !asked => {
                        asked = true;
                        for pod in &step.delete.0 {
                            let deleted =
                                self.pods_api().delete(pod, &DeleteParams::default()).await;
                            deleted.map_err(|error| api(&format!("delete pod {pod}"), error))?;
                        }
                    }
                    watcher::Event::Apply(claim) | watcher::Event::InitApply(claim) => {
                        let name = claim.name_any();
                        if name == waiting && holds_device(&claim) {
                            return Ok::<_, StepError>(freed.map(|freed: Instant| freed.elapsed()));
                        }
                        if holds_device(&claim) {
                            holding.insert(name);
                        } else if holding.remove(&name) {
                            freed = Some(Instant::now());
                        }
                    }
                    watcher::Event::Delete(claim) => {
                        if holding.remove(&claim.name_any()) {
                            freed = Some(Instant::now());
                        }
                    }
                    watcher::Event::Init | watcher::Event::InitDone => {}
                }
            }
        };
        let within = seconds(step.within);
        let what = format!("claim {waiting} to be allocated after {:?} went", step.delete.0);
        let outcome = tokio::time::timeout(within, measure).await;
        let took = match outcome {
            Ok(took) => took?,
            Err(_) => {
                let last = format!("room was {}made", if freed.is_some() { "" } else { "not " });
                return Err(WaitError::TooLong { what, waited: within, last }.into());
            }
        };
        let took = took.ok_or_else(|| StepError::Differs {
            of: format!("claim {waiting}"),
            difference: "it was allocated before any room was made".into(),
        })?;
        self.figures.push(Figure { of: "room appears -> allocation written".into(), took });
        Ok(())
    }
}
