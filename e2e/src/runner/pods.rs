//! Steps that check pods and their containers.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use kube::Api;
use kube::api::LogParams;
use serde_json::Value;

use super::{Run, StepError, api_error};
use crate::expectation::compare;
use crate::scenario::{Pods, Probe, seconds};
use crate::wait::{self, CheckResult};

impl Run<'_> {
    pub(super) fn pods_api(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(super) async fn pods(&self, step: &Pods) -> Result<(), StepError> {
        for name in &step.names.0 {
            let what = format!("pod {name} to be {}", step.phase);
            let check = |pod: Option<&Pod>| check_phase(pod, &step.phase);
            let node =
                wait::until_one(self.pods_api(), name, &what, seconds(step.within), check).await?;
            if let Some(expected) = &step.node
                && node.as_ref() != Some(expected)
            {
                let difference =
                    format!("runs on {}, expected {expected}", node.unwrap_or_default());
                return Err(StepError::Differs { object: format!("pod {name}"), difference });
            }
        }
        Ok(())
    }

    pub(super) async fn probe(&self, step: &Probe) -> Result<(), StepError> {
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
            let differs = |difference| StepError::Differs { object: object.clone(), difference };
            compare(&step.has, &line)
                .map_err(|difference| differs(format!("{difference}, in {line}")))?;
            for field in step.sum.keys() {
                let number = line[field]
                    .as_i64()
                    .ok_or_else(|| differs(format!("no number `{field}` in {line}")))?;
                *sums.entry(field).or_default() += i128::from(number);
            }
        }
        for (field, expected) in &step.sum {
            let sum = sums.get(field.as_str()).copied().unwrap_or_default();
            let sum = i64::try_from(sum).unwrap_or(i64::MAX).into();
            compare(expected, &sum).map_err(|difference| StepError::Differs {
                object: format!("the sum of {field}"),
                difference,
            })?;
        }
        Ok(())
    }

    /// Waits until a container runs or has run, so that it has a log; returns its name.
    async fn wait_container_started(
        &self,
        pod: &str,
        container: Option<&str>,
        within: Duration,
    ) -> Result<String, StepError> {
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
    ) -> Result<Value, StepError> {
        let object = format!("container {container} of pod {pod}");
        let parameters = LogParams {
            container: Some(container.to_owned()),
            follow: true,
            ..LogParams::default()
        };
        let mut seen = String::new();
        let read = async {
            let stream = self.pods_api().log_stream(pod, &parameters).await;
            let mut lines = stream
                .map_err(|error| api_error(&format!("read the output of {object}"), error))?
                .lines();
            let failed = |source| StepError::Output { object: object.clone(), source };
            while let Some(line) = lines.try_next().await.map_err(failed)? {
                match serde_json::from_str::<Value>(&line) {
                    Ok(value) if value["event"] == event => return Ok(value),
                    _ => seen = format!("{seen}{line}\n"),
                }
            }
            let difference = format!("ended without a line of event `{event}`");
            Err(StepError::Differs { object: object.clone(), difference })
        };
        let outcome = tokio::time::timeout(within, read).await;
        match outcome {
            Ok(Ok(line)) => Ok(line),
            Ok(Err(StepError::Differs { object, difference })) => Err(StepError::Differs {
                object,
                difference: format!("{difference}; output:\n{seen}"),
            }),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                let difference =
                    format!("no line of event `{event}` within {within:?}; output:\n{seen}");
                Err(StepError::Differs { object, difference })
            }
        }
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
