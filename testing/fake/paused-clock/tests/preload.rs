//! Test of a program with the preload library.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;
use std::time::Duration;

use tessera_fake_world::artifact;

const HOUR: Duration = Duration::from_secs(3600);

/// Returns the time that a program measures. It has ten minutes of real time.
fn measured_wait() -> Duration {
    let preload = format!("LD_PRELOAD={}", artifact::paused_clock().unwrap().display());
    let output = Command::new("timeout")
        .args(["600", "env", &preload, env!("CARGO_BIN_EXE_waits-two-hours")])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Duration::from_nanos(String::from_utf8(output.stdout).unwrap().trim().parse().unwrap())
}

#[test]
fn waits_return_at_once_and_are_deterministic() {
    let elapsed = measured_wait();
    assert!((HOUR * 2..HOUR * 2 + Duration::from_millis(2)).contains(&elapsed), "{elapsed:?}");
    assert_eq!(elapsed, measured_wait());
}
