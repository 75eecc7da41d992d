//! What is found on a GPU: the rows of a table, each with its goal.
//!
//! Programs (`benches/programs/gpu.c`) run in containers with and without the library, as the tests' programs do; the driver is the
//! node's.

use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use serde_json::Value;
use tessera_intercept_abi::{ComputePolicy, GpuUuid, Grant, Text};

use crate::container::{self, Container, MIB, Node, NodeShare, Running, arbitrate};
use crate::torch;

/// What is waited for while none was found.
pub(crate) const NO_GPU: &str = "waits for a GPU";

/// What a row has whose programs did not get to their end: nobody knows a driver before it was tried, and other rows go on.
const FAILED: &str = "**failed**: see standard error";

/// How long is measured.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// Milliseconds of a window in which kernels run.
    pub(crate) window_ms: u32,
    /// Windows of a share of time, after the first, which has the tokens that there are in the beginning.
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
    find: fn(&Rig<'_>) -> Vec<String>,
}

const KINDS: [Kind; 7] = [
    Kind {
        rows: &[
            ("a context, of a program that has done nothing", ""),
            ("the same after a module and a launch: what a grant should charge", ""),
        ],
        find: contexts,
    },
    Kind {
        rows: &[
            ("filled to the cap, on the GPU itself", "99 to 100 % of the cap"),
            ("the same, as the program sees it", "agree"),
        ],
        find: fill,
    },
    Kind {
        rows: &[
            ("cap of 10 %", "within 3 points, 95 % of it at least"),
            ("cap of 25 %", "within 3 points, 95 % of it at least"),
            ("cap of 50 %", "within 3 points, 95 % of it at least"),
            ("cap of 90 %", "within 3 points, 95 % of it at least"),
        ],
        find: caps,
    },
    Kind { rows: &[("two containers of 30 and 70 %", "ratio of 2.1 to 2.6")], find: tenants },
    Kind {
        rows: &[
            ("launch", "2 % more at most"),
            ("replay of a graph of 20", "2 % more at most"),
            ("kernels of replayed graphs in 2 s", "99 % at least"),
            ("alloc + free of 2 MiB", ""),
        ],
        find: overheads,
    },
    Kind {
        rows: &[(
            "what the ledger has and the driver not, at most, over pools, `cuMemCreate`, graphs",
            "2 MiB either way",
        )],
        find: agreement,
    },
    Kind { rows: &torch::ROWS, find: torch::find },
];

/// All rows, empty.
pub(crate) fn waiting() -> Vec<Row> {
    KINDS.iter().flat_map(|kind| kind.fill(kind.rows.iter().map(|_| NO_GPU.to_owned()).collect())).collect()
}

/// All rows, of a node's first GPU.
pub(crate) fn find(node: &Node, gpu: &Gpu, effort: Effort) -> Vec<Row> {
    let rig = Rig::new(node, gpu, effort);
    let find = |kind: &Kind| {
        let found = panic::catch_unwind(AssertUnwindSafe(|| (kind.find)(&rig)));
        kind.fill(found.unwrap_or_else(|_| kind.rows.iter().map(|_| FAILED.to_owned()).collect()))
    };
    KINDS.iter().flat_map(find).collect()
}

impl Kind {
    fn fill(&self, found: Vec<String>) -> Vec<Row> {
        assert_eq!(found.len(), self.rows.len(), "a figure for each row");
        let row = |(&(what, goal), found): (&(&str, _), _)| Row { what: what.to_owned(), goal, found };
        self.rows.iter().zip(found).map(row).collect()
    }
}

/// The first GPU of a node; why there is none.
pub(crate) fn look(node: &Node) -> Result<Gpu, String> {
    let program = container::bench_program("gpu", node.path());
    let output = node.without_the_library().run(program, &["who"]);
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
    })
}

/// A node with a GPU, and what measurements have in common.
pub(crate) struct Rig<'a> {
    pub(crate) node: &'a Node,
    gpu: &'a Gpu,
    pub(crate) effort: Effort,
    program: std::path::PathBuf,
    /// What a program that works takes beside what it asks for.
    context_bytes: u64,
    /// Rounds of the kernel that take a millisecond.
    rounds: String,
}

impl<'a> Rig<'a> {
    fn new(node: &'a Node, gpu: &'a Gpu, effort: Effort) -> Self {
        let program = container::bench_program("gpu", node.path());
        let mut rig = Self { node, gpu, effort, program, context_bytes: 0, rounds: String::new() };
        rig.context_bytes = number(&rig.bare(&["context"]), "worked") as u64;
        rig.rounds = number(&rig.bare(&["calibrate"]), "rounds").to_string();
        rig
    }

    /// Runs the program without the library; its last line.
    fn bare(&self, arguments: &[&str]) -> Value {
        self.run(&self.node.without_the_library(), arguments)
    }

    fn run(&self, container: &Container<'_>, arguments: &[&str]) -> Value {
        container::lines_of(&container.run(&self.program, arguments)).pop().expect("a line")
    }

    /// A share of a part of the GPU's memory, and of so many percent of its time.
    pub(crate) fn share(&self, id: &str, memory_limit_bytes: u64, percent: u32) -> NodeShare {
        self.node.share_of(Grant {
            gpu_uuid: self.gpu.uuid,
            memory_limit_bytes,
            context_bytes: self.context_bytes,
            cores_percent: percent,
            policy: if percent == 100 { ComputePolicy::None } else { ComputePolicy::Fixed },
            oversubscribe: false,
            mps: false,
            claim_uid: Text::new("0b5f5c1e-9a61-4a0f-8d8c-52b0f2a6c7f1").expect("short"),
            id: Text::new(id).expect("short"),
            sequence: 0,
        })
    }

    /// A quarter of the GPU's memory, in whole MiB.
    pub(crate) fn quarter(&self) -> u64 {
        self.gpu.total_bytes / 4 / MIB * MIB
    }

    /// Starts kernels of a millisecond in a container.
    fn start(&self, container: &Container<'_>, windows: u32) -> Running {
        let [window, windows] = [self.effort.window_ms, windows].map(|number| number.to_string());
        container.start(&self.program, &["run", &self.rounds, &window, &windows])
    }

    /// The medians of a program's fields without and with the library, in turn.
    pub(crate) fn in_turn<const N: usize>(
        &self,
        fields: [&str; N],
        mut run: impl FnMut(&Container<'_>) -> Value,
    ) -> [[f64; 2]; N] {
        let share = self.share("in-turn", self.quarter(), 100);
        let mut found = fields.map(|_| [Vec::new(), Vec::new()]);
        for _ in 0..self.effort.turns {
            for (at, container) in
                [self.node.without_the_library(), self.node.contain(&[&share])].iter().enumerate()
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
pub(crate) fn number(said: &Value, field: &str) -> f64 {
    said[field].as_f64().unwrap_or_else(|| panic!("a number `{field}` in {said}"))
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// A figure, and whether the goal is met.
pub(crate) fn judged(figure: &str, met: bool) -> String {
    format!("{figure}: {}", if met { "met" } else { "**missed**" })
}

fn mib(bytes: f64) -> String {
    format!("{:.0} MiB", bytes / MIB as f64)
}

/// Time without and with the library, in nanoseconds.
fn times([none, with]: [f64; 2]) -> String {
    format!("{none:.0} ns, with the library {with:.0} ns (+{:.1} %)", (with / none - 1.0) * 100.0)
}

fn contexts(rig: &Rig<'_>) -> Vec<String> {
    let said = rig.bare(&["context"]);
    ["context", "worked"].map(|field| mib(number(&said, field))).into()
}

fn fill(rig: &Rig<'_>) -> Vec<String> {
    let cap = rig.quarter();
    let share = rig.share("fill", cap, 100);
    let used = || number(&rig.bare(&["used"]), "used");
    let before = used();
    let mut filled = rig.node.contain(&[&share]).start(&rig.program, &["fill"]);
    let said = filled.with("taken");
    let (held, ledger) = (used() - before, share.ledger(|ledger| ledger.used_bytes()) as f64);
    let (part, [by_cuda, by_nvml]) =
        (held / cap as f64, ["cudaUsed", "nvmlUsed"].map(|field| number(&said, field)));
    let seen = format!(
        "{} by `cuMemGetInfo`, {} by NVML, {} in the ledger",
        mib(by_cuda),
        mib(by_nvml),
        mib(ledger)
    );
    vec![
        judged(&format!("{:.2} % of {}", part * 100.0, mib(cap as f64)), (0.99..=1.0).contains(&part)),
        judged(&seen, by_cuda == by_nvml && by_nvml == ledger),
    ]
}

/// The part of the GPU's time that a container gets in windows of its own.
fn part(running: &mut Running, windows: u32) -> f64 {
    let parts: Vec<_> = (0..=windows).map(|_| number(&running.with("gpu"), "gpu")).skip(1).collect();
    parts.iter().sum::<f64>() / f64::from(windows)
}

/// Runs something while the driver's part in sharing time is done for two shares.
fn arbitrated<T>(shares: &[NodeShare; 2], run: impl FnOnce() -> T) -> T {
    let (stop, stopped): (Sender<()>, _) = channel();
    thread::scope(move |scope| {
        // Dropped in any case, or the other would be waited for.
        let _stop = stop;
        scope.spawn(move || arbitrate(shares, &stopped));
        run()
    })
}

fn caps(rig: &Rig<'_>) -> Vec<String> {
    [10, 25, 50, 90].map(|percent| cap(rig, percent)).into()
}

fn cap(rig: &Rig<'_>, percent: u32) -> String {
    let windows = rig.effort.windows;
    let share = |id: &str, percent| rig.share(&format!("{id}-{percent}"), rig.quarter(), percent);
    let alone = share("alone", percent);
    let alone = part(&mut rig.start(&rig.node.contain(&[&alone]), windows + 1), windows);
    let shares = [share("beside", percent), share("neighbour", 100)];
    let (beside, neighbour) = arbitrated(&shares, || {
        // It goes on for longer than it is looked at.
        let mut neighbour = rig.start(&rig.node.contain(&[&shares[1]]), 1_000);
        neighbour.with("gpu");
        let beside = part(&mut rig.start(&rig.node.contain(&[&shares[0]]), windows + 1), windows);
        (beside, number(&neighbour.with("gpu"), "gpu"))
    });
    let wanted = f64::from(percent) / 100.0;
    let [alone_percent, beside, neighbour] = [alone, beside, neighbour].map(|part| part * 100.0);
    let figure = format!(
        "{alone_percent:.1} % alone; {beside:.1} % beside a neighbour without a cap, which had {neighbour:.1} %"
    );
    judged(&figure, (alone - wanted).abs() <= 0.03 && alone >= 0.95 * wanted)
}

fn tenants(rig: &Rig<'_>) -> Vec<String> {
    let shares = [30, 70].map(|percent| rig.share(&format!("tenant-{percent}"), rig.quarter(), percent));
    let windows = rig.effort.windows;
    let [less, more] = arbitrated(&shares, || {
        let mut both = shares.each_ref().map(|share| rig.start(&rig.node.contain(&[share]), windows + 1));
        both.each_mut().map(|running| part(running, windows))
    });
    let ratio = more / less;
    let figure = format!("{:.1} and {:.1} %, ratio {ratio:.2}", less * 100.0, more * 100.0);
    vec![judged(&figure, (2.1..=2.6).contains(&ratio))]
}

fn overheads(rig: &Rig<'_>) -> Vec<String> {
    let batch = rig.effort.batch.to_string();
    let [launch, graph, replayed] =
        rig.in_turn(["launch", "graph", "replayed"], |container| rig.run(container, &["launch", &batch]));
    let [pair] = rig.in_turn(["pair"], |container| rig.run(container, &["memory", &batch]));
    let within = |[none, with]: [f64; 2]| judged(&times([none, with]), with <= none * 1.02);
    let throughput = replayed[1] / replayed[0];
    let replays =
        format!("{:.0}, with the library {:.0} ({:.1} %)", replayed[0], replayed[1], throughput * 100.0);
    vec![within(launch), within(graph), judged(&replays, throughput >= 0.99), times(pair)]
}

fn agreement(rig: &Rig<'_>) -> Vec<String> {
    let share = rig.share("claim-0", rig.quarter(), 100);
    let [bare, total_at, shift] = &rig.node.to_compare();
    let arguments = ["agree", bare, total_at, shift];
    let steps = container::lines_of(&rig.node.contain(&[&share]).run(&rig.program, &arguments));
    let apart = |step: &Value| number(step, "ledger") - number(step, "driver");
    let worst =
        steps.iter().max_by(|one, other| apart(one).abs().total_cmp(&apart(other).abs())).expect("steps");
    let figure = format!("{} of {} steps, {worst}", mib(apart(worst)), steps.len());
    vec![judged(&figure, apart(worst).abs() <= 2.0 * MIB as f64)]
}
