//! The interceptor in the driver's place, where nothing is preloaded.

use super::memory::{AGREE, FULL, Filled};
use super::overheads::{AS_MUCH, LITTLE_MORE, launches};
use super::programs::{NCU, SMI};
use super::time::{NEAR, is_near};
use super::{Harness, Kind, TIMEOUT, absent, judged, percent, python, smi};
use crate::container::{self, Container, Mode};

pub(super) const PROXY: Kind = Kind {
    rows: &[
        ("as a proxy: filled to the cap, on the GPU itself", FULL),
        ("as a proxy: the same, as the program sees it", AGREE),
        ("as a proxy: cap of 50 %", NEAR),
        ("as a proxy: launch", LITTLE_MORE),
        ("as a proxy: replay of a graph of 20", LITTLE_MORE),
        ("as a proxy: kernels of replayed graphs in 2 s", AS_MUCH),
    ],
    find: |harness| [held(harness), launches(harness, Mode::Proxy)].concat(),
};

pub(super) const PYTORCH: Kind = Kind {
    rows: &[
        ("as a proxy: PyTorch, filled until refused, on the GPU itself", FULL),
        ("as a proxy: PyTorch, products of matrices of 4096", AS_MUCH),
    ],
    find: |harness| python::pytorch(harness, Mode::Proxy, python::in_the_drivers_place),
};

pub(super) const TRITON: Kind = Kind {
    rows: &[("as a proxy: Triton, a kernel compiled and run", "right sums")],
    find: |harness| vec![python::is_right(harness, &python::TRITON)],
};

pub(super) const NCCL: Kind = Kind {
    rows: &[("as a proxy: NCCL, collectives on a single GPU", "right sums")],
    find: |harness| vec![python::is_right(harness, &python::NCCL)],
};

pub(super) const NVIDIA_SMI: Kind = Kind {
    rows: &[("as a proxy: `nvidia-smi`", AGREE)],
    find: |harness| vec![nvidia_smi(harness)],
};

pub(super) const PROFILER: Kind = Kind {
    rows: &[("as a proxy: `ncu`, 20 launches", "20 profiled")],
    find: |harness| vec![ncu(harness)],
};

fn held(harness: &Harness<'_>) -> Vec<String> {
    let filled =
        Filled::find(harness, Mode::Proxy, &harness.share("proxy-fill", harness.quarter(), 100));
    let part = harness
        .part(&harness.container(Mode::Proxy, &harness.share("proxy-50", harness.quarter(), 50)));
    vec![filled.on_the_gpu(), filled.as_seen(), judged(&percent(part), is_near(part, 50))]
}

/// Of a container in which nothing runs.
fn nvidia_smi(harness: &Harness<'_>) -> String {
    if harness.programs.smi.is_none() {
        return absent(SMI);
    }
    smi::memory(harness, Mode::Proxy, &harness.share("proxy-smi", harness.quarter(), 100), 0.0)
}

const LAUNCHES: usize = 20;

/// Kernels of ours that a profile of CSV has, one line each.
pub(crate) fn profiled(said: &str) -> usize {
    said.lines().filter(|line| line.starts_with('"') && line.contains("\"spin_for_1us\"")).count()
}

/// Returns the number of kernels that are profiled in a container, or the profiler's output.
fn profile(harness: &Harness<'_>, container: &Container<'_>) -> Result<usize, String> {
    let count = LAUNCHES.to_string();
    let program = harness.program.to_str().expect("text");
    let output = container
        .run(NCU, &["--csv", "--metrics", "gpu__time_duration.sum", program, "count", &count]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    match profiled(&said) {
        0 => Err(container::last_line(&output)),
        count => Ok(count),
    }
}

/// Counters may be for root only; then the program says so without the library, too.
fn ncu(harness: &Harness<'_>) -> String {
    if harness.programs.ncu.is_none() {
        return absent(NCU);
    }
    if let Err(said) =
        profile(harness, &harness.node.container_without_library().with_timeout(TIMEOUT))
    {
        return format!("`{NCU}` profiles nothing here without the library either: `{said}`");
    }
    let share = harness.share("proxy-ncu", harness.quarter(), 100);
    match profile(harness, &harness.container(Mode::Proxy, &share).with_timeout(TIMEOUT)) {
        Ok(count) => judged(&format!("{count} of {LAUNCHES}"), count == LAUNCHES),
        Err(said) => format!("**failed**: `{said}`"),
    }
}
