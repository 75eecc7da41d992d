//! Report that compares the rounds of two allocators.

use std::fmt;

use anyhow::Context;
use serde::Serialize;

use super::plan::{Allocator, Limits};
use super::quantiles::median;
use super::round::Round;

/// The machine on which the figures were taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Processor model.
    pub cpu: String,
    /// Processors available to this process.
    pub cores: usize,
    /// Kernel release.
    pub linux: String,
}

impl Machine {
    /// Returns this machine.
    pub fn this() -> Self {
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("?");
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: model.trim_start_matches([' ', '\t', ':']).to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            linux: release.trim().to_owned(),
        }
    }
}

/// One figure with both allocators, over all rounds at one limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the figure, with its unit.
    pub what: String,
    /// Values of the first allocator, one per round.
    pub baseline: Vec<f64>,
    /// Values of the second, one per round.
    pub compared: Vec<f64>,
    /// Median of the second divided by the median of the first; `None` if one is missing or zero.
    pub ratio: Option<f64>,
}

/// The comparisons at one limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// Client limits of kube-controller-manager and kube-scheduler.
    pub limits: Limits,
    /// The allocators: the baseline, and the one that is compared with it.
    pub allocators: [Allocator; 2],
    /// The figures.
    pub figures: Vec<Comparison>,
}

/// Result of a benchmark run. It is displayed as tables.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The machine.
    pub machine: Machine,
    /// One table per limit.
    pub tables: Vec<Table>,
    /// The rounds in the order of execution.
    pub rounds: Vec<Round>,
}

/// A figure's name, and the function that reads it from a round.
type Figure = (String, Box<dyn Fn(&Round) -> Option<f64>>);

impl Report {
    /// Creates a report from rounds.
    pub fn new(machine: Machine, rounds: Vec<Round>) -> Self {
        let mut limits: Vec<Limits> = Vec::new();
        for round in &rounds {
            if !limits.contains(&round.limits) {
                limits.push(round.limits);
            }
        }
        let tables = limits.into_iter().map(|limits| table(limits, &rounds)).collect();
        Self { machine, tables, rounds }
    }

    /// Creates a report from rounds in JSON, one per line.
    ///
    /// # Errors
    /// Returns an error if a line is not a valid round.
    pub fn from_lines(machine: Machine, lines: &str) -> anyhow::Result<Self> {
        let round = |(number, line)| {
            serde_json::from_str(line)
                .with_context(|| format!("line {} is not a valid round", number + 1))
        };
        let rounds =
            lines.lines().enumerate().map(round).collect::<anyhow::Result<Vec<Round>>>()?;
        Ok(Self::new(machine, rounds))
    }
}

fn table(limits: Limits, rounds: &[Round]) -> Table {
    let rounds: Vec<&Round> = rounds.iter().filter(|round| round.limits == limits).collect();
    let is_of = |allocator| rounds.iter().any(|round| round.allocator == allocator);
    let allocators = match is_of(Allocator::Dialects) {
        true => [Allocator::Converted, Allocator::Dialects],
        false => [Allocator::Stock, Allocator::Tessera],
    };
    let figures = figures(&rounds).into_iter().map(|(what, read)| {
        let of = |allocator| {
            let of = rounds.iter().filter(|round| round.allocator == allocator);
            of.filter_map(|round| read(round)).collect::<Vec<f64>>()
        };
        let [baseline, compared] = allocators.map(of);
        let ratio = median(&compared)
            .zip(median(&baseline))
            .and_then(|(compared, baseline)| (baseline > 0.0).then_some(compared / baseline));
        Comparison { what, baseline, compared, ratio }
    });
    Table { limits, allocators, figures: figures.collect() }
}

fn figures(rounds: &[&Round]) -> Vec<Figure> {
    let figure = |what: &str, read: fn(&Round) -> f64| -> Figure {
        (what.to_owned(), Box::new(move |round: &Round| Some(read(round))))
    };
    let mut figures = vec![
        figure("pods bound per second", |r| r.bound_per_second),
        figure("creation to binding, p50, s", |r| r.to_binding.p50_s),
        figure("creation to binding, p99, s", |r| r.to_binding.p99_s),
        figure("  creation to claim, p50, s", |r| r.to_claim.p50_s),
        figure("  claim to allocation, p50, s", |r| r.claim_to_allocation.p50_s),
        figure("  claim to allocation, p99, s", |r| r.claim_to_allocation.p99_s),
        figure("  allocation to binding, p50, s", |r| r.allocation_to_binding.p50_s),
        figure("  allocation to binding, p99, s", |r| r.allocation_to_binding.p99_s),
        figure("failed attempts of kube-scheduler", |r| r.failed_attempts),
    ];
    figures.push((
        "CPU of all components, s".to_owned(),
        Box::new(|r| Some(r.usage.values().map(|u| u.cpu_s).sum())),
    ));
    let mut components: Vec<String> =
        rounds.iter().flat_map(|round| round.usage.keys().cloned()).collect();
    components.sort();
    components.dedup();
    for component in components {
        let of = component.clone();
        figures
            .push((format!("  of {component}"), Box::new(move |r| Some(r.usage.get(&of)?.cpu_s))));
        if component.starts_with("tessera-") {
            figures.push((
                format!("memory of {component}, peak, MiB"),
                Box::new(move |r| Some(r.usage.get(&component)?.peak_rss_mib)),
            ));
        }
    }
    figures.push(figure("CPU of everything else on the machine, s", |r| r.other_processes_s));
    figures
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cpu, cores, linux } = &self.machine;
        writeln!(f, "machine: {cores} x {cpu}, Linux {linux}")?;
        if let Some(Round { kubernetes, workload: w, .. }) = self.rounds.first() {
            let pace = w.rate.map_or_else(
                || "as fast as possible".to_owned(),
                |rate| format!("{rate} per second"),
            );
            writeln!(
                f,
                "Kubernetes {kubernetes}; {} pods, created {pace}, on {} nodes x {} GPUs;",
                w.pods, w.nodes, w.gpus
            )?;
            writeln!(
                f,
                "each requests {} GiB and {} percent of one GPU of 80 GiB",
                w.memory, w.cores
            )?;
        }
        for table in &self.tables {
            write!(f, "\n{table}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limits {
            Limits::Default => {
                writeln!(f, "client limits of kube-controller-manager and kube-scheduler: default")?
            }
            Limits::PerSecond(limit) => {
                writeln!(
                    f,
                    "client limits of kube-controller-manager and kube-scheduler: {limit} per second"
                )?;
            }
        }
        writeln!(
            f,
            "{:<40} {:>24} {:>24} {:>8}",
            "median (min to max)",
            self.allocators[0].to_string(),
            self.allocators[1].to_string(),
            "ratio"
        )?;
        for figure in &self.figures {
            let ratio = figure.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
            writeln!(
                f,
                "{:<40} {:>24} {:>24} {ratio:>8}",
                figure.what,
                spread(&figure.baseline),
                spread(&figure.compared)
            )?;
        }
        Ok(())
    }
}

/// Formats the median, minimum and maximum of samples.
fn spread(samples: &[f64]) -> String {
    let Some(middle) = median(samples) else { return "-".to_owned() };
    let min = samples.iter().copied().fold(f64::INFINITY, f64::min);
    let max = samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match samples.len() {
        1 => format!("{middle:.2}"),
        _ => format!("{middle:.2} ({min:.2} to {max:.2})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::throughput::plan::Workload;
    use crate::throughput::round::DurationQuantiles;
    use crate::throughput::usage::{Usage, Usages};

    fn round(allocator: Allocator, limits: Limits, bound_per_second: f64) -> Round {
        let times = DurationQuantiles { p50_s: 1.0, p99_s: 2.0, max_s: 3.0 };
        let mut usage =
            Usages::from([("etcd".to_owned(), Usage { cpu_s: 1.0, peak_rss_mib: 30.0 })]);
        if allocator == Allocator::Tessera {
            usage.insert("tessera-controller".to_owned(), Usage { cpu_s: 0.5, peak_rss_mib: 40.0 });
        }
        Round {
            allocator,
            limits,
            workload: Workload {
                pods: 500,
                nodes: 300,
                gpus: 8,
                memory: 20,
                cores: 25,
                rate: None,
            },
            kubernetes: "v1.37.1".to_owned(),
            bound_per_second,
            creating_s: 1.0,
            to_binding: times,
            to_claim: times,
            claim_to_allocation: times,
            allocation_to_binding: times,
            failed_attempts: 0.0,
            usage,
            other_processes_s: 0.0,
        }
    }

    fn machine() -> Machine {
        Machine { cpu: "test CPU".to_owned(), cores: 2, linux: "6.1".to_owned() }
    }

    fn figure<'t>(table: &'t Table, what: &str) -> &'t Comparison {
        table.figures.iter().find(|figure| figure.what.trim() == what).unwrap()
    }

    #[test]
    fn ratio_compares_medians_within_one_limit() {
        let other = Limits::PerSecond(5000);
        let rounds = vec![
            round(Allocator::Stock, Limits::Default, 10.0),
            round(Allocator::Tessera, Limits::Default, 8.0),
            round(Allocator::Tessera, Limits::Default, 12.0),
            round(Allocator::Stock, Limits::Default, 30.0),
            round(Allocator::Stock, other, 100.0),
            round(Allocator::Tessera, other, 150.0),
        ];
        let report = Report::new(machine(), rounds);
        let limits: Vec<Limits> = report.tables.iter().map(|table| table.limits).collect();
        assert_eq!(limits, [Limits::Default, other]);
        let throughput =
            |table: usize| figure(&report.tables[table], "pods bound per second").ratio;
        assert_eq!((throughput(0), throughput(1)), (Some(0.5), Some(1.5)));
    }

    #[test]
    fn figure_of_one_allocator_has_no_ratio() {
        let rounds = vec![
            round(Allocator::Stock, Limits::Default, 10.0),
            round(Allocator::Tessera, Limits::Default, 10.0),
        ];
        let report = Report::new(machine(), rounds);
        let memory = figure(&report.tables[0], "memory of tessera-controller, peak, MiB");
        assert_eq!(
            (memory.baseline.as_slice(), memory.compared.as_slice(), memory.ratio),
            (&[][..], &[40.0][..], None)
        );
        let text = report.to_string();
        assert!(
            text.contains("500 pods, created as fast as possible, on 300 nodes x 8 GPUs"),
            "{text}"
        );
    }

    #[test]
    fn reads_rounds_from_json_lines() {
        let rounds = vec![
            round(Allocator::Stock, Limits::PerSecond(50), 10.0),
            round(Allocator::Tessera, Limits::Default, 10.0),
        ];
        let lines: Vec<String> =
            rounds.iter().map(|round| serde_json::to_string(round).unwrap()).collect();
        assert_eq!(
            Report::from_lines(machine(), &lines.join("\n")).unwrap(),
            Report::new(machine(), rounds)
        );
        let error = Report::from_lines(machine(), &format!("{}\nnonsense", lines[0]))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "line 2 is not a valid round");
    }
}
