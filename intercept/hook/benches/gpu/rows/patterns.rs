//! Launch patterns of programs under a cap.

use super::time::{NEAR, is_near};
use super::{Harness, Kind, judged, number, percent};
use crate::container::{Container, Mode};

const AS_FAST: &str = "97 % of the speed at least";

pub(super) const PATTERNS: Kind = Kind {
    rows: &[
        ("kernels of 2 us, launched and awaited, cap of 30 %", AS_FAST),
        ("kernels of 0.2 ms in 8 streams, cap of 30 %", ""),
        ("200 launches beside a kernel of 20 ms, cap of 90 %", "1.2 times at most"),
        ("3,000 shapes in turn, cap of 90 %", "1.05 times at most"),
        ("a graph of 2,000 kernels, cap of 30 %", NEAR),
        ("kernels of 1 ms with half a CPU, cap of 30 %", "24 to 33 %"),
        ("record of an event", ""),
    ],
    find: patterns,
};

fn patterns(harness: &Harness<'_>) -> Vec<String> {
    let window = (harness.effort.window_ms * harness.effort.windows).to_string();
    let half = harness.share("half", harness.quarter(), 30);
    let half = harness.container(Mode::Preload, &half);
    let half = number(&harness.run(&half, &["half", &harness.rounds, &window]), "gpu");
    let [awaited, streams, nodes] = ["awaited", "streams", "nodes"]
        .map(|which| ns(harness, 30, &[which, &harness.rounds, &window]));
    let [overlap, shapes] =
        ["overlap", "shapes"].map(|which| ns(harness, 90, &[which, &harness.rounds]));
    let speed = |[none, with]: [f64; 2]| none / with;
    let batch = harness.effort.batch.to_string();
    vec![
        judged(&times(awaited), speed(awaited) >= 0.97),
        format!("{}; without the measurement of the driver", times(streams)),
        judged(&times(overlap), speed(overlap) >= 1.0 / 1.2),
        judged(&times(shapes), speed(shapes) >= 1.0 / 1.05),
        judged(&times(nodes), is_near(speed(nodes), 30)),
        judged(&percent(half), (0.24..=0.33).contains(&half)),
        format!("{:.0} ns", number(&harness.bare(&["events", &batch]), "ns")),
    ]
}

/// Returns the time without the library and with a cap, in ns.
fn ns(harness: &Harness<'_>, cap: u32, arguments: &[&str]) -> [f64; 2] {
    let run = |container: &Container<'_>| harness.run(container, arguments);
    let [ns] = harness.in_turn(Mode::Preload, cap, ["ns"], run);
    ns
}

fn times([none, with]: [f64; 2]) -> String {
    format!("{none:.0} ns, with a cap {with:.0} ns ({} of the speed)", percent(none / with))
}
