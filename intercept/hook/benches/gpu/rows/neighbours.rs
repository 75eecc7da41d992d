//! Interference of containers on one GPU.

use super::time::arbitrated;
use super::{Harness, Kind, judged, number, part, percent};
use crate::container::{Container, Mode, NodeShare};

pub(super) const TENANTS: Kind =
    Kind { rows: &[("two containers of 30 and 70 %", "ratio of 2.1 to 2.6")], find: tenants };

pub(super) const LATENCY: Kind = Kind {
    rows: &[
        ("a short kernel beside a busy neighbour, median", ""),
        ("the same, 99th percentile", "no longer than without the library"),
    ],
    find: latency,
};

/// Shares of 30 and 70 %.
fn unequal(harness: &Harness<'_>, id: &str) -> [NodeShare; 2] {
    [30, 70].map(|percent| harness.share(&format!("{id}-{percent}"), harness.quarter(), percent))
}

fn tenants(harness: &Harness<'_>) -> Vec<String> {
    let shares = unequal(harness, "tenant");
    let windows = harness.effort.windows;
    let [less, more] = arbitrated(&shares, || {
        let start = |share| harness.start(&harness.container(Mode::Preload, share), windows + 1);
        let mut both = shares.each_ref().map(start);
        both.each_mut().map(|running| part(running, windows))
    });
    let ratio = more / less;
    let figure = format!("{} and {}, ratio {ratio:.2}", percent(less), percent(more));
    vec![judged(&figure, (2.1..=2.6).contains(&ratio))]
}

/// From the launch of a short kernel until the wait for it is over, in microseconds: median and
/// 99th percentile.
fn of_a_short_kernel(harness: &Harness<'_>, container: &Container<'_>) -> [f64; 2] {
    let said = harness.run(container, &["latency", &(harness.effort.batch * 10).to_string()]);
    ["p50", "p99"].map(|field| number(&said, field) / 1000.0)
}

/// Latency of a short kernel while kernels of a millisecond run in another container.
fn beside(harness: &Harness<'_>, container: &Container<'_>, neighbour: &Container<'_>) -> [f64; 2] {
    let mut neighbour = harness.start(neighbour, 1_000);
    neighbour.wait_for_field("gpu");
    of_a_short_kernel(harness, container)
}

fn latency(harness: &Harness<'_>) -> Vec<String> {
    let bare = || harness.node.container_without_library();
    let alone = of_a_short_kernel(harness, &bare());
    let without = beside(harness, &bare(), &bare());
    let shares = unequal(harness, "latency");
    let held = arbitrated(&shares, || {
        let [less, more] = shares.each_ref().map(|share| harness.container(Mode::Preload, share));
        beside(harness, &less, &more)
    });
    let figure = |at: usize| {
        let [alone, without, held] = [alone, without, held].map(|of| of[at]);
        let times = held / without;
        format!(
            "{alone:.1} us alone; {without:.1} us beside one, {held:.1} us where they have 30 and 70 % ({times:.2} times)"
        )
    };
    vec![figure(0), judged(&figure(1), held[1] <= without[1])]
}
