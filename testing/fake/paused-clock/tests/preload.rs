//! A program with the library in front of it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;
use std::time::Duration;

use tessera_fake_world::artifact;

const HOUR: Duration = Duration::from_secs(3600);

/// How long a program believes that it waited. In truth it has ten minutes.
fn believed() -> Duration {
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
fn hours_of_waiting_pass_at_once_and_are_the_same_in_each_run() {
    let took = believed();
    assert!((HOUR * 2..HOUR * 2 + Duration::from_millis(2)).contains(&took), "{took:?}");
    assert_eq!(took, believed());
}
