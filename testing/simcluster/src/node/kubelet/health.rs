//! Device health reported by drivers, under the kubelet's rules.
//!
//! A device that is missing from a report keeps its last status until that times out. The end of a
//! driver's stream removes all of its devices. An unknown device is `Unknown`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tessera_proto::health_v1::{DeviceHealth, HealthStatus};
use tokio::sync::watch;
use tokio::time::Instant;

/// Time-out used by the kubelet if a driver sets none.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Status of one device, as spelled in `ResourceHealth`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceStatus {
    pub(crate) status: &'static str,
    pub(crate) message: Option<String>,
}

impl DeviceStatus {
    fn unknown() -> Self {
        Self { status: "Unknown", message: None }
    }
}

#[derive(Debug)]
struct Reported {
    health: DeviceStatus,
    until: Instant,
}

type Devices = HashMap<(String, String), Reported>;

/// Device health by driver, pool and device.
#[derive(Debug)]
pub(crate) struct DeviceHealthCache {
    drivers: Mutex<HashMap<String, Devices>>,
    changes: watch::Sender<u64>,
}

impl DeviceHealthCache {
    pub(crate) fn new() -> Self {
        Self { drivers: Mutex::default(), changes: watch::channel(0).0 }
    }

    /// Returns a receiver whose value counts changes.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Stores a driver's report that arrived at `now`.
    pub(crate) fn report(&self, driver: &str, devices: Vec<DeviceHealth>, now: Instant) {
        let mut drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        let cache = drivers.entry(driver.to_owned()).or_default();
        let before = cache.len();
        cache.retain(|_, reported| reported.until > now);
        let mut changed = cache.len() != before;
        for device in devices {
            let (key, reported) = parse(device, now);
            let same = cache
                .insert(key, Reported { health: reported.health.clone(), until: reported.until });
            changed |= same.is_none_or(|before| before.health != reported.health);
        }
        if changed {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    /// Removes all devices of a driver whose stream has ended.
    pub(crate) fn remove_driver(&self, driver: &str) {
        if self.drivers.lock().unwrap_or_else(PoisonError::into_inner).remove(driver).is_some() {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    pub(crate) fn get(&self, driver: &str, pool: &str, device: &str, now: Instant) -> DeviceStatus {
        let drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        let reported =
            drivers.get(driver).and_then(|cache| cache.get(&(pool.to_owned(), device.to_owned())));
        reported
            .filter(|reported| reported.until > now)
            .map_or_else(DeviceStatus::unknown, |reported| reported.health.clone())
    }
}

fn parse(device: DeviceHealth, now: Instant) -> ((String, String), Reported) {
    let status = match device.health() {
        HealthStatus::Healthy => "Healthy",
        HealthStatus::Unhealthy => "Unhealthy",
        HealthStatus::Unknown => "Unknown",
    };
    let timeout = match u64::try_from(device.health_check_timeout_seconds) {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
        _ => DEFAULT_TIMEOUT,
    };
    let message = Some(device.message).filter(|message| !message.is_empty());
    let id = device.device.unwrap_or_default();
    (
        (id.pool_name, id.device_name),
        Reported { health: DeviceStatus { status, message }, until: now + timeout },
    )
}

#[cfg(test)]
mod tests {
    use tessera_proto::health_v1::DeviceIdentifier;

    use super::*;

    fn device(name: &str, health: HealthStatus, timeout: i64) -> DeviceHealth {
        DeviceHealth {
            device: Some(DeviceIdentifier { pool_name: "pool".into(), device_name: name.into() }),
            health: health.into(),
            last_updated_time: 0,
            health_check_timeout_seconds: timeout,
            message: String::new(),
        }
    }

    fn status(cache: &DeviceHealthCache, driver: &str, device: &str, now: Instant) -> &'static str {
        cache.get(driver, "pool", device, now).status
    }

    #[test]
    fn status_expires_by_its_own_time_out() {
        let (cache, now) = (DeviceHealthCache::new(), Instant::now());
        cache.report(
            "d",
            vec![device("a", HealthStatus::Unhealthy, 5), device("b", HealthStatus::Healthy, 0)],
            now,
        );
        cache.report("d", vec![], now);
        assert_eq!(status(&cache, "d", "a", now), "Unhealthy");
        let later = now + Duration::from_secs(6);
        assert_eq!(
            (status(&cache, "d", "a", later), status(&cache, "d", "b", later)),
            ("Unknown", "Healthy")
        );
        assert_eq!(status(&cache, "d", "b", later + Duration::from_secs(30)), "Unknown");
    }

    #[test]
    fn unchanged_report_does_not_notify() {
        let (cache, now) = (DeviceHealthCache::new(), Instant::now());
        let mut changes = cache.subscribe();
        cache.report("d", vec![device("a", HealthStatus::Healthy, 0)], now);
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        cache.report("d", vec![device("a", HealthStatus::Healthy, 0)], now);
        assert!(!changes.has_changed().unwrap());
        cache.report("d", vec![device("a", HealthStatus::Unhealthy, 0)], now);
        assert!(changes.has_changed().unwrap());
    }

    #[test]
    fn end_of_stream_clears_only_its_driver() {
        let (cache, now) = (DeviceHealthCache::new(), Instant::now());
        cache.report("one", vec![device("a", HealthStatus::Healthy, 0)], now);
        cache.report("two", vec![device("a", HealthStatus::Healthy, 0)], now);
        cache.remove_driver("one");
        assert_eq!(
            (status(&cache, "one", "a", now), status(&cache, "two", "a", now)),
            ("Unknown", "Healthy")
        );
    }
}
