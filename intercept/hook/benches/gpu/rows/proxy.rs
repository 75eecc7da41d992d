//! The interceptor in the driver's place, where nothing is preloaded.

use super::memory::{AGREE, FULL, Filled};
use super::overheads::{AS_MUCH, LITTLE_MORE, launches};
use super::programs::{NCU, SMI};
use super::time::{NEAR, is_near};
use super::{Kind, Rig, TIMEOUT, absent, judged, percent, python, smi};
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
    find: |rig| [held(rig), launches(rig, Mode::Proxy)].concat(),
};

pub(super) const PYTORCH: Kind = Kind {
    rows: &[
        ("as a proxy: PyTorch, filled until refused, on the GPU itself", FULL),
        ("as a proxy: PyTorch, products of matrices of 4096", AS_MUCH),
    ],
    find: |rig| python::pytorch(rig, Mode::Proxy, python::in_the_drivers_place),
};

pub(super) const TRITON: Kind = Kind {
    rows: &[("as a proxy: Triton, a kernel compiled and run", "right sums")],
    find: |rig| vec![python::is_right(rig, &python::TRITON)],
};

pub(super) const NCCL: Kind = Kind {
    rows: &[("as a proxy: NCCL, collectives on a single GPU", "right sums")],
    find: |rig| vec![python::is_right(rig, &python::NCCL)],
};

pub(super) const NVIDIA_SMI: Kind =
    Kind { rows: &[("as a proxy: `nvidia-smi`", AGREE)], find: |rig| vec![nvidia_smi(rig)] };

pub(super) const PROFILER: Kind =
    Kind { rows: &[("as a proxy: `ncu`, 20 launches", "20 profiled")], find: |rig| vec![ncu(rig)] };

fn held(rig: &Rig<'_>) -> Vec<String> {
    let filled = Filled::find(rig, Mode::Proxy, &rig.share("proxy-fill", rig.quarter(), 100));
    let part = rig.part(&rig.container(Mode::Proxy, &rig.share("proxy-50", rig.quarter(), 50)));
    vec![filled.on_the_gpu(), filled.as_seen(), judged(&percent(part), is_near(part, 50))]
}

/// Of a container in which nothing runs.
fn nvidia_smi(rig: &Rig<'_>) -> String {
    if rig.programs.smi.is_none() {
        return absent(SMI);
    }
    smi::memory(rig, Mode::Proxy, &rig.share("proxy-smi", rig.quarter(), 100), 0.0)
}

const LAUNCHES: usize = 20;

/// Kernels of ours that a profile of CSV has, one line each.
pub(crate) fn profiled(said: &str) -> usize {
    said.lines().filter(|line| line.starts_with('"') && line.contains("\"spin_for_1us\"")).count()
}

/// How many kernels are profiled in a container; what is said where none is.
fn profile(rig: &Rig<'_>, container: &Container<'_>) -> Result<usize, String> {
    let count = LAUNCHES.to_string();
    let program = rig.program.to_str().expect("text");
    let output = container
        .run(NCU, &["--csv", "--metrics", "gpu__time_duration.sum", program, "count", &count]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    match profiled(&said) {
        0 => Err(container::last_line(&output)),
        count => Ok(count),
    }
}

/// Counters may be for root only; then the program says so without the library, too.
fn ncu(rig: &Rig<'_>) -> String {
    if rig.programs.ncu.is_none() {
        return absent(NCU);
    }
    if let Err(said) = profile(rig, &rig.node.container_without_library().with_timeout(TIMEOUT)) {
        return format!("`{NCU}` profiles nothing here without the library either: `{said}`");
    }
    let share = rig.share("proxy-ncu", rig.quarter(), 100);
    match profile(rig, &rig.container(Mode::Proxy, &share).with_timeout(TIMEOUT)) {
        Ok(count) => judged(&format!("{count} of {LAUNCHES}"), count == LAUNCHES),
        Err(said) => format!("**failed**: `{said}`"),
    }
}
