//! DeviceTaintRules: taints of devices that are not in their slices.
//!
//! Upstream's allocator sees slices with the rules merged in (`resourceslice/tracker`), so ours
//! does too.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceTaintRule;
use tessera_allocator::model::{Slice, Taint};
use tessera_api::names::MANAGED_TAINT_KEY;

use crate::convert;

/// One DeviceTaintRule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaintRule {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
    taint: Taint,
}

impl TaintRule {
    /// Reads a rule. Returns none for one that taints nothing: without a selector, or with the
    /// managed taint, which does not repel our claims from any source.
    pub(crate) fn new(object: &DeviceTaintRule) -> Option<Self> {
        let selector = object.spec.device_selector.as_ref()?;
        let taint = convert::taint(&object.spec.taint);
        (taint.key != MANAGED_TAINT_KEY).then(|| Self {
            driver: selector.driver.clone(),
            pool: selector.pool.clone(),
            device: selector.device.clone(),
            taint,
        })
    }

    fn selects_pool(&self, slice: &Slice) -> bool {
        let is =
            |asked: &Option<String>, name: &str| asked.as_deref().is_none_or(|asked| asked == name);
        is(&self.driver, slice.pool.driver.as_str()) && is(&self.pool, slice.pool.pool.as_str())
    }
}

/// Returns the slice with the taints of all rules that select its devices; without any, the slice
/// itself.
pub(crate) fn tainted<'r>(
    slice: &Arc<Slice>,
    rules: impl Iterator<Item = &'r TaintRule>,
) -> Arc<Slice> {
    let mut tainted = Arc::clone(slice);
    for rule in rules.filter(|rule| rule.selects_pool(slice)) {
        for device in &mut Arc::make_mut(&mut tainted).devices {
            if rule.device.as_deref().is_none_or(|name| device.name == name) {
                Arc::make_mut(device).taints.push(rule.taint.clone());
            }
        }
    }
    tainted
}
