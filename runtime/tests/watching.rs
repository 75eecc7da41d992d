//! When a watch that failed is tried again. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{Error, Event, Result};
use tessera_runtime::cluster::patiently;
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

/// How many seconds after the beginning each event came, of a watch that does this so many times.
async fn seconds_of(round: fn() -> Vec<Result<Event<ConfigMap>>>, rounds: usize) -> Vec<u64> {
    let begun = Instant::now();
    let events = stream::iter((0..rounds).flat_map(|_| round()));
    patiently(events, Seconds(0)).map(|_| begun.elapsed().as_secs()).collect().await
}

fn refused() -> Result<Event<ConfigMap>> {
    Err(Error::NoResourceVersion)
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_refused_is_asked_for_ever_more_rarely() {
    let times = seconds_of(|| vec![Ok(Event::Init), refused()], 4).await;
    assert_eq!(times, [0, 0, 1, 1, 3, 3, 6, 6]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_cut_off_after_each_list_is_asked_for_ever_more_rarely() {
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
async fn after_a_change_the_pauses_begin_anew() {
    let times =
        seconds_of(|| vec![Ok(Event::Apply(ConfigMap::default())), refused(), refused()], 2).await;
    assert_eq!(times, [0, 0, 1, 3, 3, 4]);
    let times =
        seconds_of(|| vec![Ok(Event::Delete(ConfigMap::default())), refused(), refused()], 2).await;
    assert_eq!(times, [0, 0, 1, 3, 3, 4]);
}
