//! A program with the library in front of it, and one without.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tessera_fake_world::artifact;

/// Tells the test's own program to say what time it is.
const ASKED: &str = "TESSERA_FAKE_CLOCK_TEST";

fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap()
}

/// What another process believes: the time of day, and how long a moment took by its monotonic
/// clock.
fn believed(ahead: i64) -> (i64, Duration) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), ahead.to_ne_bytes()).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "says_the_time_when_asked", "--nocapture"])
        .env(ASKED, "")
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
fn says_the_time_when_asked() {
    if std::env::var_os(ASKED).is_some() {
        let began = Instant::now();
        println!("time={} {}", now(), began.elapsed().as_nanos());
    }
}

#[test]
fn the_time_of_day_is_wrong_by_what_the_file_says_and_durations_are_right() {
    for ahead in [3600, -3600, 0] {
        let before = now();
        let (time, moment) = believed(ahead);
        assert!((before..=now()).contains(&(time - ahead)), "{before} {time} {ahead}");
        assert!(moment < Duration::from_secs(1800), "{moment:?}");
    }
}
