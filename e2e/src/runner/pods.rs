//! Steps that check pods and their containers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use kube::Api;
use kube::api::LogParams;
use serde_json::Value;

use super::Run;
use crate::expectation::compare;
use crate::scenario::{Pods, Probe, seconds};
use crate::wait::{self, CheckResult};

impl Run<'_> {
    pub(super) fn pods_api(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(super) async fn pods(&self, step: &Pods) -> anyhow::Result<()> {
        for name in &step.names.0 {
            let what = format!("pod {name} to be {}", step.phase);
            let check = |pod: Option<&Pod>| check_phase(pod, &step.phase);
            let node =
                wait::until_one(self.pods_api(), name, &what, seconds(step.within), check).await?;
            if let Some(expected) = &step.node
                && node.as_ref() != Some(expected)
            {
                bail!("pod {name} runs on {}, expected {expected}", node.unwrap_or_default());
            }
        }
        Ok(())
    }

    pub(super) async fn probe(&self, step: &Probe) -> anyhow::Result<()> {
        let mut sums: BTreeMap<&str, i128> = BTreeMap::new();
        for (pod, container) in step
            .pods
            .0
            .iter()
            .flat_map(|pod| step.selected_containers().into_iter().map(move |c| (pod, c)))
        {
            let container =
                self.wait_container_started(pod, container, seconds(step.within)).await?;
            let object = format!("container {container} of pod {pod}");
            let line = self.read_line(pod, &container, &step.event, seconds(step.within)).await?;
            compare(&step.has, &line)
                .map_err(|difference| anyhow!("{object}: {difference}, in {line}"))?;
            for field in step.sum.keys() {
                let number = line[field]
                    .as_i64()
                    .with_context(|| format!("{object}: no number `{field}` in {line}"))?;
                *sums.entry(field).or_default() += i128::from(number);
            }
        }
        for (field, expected) in &step.sum {
            let sum = sums.get(field.as_str()).copied().unwrap_or_default();
            let sum = i64::try_from(sum).unwrap_or(i64::MAX).into();
            compare(expected, &sum)
                .map_err(|difference| anyhow!("the sum of {field}: {difference}"))?;
        }
        Ok(())
    }

    /// Waits until a container runs or has run, so that it has a log; returns its name.
    async fn wait_container_started(
        &self,
        pod: &str,
        container: Option<&str>,
        within: Duration,
    ) -> anyhow::Result<String> {
        let what = format!("container {} of pod {pod} to run", container.unwrap_or_default());
        let check = |pod: Option<&Pod>| {
            let statuses = pod.and_then(|pod| pod.status.as_ref()).map(|status| {
                // Without a name, the pod has one container, and init containers are ignored.
                let init = status.init_container_statuses.iter().filter(|_| container.is_some());
                let all = init.chain(&status.container_statuses).flatten();
                all.filter(|status| container.is_none_or(|name| name == status.name))
            });
            let mut statuses = statuses.into_iter().flatten();
            match statuses.find(|status| status.state.as_ref().is_some_and(has_started)) {
                Some(status) => CheckResult::Done(status.name.clone()),
                None => CheckResult::Pending(describe(pod)),
            }
        };
        Ok(wait::until_one(self.pods_api(), pod, &what, within, check).await?)
    }

    /// Follows the container's output and returns the first line of that event.
    async fn read_line(
        &self,
        pod: &str,
        container: &str,
        event: &str,
        within: Duration,
    ) -> anyhow::Result<Value> {
        let object = format!("container {container} of pod {pod}");
        let parameters = LogParams {
            container: Some(container.to_owned()),
            follow: true,
            ..LogParams::default()
        };
        let mut seen = String::new();
        let read = async {
            let mut lines = self.pods_api().log_stream(pod, &parameters).await?.lines();
            while let Some(line) = lines.try_next().await? {
                match serde_json::from_str::<Value>(&line) {
                    Ok(value) if value["event"] == event => return Ok(value),
                    _ => seen = format!("{seen}{line}\n"),
                }
            }
            bail!("the output ended")
        };
        let outcome = tokio::time::timeout(within, read).await;
        outcome
            .unwrap_or_else(|_| Err(anyhow!("timed out after {within:?}")))
            .with_context(|| format!("no line of event `{event}` from {object}; output:\n{seen}"))
    }
}

fn has_started(state: &ContainerState) -> bool {
    state.running.is_some() || state.terminated.is_some()
}

fn check_phase(pod: Option<&Pod>, phase: &str) -> CheckResult<Option<String>> {
    let seen = pod
        .and_then(|pod| pod.status.as_ref())
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default();
    if seen == phase {
        return CheckResult::Done(
            pod.and_then(|pod| pod.spec.as_ref()).and_then(|spec| spec.node_name.clone()),
        );
    }
    // Terminal phases: an earlier phase cannot follow.
    if matches!(seen, "Succeeded" | "Failed") {
        CheckResult::Impossible(describe(pod))
    } else {
        CheckResult::Pending(describe(pod))
    }
}

/// Describes the state of a pod: phase, conditions that are not true, and container states.
fn describe(pod: Option<&Pod>) -> String {
    let Some(status) = pod.and_then(|pod| pod.status.as_ref()) else { return "no such pod".into() };
    let phase = status.phase.as_deref().unwrap_or("no phase");
    let conditions =
        status.conditions.iter().flatten().filter(|condition| condition.status != "True");
    let conditions = conditions.filter_map(|condition| condition.message.as_deref());
    let states = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let states = states.filter_map(|status| {
        let state = serde_json::to_string(status.state.as_ref()?).ok()?;
        Some(format!("{}: {state}", status.name))
    });
    let details = conditions.map(str::to_owned).chain(states).collect::<Vec<_>>().join("; ");
    format!("{phase}; {details}")
}
