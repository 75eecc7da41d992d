//! DeviceTaintRules: taints of devices that are not in their slices.
//!
//! Upstream's allocator sees slices with the rules merged in (`resourceslice/tracker`), so ours
//! does too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceTaintRule;
use tessera_allocator::model::{Slice, Taint};
use tessera_api::names::{DRIVER_NAME, MANAGED_TAINT_KEY, ManagedDrivers};
use tessera_api::slice::fenced_driver;

use crate::convert;
use crate::multimap::Multimap;

/// All DeviceTaintRules that taint devices of managed drivers.
#[derive(Debug, Default)]
pub(crate) struct TaintRules {
    /// By name: the order of the taints on a device.
    rules: BTreeMap<String, TaintRule>,
    /// Names of the rules that select a pool, by pool. A cluster may have one for each failed
    /// device.
    by_pool: Multimap<String, String>,
    /// Names of the other rules.
    of_all_pools: BTreeSet<String>,
}

/// One DeviceTaintRule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaintRule {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
    effect: RuleEffect,
}

/// The effect of a rule on the devices that it selects.
#[derive(Debug, Clone, PartialEq, Eq)]
enum RuleEffect {
    /// They get the taint.
    Taint(Taint),
    /// They are fenced: kube-scheduler does not allocate them.
    Fence,
}

impl TaintRules {
    /// Adds or replaces a rule. Returns the versions before and after that, of which at most the
    /// devices have changed taints; none if nothing changed.
    pub(crate) fn apply(
        &mut self,
        object: &DeviceTaintRule,
        managed: &ManagedDrivers,
    ) -> Vec<TaintRule> {
        let Some(name) = &object.metadata.name else { return Vec::new() };
        let rule = TaintRule::new(object, managed);
        if self.rules.get(name) == rule.as_ref() {
            return Vec::new();
        }
        let mut changed = self.remove(name);
        if let Some(rule) = rule {
            match &rule.pool {
                Some(pool) => self.by_pool.insert(pool.clone(), name.clone()),
                None => {
                    self.of_all_pools.insert(name.clone());
                }
            }
            self.rules.insert(name.clone(), rule.clone());
            changed.push(rule);
        }
        changed
    }

    /// Removes a rule, and returns it.
    pub(crate) fn remove(&mut self, name: &str) -> Vec<TaintRule> {
        let Some(rule) = self.rules.remove(name) else { return Vec::new() };
        match &rule.pool {
            Some(pool) => self.by_pool.remove(pool, name),
            None => {
                self.of_all_pools.remove(name);
            }
        }
        vec![rule]
    }

    /// Returns the slice as the rules leave it: with the taints of all that select its devices, and
    /// of another driver unmanaged without a fence. As a rule that is the slice itself.
    pub(crate) fn tainted(&self, slice: &Arc<Slice>) -> Arc<Slice> {
        let of_pool = self.by_pool.get(slice.pool.pool.as_str());
        let names: BTreeSet<&String> = of_pool.chain(&self.of_all_pools).collect();
        let rules = || names.iter().filter_map(|name| self.rules.get(*name));
        let mut tainted = Arc::clone(slice);
        for rule in rules() {
            let RuleEffect::Taint(taint) = &rule.effect else { continue };
            for d in 0..slice.devices.len() {
                if rule.selects_device(slice, slice.devices[d].name.as_str()) {
                    let device = &mut Arc::make_mut(&mut tainted).devices[d];
                    Arc::make_mut(device).taints.push(taint.clone());
                }
            }
        }
        // Slices of our driver say themselves whether they are fenced.
        let is_fence =
            |rule: &TaintRule| rule.effect == RuleEffect::Fence && rule.selects_any_of(slice);
        if slice.pool.driver.as_str() != DRIVER_NAME && !rules().any(is_fence) {
            for device in &mut Arc::make_mut(&mut tainted).devices {
                Arc::make_mut(device).is_unmanaged = true;
            }
        }
        tainted
    }
}

impl TaintRule {
    /// Reads a rule. Returns none for one that does nothing to our plans: without a selector, of a
    /// driver that is not managed, or with the managed taint and no fence of another driver. The
    /// managed taint does not repel our claims from any source.
    fn new(object: &DeviceTaintRule, managed: &ManagedDrivers) -> Option<Self> {
        let selector = object.spec.device_selector.as_ref()?;
        let driver = selector.driver.as_deref();
        if driver.is_some_and(|driver| !managed.contains(driver)) {
            return None;
        }
        let taint = convert::taint(&object.spec.taint);
        let effect = if taint.key == MANAGED_TAINT_KEY {
            fenced_driver(object).filter(|fenced| fenced.as_str() != DRIVER_NAME)?;
            RuleEffect::Fence
        } else {
            RuleEffect::Taint(taint)
        };
        Some(Self {
            driver: driver.map(str::to_owned),
            pool: selector.pool.clone(),
            device: selector.device.clone(),
            effect,
        })
    }

    /// Returns the pool whose devices the rule selects; `None` for all pools.
    pub(crate) fn pool(&self) -> Option<&str> {
        self.pool.as_deref()
    }

    /// Returns true if the rule selects a device of the slice, which is in the rule's pool.
    pub(crate) fn selects_any_of(&self, slice: &Slice) -> bool {
        slice.devices.iter().any(|device| self.selects_device(slice, device.name.as_str()))
    }

    fn selects_device(&self, slice: &Slice, name: &str) -> bool {
        self.driver.as_deref().is_none_or(|driver| driver == slice.pool.driver.as_str())
            && self.device.as_deref().is_none_or(|device| device == name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::Index;

    fn slice(node: &str) -> Value {
        let device = |gpu: u32| json!({"name": format!("gpu-{gpu}")});
        json!({
            "metadata": {"name": format!("{node}-slice")},
            "spec": {
                "driver": "gpu.tessera.dev", "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [device(0), device(1)],
            },
        })
    }

    fn rule(name: &str, selector: Value, key: &str) -> Value {
        let taint = json!({"key": key, "effect": "NoSchedule"});
        json!({"metadata": {"name": name}, "spec": {"deviceSelector": selector, "taint": taint}})
    }

    fn index() -> Index {
        let mut index = Index::default();
        for node in ["a", "b", "c"] {
            let slice = serde_json::from_value(slice(node)).expect("a slice");
            index.apply_slice(&slice).expect("readable");
        }
        index.changed.slices.clear();
        index
    }

    /// Applies a rule. Returns the names of the changed slices.
    fn apply(index: &mut Index, rule: Value) -> Vec<String> {
        index.apply_taint_rule(&serde_json::from_value(rule).expect("a rule"));
        std::mem::take(&mut index.changed.slices).into_iter().collect()
    }

    fn taints(index: &Index, slice: &str) -> Vec<Vec<String>> {
        let devices = &index.slices[slice].devices;
        devices.iter().map(|d| d.taints.iter().map(|taint| taint.key.clone()).collect()).collect()
    }

    #[test]
    fn a_rule_changes_only_slices_of_its_devices() {
        let mut index = index();
        let of = |pool: &str, device: &str| json!({"pool": pool, "device": device});
        assert_eq!(apply(&mut index, rule("z", of("b", "gpu-1"), "z")), ["b-slice"]);
        assert_eq!(apply(&mut index, rule("z", of("b", "gpu-1"), "z")), [""; 0], "unchanged");
        assert_eq!(apply(&mut index, rule("none", of("b", "gpu-7"), "n")), [""; 0]);
        assert_eq!(apply(&mut index, rule("other", json!({"driver": "x.example"}), "x")), [""; 0]);
        let all = apply(&mut index, rule("all", json!({"driver": "gpu.tessera.dev"}), "a"));
        assert_eq!(all, ["a-slice", "b-slice", "c-slice"]);
        assert_eq!(taints(&index, "b-slice"), [vec!["a"], vec!["a", "z"]], "by name of the rule");

        // The rule moves to another pool.
        assert_eq!(apply(&mut index, rule("z", of("c", "gpu-0"), "z")), ["b-slice", "c-slice"]);
        assert_eq!(taints(&index, "b-slice"), [["a"], ["a"]]);
        assert_eq!(taints(&index, "c-slice"), [vec!["a", "z"], vec!["a"]]);
        let all = rule("all", json!({"driver": "gpu.tessera.dev"}), "a");
        index.remove_taint_rule(&serde_json::from_value(all).expect("a rule"));
        assert_eq!(taints(&index, "c-slice"), [vec!["z"], vec![]]);
        assert_eq!(taints(&index, "a-slice"), [vec![""; 0], vec![]]);
    }

    #[test]
    fn rule_for_a_large_cluster_is_applied_in_parts() {
        let mut index = Index::default();
        for node in 0..1200 {
            let slice = serde_json::from_value(slice(&format!("node-{node:04}")));
            index.apply_slice(&slice.expect("a slice")).expect("readable");
        }
        index.changed.slices.clear();
        let all = rule("all", json!({"driver": "gpu.tessera.dev"}), "a");
        assert_eq!(apply(&mut index, all.clone()).len(), 500);
        assert_eq!(taints(&index, "node-1100-slice"), [vec![""; 0], vec![]], "not yet");
        // What is published or deleted meanwhile has the taints of all rules.
        let published = serde_json::from_value(slice("node-1100")).expect("a slice");
        index.apply_slice(&published).expect("readable");
        assert_eq!(taints(&index, "node-1100-slice"), [["a"], ["a"]]);
        let gone = serde_json::from_value(slice("node-1101")).expect("a slice");
        index.remove_slice(&gone);
        let mut parts = 1;
        while index.continue_tainting() {
            parts += 1;
        }
        assert_eq!(parts, 2);
        assert!(!index.slices.contains_key("node-1101-slice"), "it stays deleted");
        let is_tainted = |name: &String| taints(&index, name) == [["a"], ["a"]];
        assert!(index.published.keys().all(is_tainted));
        index.remove_taint_rule(&serde_json::from_value(all).expect("a rule"));
        while index.continue_tainting() {}
        assert!(index.published.keys().all(|name| taints(&index, name) == [vec![""; 0], vec![]]));
    }
}
