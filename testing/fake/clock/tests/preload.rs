//! Tests of a process with the preload library.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tessera_fake_world::artifact;

/// Environment variable that makes the test program print its time.
const PRINT_TIME: &str = "TESSERA_FAKE_CLOCK_TEST";

fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap()
}

/// Returns the time of day that a process with this skew sees, and a short duration by its
/// monotonic clock.
fn time_in_process(skew: i64) -> (i64, Duration) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), skew.to_ne_bytes()).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "prints_time_on_request", "--nocapture"])
        .env(PRINT_TIME, "")
        .env("LD_PRELOAD", artifact::clock().unwrap())
        .env("TESSERA_FAKE_CLOCK", file.path())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find_map(|line| line.split_once("time=")).unwrap().1;
    let mut words = line.split_whitespace().map(|word| word.parse::<u64>().unwrap());
    (i64::try_from(words.next().unwrap()).unwrap(), Duration::from_nanos(words.next().unwrap()))
}

#[test]
fn prints_time_on_request() {
    if std::env::var_os(PRINT_TIME).is_some() {
        let began = Instant::now();
        println!("time={} {}", now(), began.elapsed().as_nanos());
    }
}

#[test]
fn skews_wall_clock_but_not_durations() {
    for skew in [3600, -3600, 0] {
        let before = now();
        let (time, duration) = time_in_process(skew);
        assert!((before..=now()).contains(&(time - skew)), "{before} {time} {skew}");
        assert!(duration < Duration::from_secs(1800), "{duration:?}");
    }
}
