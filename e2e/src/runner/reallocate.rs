//! Step that measures the latency from freed capacity to the allocation of a pending claim.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Context as _;
use futures::TryStreamExt;
use kube::ResourceExt;
use kube::api::DeleteParams;
use kube::runtime::{WatchStreamExt, watcher};

use super::{Figure, Run};
use crate::leftovers::holds_device;
use crate::scenario::{Reallocate, seconds};
use crate::wait::WaitError;

impl Run<'_> {
    /// Measures the time between two events of one watch: the last deallocation or deletion of a
    /// claim after the pods are deleted, and the allocation of the pending claim.
    pub(super) async fn reallocate(&mut self, step: &Reallocate) -> anyhow::Result<()> {
        let pending = self.claim_name(&step.allocates.pods[0], &step.allocates.claim).await?;
        let mut stream =
            Box::pin(watcher(self.claims_api(), watcher::Config::default()).default_backoff());
        let mut holding = BTreeSet::new();
        let mut freed = None;
        let mut deletion_requested = false;
        let measure = async {
            loop {
                let event = match stream.try_next().await {
                    Ok(Some(event)) => event,
                    Ok(None) => unreachable!("invariant: a watcher never ends"),
                    Err(error) => {
                        tracing::debug!(%error, "claim watch failed; retrying");
                        continue;
                    }
                };
                match event {
                    watcher::Event::InitDone if !deletion_requested => {
                        deletion_requested = true;
                        for pod in &step.delete.0 {
                            self.pods_api().delete(pod, &DeleteParams::default()).await?;
                        }
                    }
                    watcher::Event::Apply(claim) | watcher::Event::InitApply(claim) => {
                        let name = claim.name_any();
                        if name == pending && holds_device(&claim) {
                            return Ok::<_, anyhow::Error>(
                                freed.map(|freed: Instant| freed.elapsed()),
                            );
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
        let what = format!("claim {pending} to be allocated after deletion of {:?}", step.delete.0);
        let outcome = tokio::time::timeout(within, measure).await;
        let took = match outcome {
            Ok(took) => took?,
            Err(_) => {
                let last =
                    format!("capacity was {}freed", if freed.is_some() { "" } else { "not " });
                return Err(WaitError::TooLong { condition: what, waited: within, last }.into());
            }
        };
        let took = took
            .with_context(|| format!("claim {pending} was allocated before capacity was freed"))?;
        self.figures
            .push(Figure { name: "capacity freed -> allocation written".into(), duration: took });
        Ok(())
    }
}
