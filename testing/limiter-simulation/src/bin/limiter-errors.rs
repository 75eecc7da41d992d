//! Prints the accuracy of caps: the tables of `docs/benchmarks/limiter.md`.
//!
//! ```text
//! cargo run --release -p tessera-intercept-simulation --bin limiter-errors
//! ```

use std::process::ExitCode;

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_simulation::{
    Accuracy, CoTenant, Limiter, MS, Pattern, S, US, Workload, measure, unlimited,
};

const KERNELS: [(&str, u64); 15] = [
    ("2 us", 2 * US),
    ("3 us", 3 * US),
    ("5 us", 5 * US),
    ("10 us", 10 * US),
    ("20 us", 20 * US),
    ("50 us", 50 * US),
    ("500 us", 500 * US),
    ("900 us", 900 * US),
    ("1.5 ms", 1_500 * US),
    ("2.3 ms", 2_300 * US),
    ("3.5 ms", 3_500 * US),
    ("5 ms", 5 * MS),
    ("50 ms", 50 * MS),
    ("500 ms", 500 * MS),
    ("2 s", 2 * S),
];
const PATTERNS: [(&str, Pattern); 3] =
    [("sync", Pattern::Sync { gap: 0 }), ("async", Pattern::Async), ("graph", Pattern::Graph)];
const TESSERA: Limiter = Limiter::Tessera(ComputePolicy::Fixed);

/// Worst results of several cells of a table.
#[derive(Default)]
struct Worst {
    short: f64,
    long: f64,
    sum: f64,
    cells: usize,
    co_tenant: Option<f64>,
}

impl Worst {
    fn add(&mut self, accuracy: &Accuracy) {
        self.short = self.short.max(accuracy.short * 100.0);
        self.long = self.long.max(accuracy.long * 100.0);
        self.sum += (accuracy.actual - accuracy.expected).abs() * 100.0;
        self.cells += 1;
        if let Some(co_tenant) = accuracy.co_tenant {
            self.co_tenant = Some(self.co_tenant.map_or(co_tenant, |least| least.min(co_tenant)));
        }
    }

    fn row(&self) -> String {
        let co_tenant =
            self.co_tenant.map_or("-".to_owned(), |part| format!("{:.1} %", part * 100.0));
        let mean = self.sum / self.cells as f64;
        format!("{:.1} | {:.1} | {mean:.2} | {co_tenant}", self.short, self.long)
    }
}

fn add_caps(worst: &mut Worst, workload: &Workload, limiter: Limiter, percents: &[u32]) {
    let free = unlimited(workload, 1);
    for percent in percents {
        worst.add(&measure(workload, limiter, *percent, free, 1));
    }
}

fn print_by_kernel() {
    println!(
        "| co-tenant | pattern | kernel | worst, short | worst, long | mean | co-tenant keeps |"
    );
    println!("|---|---|---|---|---|---|---|");
    for co_tenant in [CoTenant::None, CoTenant::Capped, CoTenant::Unlimited] {
        for (pattern_name, pattern) in PATTERNS {
            for (kernel_name, kernel) in KERNELS {
                let mut worst = Worst::default();
                for processes in [1, 3, 8] {
                    let workload =
                        Workload { processes, co_tenant, ..Workload::new(kernel, pattern) };
                    add_caps(&mut worst, &workload, TESSERA, &[10, 30, 50, 70, 90]);
                }
                println!("| {co_tenant:?} | {pattern_name} | {kernel_name} | {} |", worst.row());
            }
        }
    }
}

/// Prints the worst of 2, 4 and 8 streams, whose kernels fit beside each other or do not.
fn print_by_streams() {
    println!(
        "| co-tenant | pattern | kernel | worst, short | worst, long | mean | co-tenant keeps |"
    );
    println!("|---|---|---|---|---|---|---|");
    let patterns = [("async", Pattern::Async), ("batches", Pattern::Batch { launches: 16 })];
    for co_tenant in [CoTenant::None, CoTenant::Unlimited] {
        for (pattern_name, pattern) in patterns {
            for (kernel_name, kernel) in
                [("20 us", 20 * US), ("200 us", 200 * US), ("2 ms", 2 * MS)]
            {
                let mut worst = Worst::default();
                for (streams, fill_percent, processes) in programs_with_streams() {
                    let workload = Workload {
                        processes,
                        streams,
                        fill_percent,
                        co_tenant,
                        ..Workload::new(kernel, pattern)
                    };
                    add_caps(&mut worst, &workload, TESSERA, &[10, 30, 50, 70, 90]);
                }
                println!("| {co_tenant:?} | {pattern_name} | {kernel_name} | {} |", worst.row());
            }
        }
    }
}

/// Returns numbers of streams, parts of the SMs that a kernel fills in percent, and numbers of
/// processes.
fn programs_with_streams() -> impl Iterator<Item = (usize, u32, usize)> {
    let streams = [2, 4, 8].into_iter();
    streams.flat_map(|streams| {
        [12, 25, 60]
            .into_iter()
            .flat_map(move |fill| [1, 3].map(|processes| (streams, fill, processes)))
    })
}

fn print_by_limiter() {
    println!("| limiter | co-tenant | worst, short | worst, long | mean | co-tenant keeps |");
    println!("|---|---|---|---|---|---|");
    for (name, limiter) in
        [("tessera", TESSERA), ("AIMD", Limiter::Aimd), ("HAMi-core", Limiter::Hami)]
    {
        for co_tenant in [CoTenant::None, CoTenant::Unlimited] {
            let mut worst = Worst::default();
            for (_, pattern) in PATTERNS {
                for kernel in [50 * US, 500 * US, 5 * MS, 50 * MS] {
                    for processes in [1, 3] {
                        let workload =
                            Workload { processes, co_tenant, ..Workload::new(kernel, pattern) };
                        add_caps(&mut worst, &workload, limiter, &[10, 30, 50, 70, 90]);
                    }
                }
            }
            println!("| {name} | {co_tenant:?} | {} |", worst.row());
        }
    }
}

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => {
            print_by_kernel();
            println!();
            print_by_streams();
            println!();
            print_by_limiter();
            ExitCode::SUCCESS
        }
        Some("streams") => {
            print_by_streams();
            ExitCode::SUCCESS
        }
        Some("others") => {
            print_by_limiter();
            ExitCode::SUCCESS
        }
        Some(other) => {
            eprintln!(
                "limiter-errors: unknown argument `{other}`: expected none, `streams` for the second table only, or `others` for the third"
            );
            ExitCode::FAILURE
        }
    }
}
