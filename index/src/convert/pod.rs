//! Requirements of pods on nodes.

use k8s_openapi::api::core::v1 as api;
use tessera_allocator::model::{NameMap, PodToleration, SchedulingConstraints};
use tessera_api::quantity::Quantity;

use super::node::amounts;
use super::selector::node_selector;

type Amounts = NameMap<Quantity>;

/// Returns the requirements of a pod on its node.
pub fn scheduling(spec: &api::PodSpec) -> SchedulingConstraints {
    let affinity = spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
    let required =
        affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    SchedulingConstraints {
        node_selector: spec.node_selector.clone().unwrap_or_default(),
        affinity: required.map(node_selector),
        tolerations: spec.tolerations.iter().flatten().map(toleration).collect(),
        requests: requests(spec),
    }
}

fn toleration(toleration: &api::Toleration) -> PodToleration {
    PodToleration {
        key: toleration.key.clone(),
        operator: toleration.operator.clone(),
        value: toleration.value.clone().unwrap_or_default(),
        effect: toleration.effect.clone(),
    }
}

/// Returns the requests of the whole pod, as kube-scheduler adds them up (`PodRequests` of
/// k8s.io/component-helpers/resource): the larger of the containers that run together and those
/// that run first, restartable init containers counting with everything after them; plus the
/// overhead; `pods: 1`. Requests of the pod itself replace those of its containers.
pub fn requests(spec: &api::PodSpec) -> Amounts {
    let mut together = Amounts::new();
    for container in &spec.containers {
        add(&mut together, &of(container));
    }
    let mut sidecars = Amounts::new();
    let mut first = Amounts::new();
    for container in spec.init_containers.iter().flatten() {
        let mut step = of(container);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut together, &step);
            add(&mut sidecars, &step);
            step = sidecars.clone();
        } else {
            add(&mut step, &sidecars);
        }
        raise(&mut first, &step);
    }
    raise(&mut together, &first);
    let own = spec.resources.as_ref().and_then(|r| r.requests.as_ref());
    for (name, amount) in amounts(own) {
        together.insert(name, amount);
    }
    add(&mut together, &amounts(spec.overhead.as_ref()));
    together.insert("pods".to_owned(), Quantity::from_integer(1));
    together
}

fn of(container: &api::Container) -> Amounts {
    amounts(container.resources.as_ref().and_then(|r| r.requests.as_ref()))
}

fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let entry = sum.entry(name.clone()).or_default();
        *entry = entry.checked_add(*amount).unwrap_or(*entry);
    }
}

fn raise(to: &mut Amounts, at_least: &Amounts) {
    for (name, amount) in at_least {
        let entry = to.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}
