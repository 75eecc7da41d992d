//! Change from mode stock to managed: GPUs that kube-scheduler could allocate are withheld for a
//! while.
//!
//! kube-scheduler decides first and writes later: an allocation that it decided before a device had
//! a fence may be written up to its binding timeout (600 s) after the taint. For that
//! time the device has a second taint. The time is measured by this process and not by the clock: a
//! restart of the driver restarts the wait and never shortens it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use tessera_api::names::{DeviceName, GpuUuid, LEAVING_STOCK_TAINT_KEY, MANAGED_TAINT_KEY};
use tessera_api::slice::is_fenced_by_rule;
use tokio::time::Instant;

/// The devices that are withheld, with the start of the wait.
#[derive(Debug)]
pub(super) struct StockDrain {
    length: Duration,
    since: BTreeMap<String, Instant>,
}

impl StockDrain {
    /// Returns a drain with waits of this length.
    pub(super) fn new(length: Duration) -> Self {
        Self { length, since: BTreeMap::new() }
    }

    /// Reads published slices: a device without a fence starts its wait, and so does one that
    /// waited before this process started.
    pub(super) fn observe<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a ResourceSlice>,
        now: Instant,
    ) {
        let devices = slices.flat_map(|slice| {
            let by_rule = is_fenced_by_rule(slice);
            slice.spec.devices.iter().flatten().map(move |device| (device, by_rule))
        });
        for (device, by_rule) in devices {
            let known = self.since.get(&device.name).copied();
            let leaving = has(device, LEAVING_STOCK_TAINT_KEY);
            let is_fenced = by_rule || has(device, MANAGED_TAINT_KEY);
            if !is_fenced || (leaving && known.is_none()) {
                self.since.insert(device.name.clone(), now);
            } else if !leaving && known.is_some_and(|since| self.is_over(since, now)) {
                // The wait is over, and the second taint is removed.
                self.since.remove(&device.name);
            }
        }
    }

    /// Returns the GPUs that are withheld.
    pub(super) fn leaving(&self, now: Instant) -> BTreeSet<GpuUuid> {
        let waiting = self.since.iter().filter(|(_, since)| !self.is_over(**since, now));
        waiting.filter_map(|(name, _)| GpuUuid::of_device(&DeviceName::new(name).ok()?)).collect()
    }

    /// Returns the time at which the next wait ends.
    pub(super) fn next_end(&self, now: Instant) -> Option<Instant> {
        self.since.values().map(|since| *since + self.length).filter(|end| *end > now).min()
    }

    fn is_over(&self, since: Instant, now: Instant) -> bool {
        now >= since + self.length
    }
}

fn has(device: &Device, key: &str) -> bool {
    device.taints.iter().flatten().any(|taint| taint.key == key)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const WAIT: Duration = Duration::from_secs(600);
    const GPU: &str = "gpu-00000000-0000-0000-0000-000000000001";

    fn slice(taints: &[&str]) -> ResourceSlice {
        let taints: Vec<_> =
            taints.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
        serde_json::from_value(json!({
            "metadata": {"name": "s"},
            "spec": {
                "driver": "gpu.tessera.dev",
                "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": GPU, "taints": taints}],
            },
        }))
        .expect("a slice")
    }

    fn observe(drain: &mut StockDrain, taints: &[&str], now: Instant) -> usize {
        drain.observe([slice(taints)].iter(), now);
        drain.leaving(now).len()
    }

    #[test]
    fn device_without_managed_taint_waits_once() {
        let (mut drain, begin) = (StockDrain::new(WAIT), Instant::now());
        assert_eq!(observe(&mut drain, &[], begin), 1);
        let both = [MANAGED_TAINT_KEY, LEAVING_STOCK_TAINT_KEY];
        let almost = begin + WAIT - Duration::from_secs(1);
        assert_eq!(observe(&mut drain, &both, almost), 1);
        assert_eq!(drain.next_end(almost), Some(begin + WAIT));
        assert_eq!(
            observe(&mut drain, &both, begin + WAIT),
            0,
            "the remaining taint starts no wait"
        );
        assert_eq!(drain.next_end(begin + WAIT), None);
        assert_eq!(observe(&mut drain, &[MANAGED_TAINT_KEY], begin + WAIT), 0);
        assert!(drain.since.is_empty(), "forgotten");
    }

    #[test]
    fn restart_never_shortens_wait() {
        let (mut drain, begin) = (StockDrain::new(WAIT), Instant::now());
        assert_eq!(observe(&mut drain, &[MANAGED_TAINT_KEY, LEAVING_STOCK_TAINT_KEY], begin), 1);
        assert_eq!(drain.next_end(begin), Some(begin + WAIT));
    }

    #[test]
    fn deleted_slice_or_removed_taint_ends_no_wait() {
        let (mut drain, begin) = (StockDrain::new(WAIT), Instant::now());
        assert_eq!(observe(&mut drain, &[], begin), 1);
        drain.observe([].iter(), begin);
        assert_eq!(drain.leaving(begin).len(), 1);
        assert_eq!(observe(&mut drain, &[MANAGED_TAINT_KEY], begin), 1);
    }

    #[test]
    fn device_that_always_had_managed_taint_does_not_wait() {
        assert_eq!(observe(&mut StockDrain::new(WAIT), &[MANAGED_TAINT_KEY], Instant::now()), 0);
    }
}
