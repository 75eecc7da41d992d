//! A program with the library in front of it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;
use std::time::{Duration, Instant};

use tessera_fake_world::artifact;

const HOUR: Duration = Duration::from_secs(3600);

/// How long a program believes that it waited. Cargo builds it with the tests.
fn believed() -> Duration {
    let library = artifact::paused_clock().unwrap();
    let output = Command::new(library.with_file_name("examples").join("waits_two_hours"))
        .env("LD_PRELOAD", library)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Duration::from_nanos(String::from_utf8(output.stdout).unwrap().trim().parse().unwrap())
}

#[test]
fn hours_of_waiting_pass_at_once_and_are_the_same_in_each_run() {
    let began = Instant::now();
    let took = believed();
    assert!(began.elapsed() < HOUR);
    assert!((HOUR * 2..HOUR * 2 + Duration::from_millis(2)).contains(&took), "{took:?}");
    assert_eq!(took, believed());
}
