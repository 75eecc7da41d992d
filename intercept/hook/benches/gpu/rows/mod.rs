//! Measurements on a GPU: the rows of a table, each with its goal.
//!
//! Programs (`benches/programs/gpu.c`, and scripts beside this) run in containers with and without
//! the library, as the tests' programs do; the driver is the node's.

mod device;
mod memory;
mod mps;
mod neighbours;
mod overheads;
mod patterns;
mod programs;
pub(crate) mod proxy;
pub(crate) mod python;
pub(crate) mod smi;
mod time;

use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;

use serde_json::Value;
use tessera_intercept_abi::{ComputePolicy, GpuUuid, Grant, Text};

use crate::container::{self, Container, MIB, Mode, Node, NodeShare, Running};

pub(crate) use programs::{Programs, absent};

/// Text of rows without a GPU.
pub(crate) const NO_GPU: &str = "waits for a GPU";

/// Text of a row whose programs failed: the behaviour of an untried driver is unknown, and other
/// rows go on.
const FAILED: &str = "**failed**: see standard error";

/// Cap in percent of a share without one.
const NO_CAP: u32 = 100;

/// Seconds after which a program is given up that is not ours, or waits for one.
const TIMEOUT: u32 = 300;

/// Duration of measurements.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// Milliseconds of a window in which kernels run.
    pub(crate) window_ms: u32,
    /// Windows of a share of time, after the first, which has the tokens that there are in the
    /// beginning.
    pub(crate) windows: u32,
    /// Launches, or allocations, that are timed together.
    pub(crate) batch: u32,
    /// Containers with and without the library, in turn.
    pub(crate) turns: usize,
}

/// The GPU and its driver.
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) driver: String,
    pub(crate) cuda: String,
    uuid: GpuUuid,
    total_bytes: u64,
    /// The driver's own files: CUDA's and NVML's library.
    libraries: [PathBuf; 2],
}

/// A line of the table.
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) goal: &'static str,
    pub(crate) found: String,
}

/// A kind of measurement: the rows it fills, and how.
struct Kind {
    rows: &'static [(&'static str, &'static str)],
    find: fn(&Harness<'_>) -> Vec<String>,
}

const KINDS: [Kind; 21] = [
    memory::CONTEXTS,
    memory::FILL,
    memory::MANAGED,
    memory::AGREEMENT,
    memory::BEYOND,
    time::CAPS,
    time::SAMPLED,
    neighbours::TENANTS,
    neighbours::LATENCY,
    overheads::OVERHEADS,
    patterns::PATTERNS,
    device::DEVICE,
    python::PYTORCH,
    proxy::PROXY,
    proxy::PYTORCH,
    proxy::TRITON,
    proxy::NCCL,
    proxy::NVIDIA_SMI,
    proxy::PROFILER,
    mps::CLIENTS,
    mps::NO_DAEMON,
];

/// All rows, empty.
pub(crate) fn waiting() -> Vec<Row> {
    KINDS
        .iter()
        .flat_map(|kind| kind.fill(kind.rows.iter().map(|_| NO_GPU.to_owned()).collect()))
        .collect()
}

/// All rows, of a node's first GPU.
pub(crate) fn find(node: &Node, gpu: &Gpu, effort: Effort, programs: &Programs) -> Vec<Row> {
    let harness = Harness::new(node, gpu, effort, programs);
    let find = |kind: &Kind| {
        let found = panic::catch_unwind(AssertUnwindSafe(|| (kind.find)(&harness)));
        kind.fill(found.unwrap_or_else(|_| kind.rows.iter().map(|_| FAILED.to_owned()).collect()))
    };
    KINDS.iter().flat_map(find).collect()
}

impl Kind {
    fn fill(&self, found: Vec<String>) -> Vec<Row> {
        assert_eq!(found.len(), self.rows.len(), "a figure for each row");
        let row =
            |(&(what, goal), found): (&(&str, _), _)| Row { what: what.to_owned(), goal, found };
        self.rows.iter().zip(found).map(row).collect()
    }
}

/// The first GPU of a node; why there is none.
pub(crate) fn look(node: &Node) -> Result<Gpu, String> {
    let program = container::bench_program("gpu", node.path());
    let output = node.container_without_library().run(program, &["who"]);
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    let said = &container::lines_of(&output)[0];
    let text = |field: &str| said[field].as_str().unwrap_or_default().to_owned();
    if said.get("none").is_some() {
        return Err(text("none"));
    }
    let version = number(said, "cuda") as u64;
    Ok(Gpu {
        name: text("name"),
        driver: text("driver"),
        cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
        uuid: text("uuid").parse().map_err(|error| format!("UUID of the GPU: {error}"))?,
        total_bytes: number(said, "total") as u64,
        libraries: ["libcuda", "libnvml"].map(|library| text(library).into()),
    })
}

/// A node with a GPU, and what measurements have in common.
struct Harness<'a> {
    node: &'a Node,
    gpu: &'a Gpu,
    effort: Effort,
    programs: &'a Programs,
    /// `benches/programs/gpu.c`.
    program: PathBuf,
    /// Bytes that a running program takes beside its allocations.
    context_bytes: u64,
    /// Rounds of the kernel that take a millisecond.
    rounds: String,
}

impl<'a> Harness<'a> {
    fn new(node: &'a Node, gpu: &'a Gpu, effort: Effort, programs: &'a Programs) -> Self {
        let program = container::bench_program("gpu", node.path());
        let mut harness =
            Self { node, gpu, effort, programs, program, context_bytes: 0, rounds: String::new() };
        harness.context_bytes = number(&harness.bare(&["context"]), "worked") as u64;
        harness.rounds = number(&harness.bare(&["calibrate"]), "rounds").to_string();
        harness
    }

    /// Runs the program without the library; its last line.
    fn bare(&self, arguments: &[&str]) -> Value {
        self.run(&self.node.container_without_library(), arguments)
    }

    fn run(&self, container: &Container<'_>, arguments: &[&str]) -> Value {
        container::lines_of(&container.run(&self.program, arguments)).pop().expect("a line")
    }

    /// Memory in use on the GPU, by NVML.
    fn used(&self) -> f64 {
        number(&self.bare(&["used"]), "used")
    }

    /// A share of a part of the GPU's memory, and of so many percent of its time.
    fn share(&self, id: &str, memory_limit_bytes: u64, percent: u32) -> NodeShare {
        self.node.share_of(self.grant(id, memory_limit_bytes, percent))
    }

    fn grant(&self, id: &str, memory_limit_bytes: u64, percent: u32) -> Grant {
        Grant {
            gpu_uuid: self.gpu.uuid,
            memory_limit_bytes,
            context_bytes: self.context_bytes,
            cores_percent: percent,
            policy: if percent == NO_CAP { ComputePolicy::None } else { ComputePolicy::Fixed },
            oversubscribe: false,
            mps: false,
            claim_uid: Text::new("0b5f5c1e-9a61-4a0f-8d8c-52b0f2a6c7f1").expect("short"),
            id: Text::new(id).expect("short"),
            sequence: 0,
        }
    }

    /// A container with a share, and with the interceptor where it is to stand.
    fn container(&self, mode: Mode, share: &NodeShare) -> Container<'_> {
        match mode {
            Mode::Proxy => {
                self.node.container_in(Mode::Bare, &[share]).with_proxies(&self.gpu.libraries)
            }
            other => self.node.container_in(other, &[share]),
        }
    }

    /// A quarter of the GPU's memory, in whole MiB.
    fn quarter(&self) -> u64 {
        self.gpu.total_bytes / 4 / MIB * MIB
    }

    /// Starts kernels of a millisecond in a container.
    fn start(&self, container: &Container<'_>, windows: u32) -> Running {
        self.start_kernels("run", container, windows)
    }

    fn start_kernels(&self, which: &str, container: &Container<'_>, windows: u32) -> Running {
        let [window, windows] = [self.effort.window_ms, windows].map(|number| number.to_string());
        container.start(&self.program, &[which, &self.rounds, &window, &windows])
    }

    /// The part of the GPU's time that a container gets, after the first window.
    fn part(&self, container: &Container<'_>) -> f64 {
        let windows = self.effort.windows;
        part(&mut self.start(container, windows + 1), windows)
    }

    /// The medians of a program's fields without the library and with it under a cap in percent, in
    /// turn.
    fn in_turn<const N: usize>(
        &self,
        mode: Mode,
        cap: u32,
        fields: [&str; N],
        run: impl FnMut(&Container<'_>) -> Value,
    ) -> [[f64; 2]; N] {
        let share = self.share(&format!("in-turn-{cap}"), self.quarter(), cap);
        self.in_turn_with(&share, mode, fields, run)
    }

    /// As [`in_turn`](Self::in_turn), with a share.
    fn in_turn_with<const N: usize>(
        &self,
        share: &NodeShare,
        mode: Mode,
        fields: [&str; N],
        mut run: impl FnMut(&Container<'_>) -> Value,
    ) -> [[f64; 2]; N] {
        let mut found = fields.map(|_| [Vec::new(), Vec::new()]);
        for _ in 0..self.effort.turns {
            for (at, container) in
                [self.node.container_without_library(), self.container(mode, share)]
                    .iter()
                    .enumerate()
            {
                let said = run(container);
                for (found, field) in found.iter_mut().zip(fields) {
                    found[at].push(number(&said, field));
                }
            }
        }
        found.map(|both| both.map(median))
    }
}

/// A number that a program said.
fn number(said: &Value, field: &str) -> f64 {
    said[field].as_f64().unwrap_or_else(|| panic!("a number `{field}` in {said}"))
}

/// The part of the GPU's time that running kernels had in windows after the next one.
fn part(running: &mut Running, windows: u32) -> f64 {
    let parts: Vec<_> =
        (0..=windows).map(|_| number(&running.wait_for_field("gpu"), "gpu")).skip(1).collect();
    parts.iter().sum::<f64>() / f64::from(windows)
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// A figure, and whether the goal is met.
fn judged(figure: &str, met: bool) -> String {
    format!("{figure}: {}", if met { "met" } else { "**missed**" })
}

/// A part of something in percent.
fn percent(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}

fn mib(bytes: f64) -> String {
    format!("{:.0} MiB", bytes / MIB as f64)
}
