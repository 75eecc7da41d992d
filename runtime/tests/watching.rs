//! Pauses between attempts of a failing watch. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{Error, Event, Result};
use tessera_runtime::cluster::with_backoff;
use tokio::time::Instant;

/// One second, two seconds, and so on; without a timer.
struct Seconds(u64);

impl Iterator for Seconds {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0 += 1;
        Some(Duration::from_secs(self.0))
    }
}

impl Backoff for Seconds {
    fn reset(&mut self) {
        self.0 = 0;
    }
}

/// Returns the seconds after which each event of a repeated watch arrives.
async fn seconds_of(round: fn() -> Vec<Result<Event<ConfigMap>>>, rounds: usize) -> Vec<u64> {
    let begun = Instant::now();
    let events = stream::iter((0..rounds).flat_map(|_| round()));
    with_backoff(events, Seconds(0)).map(|_| begun.elapsed().as_secs()).collect().await
}

fn refused() -> Result<Event<ConfigMap>> {
    Err(Error::NoResourceVersion)
}

#[tokio::test(start_paused = true)]
async fn refused_list_is_retried_with_growing_pauses() {
    let times = seconds_of(|| vec![Ok(Event::Init), refused()], 4).await;
    assert_eq!(times, [0, 0, 1, 1, 3, 3, 6, 6]);
}

#[tokio::test(start_paused = true)]
async fn watch_failing_after_list_gets_growing_pauses() {
    let listed = || {
        vec![
            Ok(Event::Init),
            Ok(Event::InitApply(ConfigMap::default())),
            Ok(Event::InitDone),
            refused(),
        ]
    };
    let times = seconds_of(listed, 3).await;
    assert_eq!(times, [0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 3]);
}

#[tokio::test(start_paused = true)]
async fn changed_object_resets_pauses() {
    let times =
        seconds_of(|| vec![Ok(Event::Apply(ConfigMap::default())), refused(), refused()], 2).await;
    assert_eq!(times, [0, 0, 1, 3, 3, 4]);
    let times =
        seconds_of(|| vec![Ok(Event::Delete(ConfigMap::default())), refused(), refused()], 2).await;
    assert_eq!(times, [0, 0, 1, 3, 3, 4]);
}
