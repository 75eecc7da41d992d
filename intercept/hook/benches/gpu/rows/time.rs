//! GPU time that a container gets.

use std::sync::mpsc::{Sender, channel};
use std::thread;

use super::programs::SMI;
use super::{Harness, Kind, absent, judged, number, percent, smi};
use crate::container::{Mode, NodeShare, arbitrate};

/// The goal of caps.
pub(super) const NEAR: &str = "within 3 points, 95 % of it at least";

/// The goal of caps as a sampler sees them.
const NEAR_SAMPLED: &str = "mean absolute error of 3 points at most, 95 % of the cap at least";

pub(super) const CAPS: Kind = Kind {
    rows: &[
        ("cap of 10 %", NEAR),
        ("cap of 25 %", NEAR),
        ("cap of 50 %", NEAR),
        ("cap of 75 %", NEAR),
        ("cap of 90 %", NEAR),
    ],
    find: |harness| [10, 25, 50, 75, 90].map(|percent| cap(harness, percent)).into(),
};

pub(super) const SAMPLED: Kind = Kind {
    rows: &[
        ("cap of 25 %, sampled by `nvidia-smi`", NEAR_SAMPLED),
        ("cap of 50 %, sampled by `nvidia-smi`", NEAR_SAMPLED),
        ("cap of 75 %, sampled by `nvidia-smi`", NEAR_SAMPLED),
    ],
    find: |harness| [25, 50, 75].map(|percent| sampled(harness, percent)).into(),
};

/// Returns true if a part of the GPU's time is near its cap.
pub(super) fn is_near(part: f64, cap: u32) -> bool {
    (part - f64::from(cap) / 100.0).abs() <= 0.03 && is_most(part, cap)
}

fn is_most(part: f64, cap: u32) -> bool {
    part >= 0.95 * (f64::from(cap) / 100.0)
}

/// Runs something while the driver's part in sharing time is done for two shares.
pub(super) fn arbitrated<T>(shares: &[NodeShare; 2], run: impl FnOnce() -> T) -> T {
    let (stop, stopped): (Sender<()>, _) = channel();
    thread::scope(move |scope| {
        // Dropped in any case, or the other would be waited for.
        let _stop = stop;
        scope.spawn(move || arbitrate(shares, &stopped));
        run()
    })
}

fn cap(harness: &Harness<'_>, cap: u32) -> String {
    let share =
        |id: &str, percent| harness.share(&format!("{id}-{cap}"), harness.quarter(), percent);
    let alone = harness.part(&harness.container(Mode::Preload, &share("alone", cap)));
    let shares = [share("beside", cap), share("neighbour", 100)];
    let (beside, neighbour) = arbitrated(&shares, || {
        // It goes on for longer than it is looked at.
        let mut neighbour = harness.start(&harness.container(Mode::Preload, &shares[1]), 1_000);
        neighbour.wait_for_field("gpu");
        let beside = harness.part(&harness.container(Mode::Preload, &shares[0]));
        (beside, number(&neighbour.wait_for_field("gpu"), "gpu"))
    });
    let [all, beside, neighbour] = [alone, beside, neighbour].map(percent);
    let figure =
        format!("{all} alone; {beside} beside a neighbour without a cap, which had {neighbour}");
    judged(&figure, is_near(alone, cap))
}

/// From outside of the container, for twice as long as kernels are counted elsewhere: the sampler
/// has to begin first.
fn sampled(harness: &Harness<'_>, cap: u32) -> String {
    let Some(program) = &harness.programs.smi else { return absent(SMI) };
    let windows = 2 * harness.effort.windows;
    let share = harness.share(&format!("sampled-{cap}"), harness.quarter(), cap);
    let mut running = harness.start(&harness.container(Mode::Preload, &share), windows + 2);
    // The tokens that there are in the beginning.
    running.wait_for_field("gpu");
    let (part, said) = smi::sampled(program, harness, || super::part(&mut running, windows));
    let means = smi::means_of_seconds(&said);
    if means.is_empty() {
        return format!("**failed**: `{SMI}` says `{}`", said.lines().last().unwrap_or_default());
    }
    let error = smi::mean_absolute_error(&means, cap.into());
    let mean = means.iter().sum::<f64>() / means.len() as f64;
    let figure = format!(
        "{mean:.1} % in {} windows, mean absolute error {error:.1} points; {} by its kernels",
        means.len(),
        percent(part)
    );
    judged(&figure, error <= 3.0 && is_most(part, cap))
}
