//! Overhead of the interceptor: calls with it beside the same calls without, in turn, in containers
//! on one machine.
//!
//! `make bench-intercept`. Below it is a driver that does nothing (`programs/driver.c`), so what
//! differs is the library's own time; the ratio is what it would be of a driver that costs nothing.
//! Nothing is asserted: figures depend on the machine. `ROUNDS=5` takes more rounds; a word behind
//! `--` takes the rows with that word only. `TORCH=...` names a Python with PyTorch, for the row of
//! its eager loop, which runs on the fake driver.

#[path = "../tests/container/mod.rs"]
mod container;

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use container::{Container, GIB, Node, NodeShare, monotonic_ns};
use tempfile::TempDir;
use tessera_intercept_abi::{ComputePolicy, GRANT_LEN, Grant, LEDGER_LEN, Text};

/// Variant of a container.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// No interceptor.
    None,
    /// A grant of memory, with all of the compute. As the driver publishes, launches are not
    /// metered.
    Unlimited,
    /// A grant of memory and of nearly all of the compute: the limiter works and no launch waits.
    Limited,
}

/// A measurement: what the program is told, and what may be added to it, in the unit of the field.
struct Measurement {
    arguments: &'static [&'static str],
    field: &'static str,
    what: &'static str,
    goal_unlimited: Option<f64>,
    goal_limited: Option<f64>,
}

const fn measurement(
    what: &'static str,
    arguments: &'static [&'static str],
    field: &'static str,
    goal_unlimited: Option<f64>,
    goal_limited: Option<f64>,
) -> Measurement {
    Measurement { arguments, field, what, goal_unlimited, goal_limited }
}

/// Row of PyTorch's eager loop.
const EAGER: Measurement = measurement("PyTorch, an operator", &[], "ns", None, None);

const MEASUREMENTS: [Measurement; 19] = [
    measurement("launch", &["launch", "50000"], "ns", Some(10.0), Some(25.0)),
    measurement("launch + sync", &["sync", "10000"], "ns", Some(50.0), None),
    measurement("cuMemGetInfo, 64 processes", &["info", "64", "2000"], "ns", Some(2e3), Some(2e3)),
    measurement("the first 1,000 answers", &["resolve", "1000"], "ns", Some(1e6), Some(1e6)),
    measurement("cuCtxDestroy, 50,000 live", &["destroy", "50000"], "ns", Some(6e7), Some(6e7)),
    measurement("alloc + free, 10 live", &["memory", "10", "5000"], "ns", Some(200.0), Some(200.0)),
    measurement(
        "alloc + free, 1,000 live",
        &["memory", "1000", "5000"],
        "ns",
        Some(200.0),
        Some(200.0),
    ),
    measurement(
        "alloc + free, 100,000 live",
        &["memory", "100000", "5000"],
        "ns",
        Some(200.0),
        Some(200.0),
    ),
    measurement("alloc + free, 1 thread", &["threads", "1", "200000"], "ns", None, None),
    measurement("alloc + free, 2 threads", &["threads", "2", "100000"], "ns", None, None),
    measurement("alloc + free, 8 threads", &["threads", "8", "25000"], "ns", None, None),
    measurement("alloc + free, 64 threads", &["threads", "64", "5000"], "ns", None, None),
    measurement("alloc + free, 2 processes", &["processes", "2", "100000"], "ns", None, None),
    measurement("alloc + free, 8 processes", &["processes", "8", "25000"], "ns", None, None),
    measurement("alloc + free, 64 processes", &["processes", "64", "5000"], "ns", None, None),
    measurement("first use, 200 processes at once, p50", &["start", "200"], "ns", None, None),
    measurement("the same, p99", &["start", "200"], "p99", Some(5e6), Some(5e6)),
    measurement("the same, p99 of CPU time", &["start", "200"], "cpu_p99", None, None),
    measurement("a program without CUDA", &["spawn", "300"], "ns", Some(1e6), Some(1e6)),
];

const VARIANTS: [Variant; 3] = [Variant::None, Variant::Unlimited, Variant::Limited];

/// The programs, and the node they run on.
struct Bench {
    node: Node,
    programs: TempDir,
    unlimited: NodeShare,
    limited: NodeShare,
}

impl Bench {
    fn new() -> Self {
        let programs = TempDir::new().expect("a directory");
        let shared = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
        compile("driver", &shared, &programs.path().join("libcuda.so.1"));
        compile("calls", &["-Itests/programs", "-ldl"], &programs.path().join("calls"));
        let node = Node::new();
        let grant = node.share("unlimited", 0, 70 * GIB).grant;
        let unlimited = node.share_of(Grant { policy: ComputePolicy::None, ..grant });
        unlimited.publish_unmetered(0, monotonic_ns());
        let id = Text::new("limited").expect("short");
        let limited =
            node.share_of(Grant { policy: ComputePolicy::Fixed, cores_percent: 99, id, ..grant });
        Self { node, programs, unlimited, limited }
    }

    fn container(&self, variant: Variant) -> Container<'_> {
        match variant {
            Variant::None => self.node.container_without_library(),
            Variant::Unlimited => self.node.container(&[&self.unlimited]),
            Variant::Limited => self.node.container(&[&self.limited]),
        }
    }

    /// One run of PyTorch's eager loop.
    fn run_eager(&self, variant: Variant, python: &Path) -> f64 {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/programs/eager.py");
        let output = self.container(variant).run(python, &[script]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {error}", python.display());
        container::lines_of(&output)[0][EAGER.field].as_f64().expect("a number")
    }

    /// One run of the program.
    fn run(&self, variant: Variant, measurement: &Measurement) -> f64 {
        let container = self.container(variant);
        let gpu = self.limited.grant.gpu_uuid.0.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string");
            text
        });
        let libraries = format!("LD_LIBRARY_PATH={}", self.programs.path().display());
        let gpu = format!("BENCH_GPU={gpu}");
        let calls = self.programs.path().join("calls");
        let mut arguments = vec![libraries.as_str(), gpu.as_str(), calls.to_str().expect("text")];
        arguments.extend(measurement.arguments);
        let lines = container::lines_of(&container.run("env", &arguments));
        lines[0][measurement.field].as_f64().expect("a number")
    }
}

/// The median of each variant, taken in turn.
fn medians(rounds: usize, mut run: impl FnMut(Variant) -> f64) -> [f64; 3] {
    let mut found = VARIANTS.map(|_| Vec::new());
    for round in 0..rounds {
        for at in 0..VARIANTS.len() {
            let at = (at + round) % VARIANTS.len();
            found[at].push(run(VARIANTS[at]));
        }
    }
    found.map(|mut each| {
        each.sort_by(f64::total_cmp);
        each[each.len() / 2]
    })
}

/// Prints the row of a measurement.
fn print(measurement: &Measurement, [none, unlimited, limited]: [f64; 3]) {
    let unlimited = cell(none, unlimited, measurement.goal_unlimited);
    let limited = cell(none, limited, measurement.goal_limited);
    println!("| {} | {} | {unlimited} | {limited} |", measurement.what, time(none));
}

fn compile(name: &str, arguments: &[&str], out: &Path) {
    let hook = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source: PathBuf = hook.join("benches/programs").join(name).with_extension("c");
    let mut command = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
    command.args(["-std=gnu11", "-Wall", "-Werror", "-O2", "-pthread", "-o"]).arg(out).arg(source);
    command.args(arguments).current_dir(hook);
    assert!(command.status().expect("a C compiler runs").success(), "{name} compiles");
}

/// A number of nanoseconds in the unit that suits it.
fn time(ns: f64) -> String {
    match ns.abs() {
        ..1e4 => format!("{ns:.1} ns"),
        1e4..1e7 => format!("{:.1} us", ns / 1e3),
        _ => format!("{:.1} ms", ns / 1e6),
    }
}

fn cell(none: f64, with: f64, goal: Option<f64>) -> String {
    let over = with - none;
    let verdict = match goal {
        Some(goal) if over <= goal => format!(" (goal {}: met)", time(goal)),
        Some(goal) => format!(" (goal {}: missed)", time(goal)),
        None => String::new(),
    };
    format!("{} = {:.2}x, +{}{verdict}", time(with), with / none, time(over))
}

fn rounds() -> usize {
    let given = env::var("ROUNDS").ok();
    given.map_or(3, |text| {
        text.parse().unwrap_or_else(|_| panic!("ROUNDS is a number, not `{text}`"))
    })
}

/// The rows that were asked for.
fn wanted(measurement: &&Measurement) -> bool {
    let mut words = env::args().skip(1).filter(|word| !word.starts_with('-')).peekable();
    words.peek().is_none() || words.any(|word| measurement.what.contains(&word))
}

fn main() {
    let rounds = rounds();
    let bench = Bench::new();
    println!("median of {rounds} rounds, in turn; over none in each row\n");
    println!("| | none | memory limited | memory and compute limited |\n|---|---|---|---|");
    for measurement in MEASUREMENTS.iter().filter(wanted) {
        eprintln!("{} ...", measurement.what);
        print(measurement, medians(rounds, |variant| bench.run(variant, measurement)));
    }
    if let Some(python) = env::var_os("TORCH").filter(|_| wanted(&&EAGER)) {
        eprintln!("{} ...", EAGER.what);
        print(&EAGER, medians(rounds, |variant| bench.run_eager(variant, python.as_ref())));
    }
    println!(
        "\ngrant and ledger of a share: {} bytes (goal: 65536 at most)",
        GRANT_LEN + LEDGER_LEN
    );
}
