//! Facts of GPU and NVML with several processes, on which the limits depend.

use serde_json::Value;

use super::{Harness, Kind, NO_CAP, judged, mib, number};
use crate::container::{self, Mode};

/// Processes beside the one that asks, if the GPU has memory for their contexts.
const PROCESSES: u64 = 63;

pub(super) const DEVICE: Kind = Kind {
    rows: &[
        ("`cuMemGetInfo` of one of 64 processes", "2 us more at most"),
        ("time slice: a short kernel beside kernels of 20 ms", ""),
        ("NVML's utilization of two busy processes, in all", "90 to 110 %"),
        ("NVML's memory of a process that opens 256 MiB of another", ""),
    ],
    find: |harness| vec![info(harness), slice(harness), utilization(harness), opened(harness)],
};

fn info(harness: &Harness<'_>) -> String {
    let share = harness.share("info", 3 * harness.quarter(), NO_CAP);
    // Two thirds of the share are for contexts.
    let room = 2 * harness.quarter() / harness.context_bytes.max(1);
    let (processes, batch) = (PROCESSES.min(room).to_string(), harness.effort.batch.to_string());
    let [[none, with]] = harness.in_turn_with(&share, Mode::Preload, ["ns"], |container| {
        harness.run(container, &["info", &processes, &batch])
    });
    let figure = format!("{none:.0} ns, with the library {with:.0} ns beside {processes}");
    judged(&figure, with <= none + 2_000.0)
}

fn slice(harness: &Harness<'_>) -> String {
    let bare = || harness.node.container_without_library();
    let mut neighbour = bare().start(&harness.program, &["slice", &harness.rounds]);
    neighbour.wait_for_field("gpu");
    let said = harness.run(&bare(), &["latency", &harness.effort.batch.to_string()]);
    let ms = |field| number(&said, field) / 1e6;
    format!("{:.2} ms at the median, {:.2} ms at the 99th percentile", ms("p50"), ms("p99"))
}

/// Runs the program outside of containers: NVML shows processes of its own PID namespace.
fn outside(harness: &Harness<'_>, arguments: &[&str]) -> Value {
    let output = harness.node.run(&harness.program, arguments);
    container::lines_of(&output).pop().expect("a line")
}

fn utilization(harness: &Harness<'_>) -> String {
    let start = || harness.start(&harness.node.container_without_library(), 1_000);
    let mut busy = [start(), start()];
    for busy in &mut busy {
        busy.wait_for_field("gpu");
    }
    let said = outside(harness, &["utilization", "2000"]);
    let [processes, sum, largest] = ["processes", "sum", "largest"].map(|name| number(&said, name));
    let figure = format!("{sum:.0} % of {processes:.0} processes, {largest:.0} % at most");
    judged(&figure, (90.0..=110.0).contains(&sum))
}

fn opened(harness: &Harness<'_>) -> String {
    format!("{} more", mib(number(&outside(harness, &["opened"]), "counted")))
}
