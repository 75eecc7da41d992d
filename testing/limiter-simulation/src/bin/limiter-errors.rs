//! Prints how well caps are held: the tables of `docs/benchmarks/limiter.md`.
//!
//! ```text
//! cargo run --release -p tessera-intercept-simulation --bin limiter-errors
//! ```

use std::process::ExitCode;

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_simulation::{
    Company, Judged, Limiter, MS, Pattern, S, US, Workload, judge, unlimited,
};

const KERNELS: [(&str, u64); 11] = [
    ("5 us", 5 * US),
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
const OURS: Limiter = Limiter::Tessera(ComputePolicy::Fixed);

/// The worst of several cells of a table.
#[derive(Default)]
struct Worst {
    short: f64,
    long: f64,
    sum: f64,
    cells: usize,
    neighbour: Option<f64>,
}

impl Worst {
    fn add(&mut self, judged: &Judged) {
        self.short = self.short.max(judged.short * 100.0);
        self.long = self.long.max(judged.long * 100.0);
        self.sum += (judged.had - judged.expected).abs() * 100.0;
        self.cells += 1;
        if let Some(neighbour) = judged.neighbour {
            self.neighbour = Some(self.neighbour.map_or(neighbour, |least| least.min(neighbour)));
        }
    }

    fn row(&self) -> String {
        let neighbour =
            self.neighbour.map_or("-".to_owned(), |part| format!("{:.1} %", part * 100.0));
        let mean = self.sum / self.cells as f64;
        format!("{:.1} | {:.1} | {mean:.2} | {neighbour}", self.short, self.long)
    }
}

fn caps(worst: &mut Worst, workload: &Workload, limiter: Limiter, percents: &[u32]) {
    let free = unlimited(workload, 1);
    for percent in percents {
        worst.add(&judge(workload, limiter, *percent, free, 1));
    }
}

fn every_kernel() {
    println!(
        "| company | pattern | kernel | worst, short | worst, long | mean | neighbour keeps |"
    );
    println!("|---|---|---|---|---|---|---|");
    for company in [Company::Nobody, Company::Unlimited] {
        for (pattern_name, pattern) in PATTERNS {
            for (kernel_name, kernel) in KERNELS {
                let mut worst = Worst::default();
                for processes in [1, 3, 8] {
                    let workload = Workload { kernel, pattern, processes, company };
                    caps(&mut worst, &workload, OURS, &[10, 30, 50, 70, 90]);
                }
                println!("| {company:?} | {pattern_name} | {kernel_name} | {} |", worst.row());
            }
        }
    }
}

fn beside_others() {
    println!("| limiter | company | worst, short | worst, long | mean | neighbour keeps |");
    println!("|---|---|---|---|---|---|");
    for (name, limiter) in [("ours", OURS), ("AIMD", Limiter::Aimd), ("HAMi-core", Limiter::Hami)] {
        for company in [Company::Nobody, Company::Unlimited] {
            let mut worst = Worst::default();
            for (_, pattern) in PATTERNS {
                for kernel in [50 * US, 500 * US, 5 * MS, 50 * MS] {
                    for processes in [1, 3] {
                        let workload = Workload { kernel, pattern, processes, company };
                        caps(&mut worst, &workload, limiter, &[10, 30, 50, 70, 90]);
                    }
                }
            }
            println!("| {name} | {company:?} | {} |", worst.row());
        }
    }
}

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => {
            every_kernel();
            println!();
            beside_others();
            ExitCode::SUCCESS
        }
        Some("others") => {
            beside_others();
            ExitCode::SUCCESS
        }
        Some(other) => {
            eprintln!(
                "limiter-errors: `{other}` is not known: give nothing, or `others` for the second table alone"
            );
            ExitCode::FAILURE
        }
    }
}
