//! Priorities of simulated pods, as the API server's admission sets them.

use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::scheduling::v1::PriorityClass;

/// Error returned when the class of a pod is not among the known ones, with its name.
#[derive(Debug)]
pub(super) struct UnknownClass(pub(super) String);

/// Sets the priority and the preemption policy of a pod from its PriorityClass, or from the default
/// one. Values of the manifest stay.
///
/// # Errors
/// [`UnknownClass`]; the pod has no priority then.
pub(super) fn resolve(spec: &mut PodSpec, classes: &[PriorityClass]) -> Result<(), UnknownClass> {
    if spec.priority.is_some() {
        return Ok(());
    }
    let Some(name) = spec.priority_class_name.as_deref().filter(|name| !name.is_empty()) else {
        // Of several default classes, admission takes the one with the lowest value.
        let defaults = classes.iter().filter(|class| class.global_default == Some(true));
        if let Some(class) = defaults.min_by_key(|class| class.value) {
            set(spec, class);
        }
        return Ok(());
    };
    let class = classes.iter().find(|class| class.metadata.name.as_deref() == Some(name));
    match (class, built_in(name)) {
        (Some(class), _) => set(spec, class),
        (None, Some(value)) => spec.priority = Some(value),
        (None, None) => return Err(UnknownClass(name.to_owned())),
    }
    Ok(())
}

fn set(spec: &mut PodSpec, class: &PriorityClass) {
    spec.priority = class.value;
    if spec.preemption_policy.is_none() {
        spec.preemption_policy.clone_from(&class.preemption_policy);
    }
}

/// Returns the value of a class that each cluster has.
fn built_in(class: &str) -> Option<i32> {
    match class {
        "system-cluster-critical" => Some(2_000_000_000),
        "system-node-critical" => Some(2_000_001_000),
        _ => None,
    }
}
