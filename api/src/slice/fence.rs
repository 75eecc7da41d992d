//! The fence: what keeps kube-scheduler from allocating devices that the controller allocates.
//!
//! A taint in the slices, or one DeviceTaintRule for all devices of the driver (Kubernetes 1.37 and
//! newer). Autoscalers read slices as they are published: with the taint no node fits, so none is
//! added. They do not read rules (kubernetes/autoscaler #7947).

use k8s_openapi::api::resource::v1::{DeviceTaintRule, DeviceTaintSelector, ResourceSlice};

use crate::names::{DriverName, FENCE_ANNOTATION, FENCE_BY_RULE, MANAGED_TAINT_KEY, NO_SCHEDULE};

/// The allocator of the devices, and what keeps kube-scheduler from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fence {
    /// The controller: every device has the managed taint.
    #[default]
    Taint,
    /// The controller: a DeviceTaintRule has the managed taint, and the slices say so by an
    /// annotation.
    Rule,
    /// kube-scheduler: neither.
    Stock,
}

/// Returns true if the slice was published for the controller, fenced by a DeviceTaintRule.
pub fn is_fenced_by_rule(slice: &ResourceSlice) -> bool {
    let annotation = slice.metadata.annotations.as_ref().and_then(|all| all.get(FENCE_ANNOTATION));
    annotation.is_some_and(|value| value == FENCE_BY_RULE)
}

/// Returns true if the rule keeps kube-scheduler from all devices of the driver.
pub fn is_fence_of(rule: &DeviceTaintRule, driver: &str) -> bool {
    let DeviceTaintSelector { driver: of, pool: None, device: None } =
        rule.spec.device_selector.clone().unwrap_or_default()
    else {
        return false;
    };
    let taint = &rule.spec.taint;
    of.as_deref() == Some(driver) && taint.key == MANAGED_TAINT_KEY && taint.effect == NO_SCHEDULE
}

/// Returns the driver whose devices the rule keeps from kube-scheduler; `None` if it is no fence.
pub fn fenced_driver(rule: &DeviceTaintRule) -> Option<DriverName> {
    let driver = rule.spec.device_selector.as_ref()?.driver.as_deref()?;
    DriverName::new(driver).ok().filter(|driver| is_fence_of(rule, driver.as_str()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::names::DRIVER_NAME;

    #[test]
    fn only_a_rule_for_all_devices_of_the_driver_is_a_fence() {
        let is_fence = |selector: Value, key: &str, effect: &str| {
            let taint = json!({"key": key, "effect": effect});
            let spec = json!({"deviceSelector": selector, "taint": taint});
            let rule = json!({"metadata": {"name": "r"}, "spec": spec});
            is_fence_of(&serde_json::from_value(rule).expect("a rule"), DRIVER_NAME)
        };
        let (key, effect) = (MANAGED_TAINT_KEY, NO_SCHEDULE);
        assert!(is_fence(json!({"driver": DRIVER_NAME}), key, effect));
        assert!(!is_fence(json!({"driver": "gpu.nvidia.com"}), key, effect));
        assert!(!is_fence(json!({"driver": DRIVER_NAME, "pool": "a"}), key, effect));
        assert!(!is_fence(json!({"driver": DRIVER_NAME, "device": "gpu-0"}), key, effect));
        assert!(!is_fence(Value::Null, key, effect), "it selects nothing");
        assert!(!is_fence(json!({"driver": DRIVER_NAME}), "gpu.tessera.dev/other", effect));
        assert!(!is_fence(json!({"driver": DRIVER_NAME}), key, "None"));
    }
}
