//! What drivers report about their devices.
//!
//! The kubelet's rules: a device that is not in a report keeps its last status until that times
//! out, the end of a driver's stream forgets all of its devices, and whatever is not known is
//! `Unknown`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tessera_proto::health_v1::{DeviceHealth, HealthStatus};
use tokio::sync::watch;
use tokio::time::Instant;

/// The kubelet's default where a driver names no time-out.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// One device's status, in the words of `ResourceHealth`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Health {
    pub(crate) status: &'static str,
    pub(crate) message: Option<String>,
}

impl Health {
    fn unknown() -> Self {
        Self { status: "Unknown", message: None }
    }
}

#[derive(Debug)]
struct Reported {
    health: Health,
    until: Instant,
}

type Devices = HashMap<(String, String), Reported>;

/// Health by driver, pool and device.
#[derive(Debug)]
pub(crate) struct HealthBook {
    drivers: Mutex<HashMap<String, Devices>>,
    changes: watch::Sender<u64>,
}

impl HealthBook {
    pub(crate) fn new() -> Self {
        Self { drivers: Mutex::default(), changes: watch::channel(0).0 }
    }

    /// The value counts changes.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// A driver's report; `now` is when it came.
    pub(crate) fn report(&self, driver: &str, devices: Vec<DeviceHealth>, now: Instant) {
        let mut drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        let book = drivers.entry(driver.to_owned()).or_default();
        let before = book.len();
        book.retain(|_, reported| reported.until > now);
        let mut changed = book.len() != before;
        for device in devices {
            let (key, reported) = read(device, now);
            let same = book
                .insert(key, Reported { health: reported.health.clone(), until: reported.until });
            changed |= same.is_none_or(|before| before.health != reported.health);
        }
        if changed {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    /// The driver's stream has ended.
    pub(crate) fn forget(&self, driver: &str) {
        if self.drivers.lock().unwrap_or_else(PoisonError::into_inner).remove(driver).is_some() {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    pub(crate) fn of(&self, driver: &str, pool: &str, device: &str, now: Instant) -> Health {
        let drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        let reported =
            drivers.get(driver).and_then(|book| book.get(&(pool.to_owned(), device.to_owned())));
        reported
            .filter(|reported| reported.until > now)
            .map_or_else(Health::unknown, |reported| reported.health.clone())
    }
}

fn read(device: DeviceHealth, now: Instant) -> ((String, String), Reported) {
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
        Reported { health: Health { status, message }, until: now + timeout },
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

    fn status(book: &HealthBook, driver: &str, device: &str, now: Instant) -> &'static str {
        book.of(driver, "pool", device, now).status
    }

    #[test]
    fn a_status_holds_until_its_own_time_out_even_when_no_longer_reported() {
        let (book, now) = (HealthBook::new(), Instant::now());
        book.report(
            "d",
            vec![device("a", HealthStatus::Unhealthy, 5), device("b", HealthStatus::Healthy, 0)],
            now,
        );
        book.report("d", vec![], now);
        assert_eq!(status(&book, "d", "a", now), "Unhealthy");
        let later = now + Duration::from_secs(6);
        assert_eq!(
            (status(&book, "d", "a", later), status(&book, "d", "b", later)),
            ("Unknown", "Healthy")
        );
        assert_eq!(status(&book, "d", "b", later + Duration::from_secs(30)), "Unknown");
    }

    #[test]
    fn only_a_change_wakes_the_readers() {
        let (book, now) = (HealthBook::new(), Instant::now());
        let mut changes = book.subscribe();
        book.report("d", vec![device("a", HealthStatus::Healthy, 0)], now);
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        book.report("d", vec![device("a", HealthStatus::Healthy, 0)], now);
        assert!(!changes.has_changed().unwrap());
        book.report("d", vec![device("a", HealthStatus::Unhealthy, 0)], now);
        assert!(changes.has_changed().unwrap());
    }

    #[test]
    fn the_end_of_a_stream_forgets_its_driver_only() {
        let (book, now) = (HealthBook::new(), Instant::now());
        book.report("one", vec![device("a", HealthStatus::Healthy, 0)], now);
        book.report("two", vec![device("a", HealthStatus::Healthy, 0)], now);
        book.forget("one");
        assert_eq!(
            (status(&book, "one", "a", now), status(&book, "two", "a", now)),
            ("Unknown", "Healthy")
        );
    }
}
