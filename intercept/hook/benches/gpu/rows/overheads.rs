//! Overhead of calls.

use super::{Harness, Kind, NO_CAP, judged, percent};
use crate::container::Mode;

/// The goals of calls, and of work that the GPU does.
pub(super) const LITTLE_MORE: &str = "2 % more at most";
pub(super) const AS_MUCH: &str = "99 % at least";

pub(super) const OVERHEADS: Kind = Kind {
    rows: &[
        ("launch", LITTLE_MORE),
        ("replay of a graph of 20", LITTLE_MORE),
        ("kernels of replayed graphs in 2 s", AS_MUCH),
        ("alloc + free of 2 MiB", ""),
    ],
    find: |harness| [launches(harness, Mode::Preload), vec![pair(harness)]].concat(),
};

/// Time without and with the library, in nanoseconds.
fn times([none, with]: [f64; 2]) -> String {
    format!("{none:.0} ns, with the library {with:.0} ns ({:+.1} %)", (with / none - 1.0) * 100.0)
}

/// Work done without and with the library.
pub(super) fn work([none, with]: [f64; 2]) -> String {
    let part = with / none;
    judged(&format!("{none:.0}, with the library {with:.0} ({})", percent(part)), part >= 0.99)
}

/// Launches, replays, and what graphs get done.
pub(super) fn launches(harness: &Harness<'_>, mode: Mode) -> Vec<String> {
    let batch = harness.effort.batch.to_string();
    let [launch, graph, replayed] =
        harness.in_turn(mode, NO_CAP, ["launch", "graph", "replayed"], |container| {
            harness.run(container, &["launch", &batch])
        });
    let within = |[none, with]: [f64; 2]| judged(&times([none, with]), with <= none * 1.02);
    vec![within(launch), within(graph), work(replayed)]
}

fn pair(harness: &Harness<'_>) -> String {
    let batch = harness.effort.batch.to_string();
    let [pair] = harness.in_turn(Mode::Preload, NO_CAP, ["pair"], |container| {
        harness.run(container, &["memory", &batch])
    });
    times(pair)
}
