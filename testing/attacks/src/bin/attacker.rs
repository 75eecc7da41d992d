//! `attacker`: a random attacker beside an honest namespace.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use kube::Client;
use tessera_attacks::attack::{
    self, AttackPlan, AttackReport, MeasuredProcesses, Progress, Target,
};
use tessera_attacks::cluster::{AttackedCluster, read_config};
use tessera_e2e::random::Random;

/// Attack a cluster from one namespace, and measure how long pods of another one wait.
///
/// First the honest namespace is alone. Then the hostile one creates, changes and deletes pods,
/// claims and templates of every legal shape. One GPU of each node is left to the honest one. Fails
/// if a device is overcommitted, a share allocated twice, an honest pod not served, or anything
/// left after both namespaces are deleted.
#[derive(Debug, Parser)]
#[command(name = "attacker", version)]
struct AttackerArgs {
    /// Seed of the attacker's choices [default: another in each run].
    #[arg(long)]
    seed: Option<u64>,
    /// Duration of the attack in minutes.
    #[arg(long, default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,
    /// Duration of the peace before it in minutes.
    #[arg(long, default_value_t = 2.0, value_parser = minutes)]
    peace: f64,
    /// Milliseconds between two pods of the honest namespace.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..))]
    interval: u64,
    /// Number of the attacker's clients. Each sends one request at a time.
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Most objects of each kind that a client of the attacker keeps.
    #[arg(long, default_value_t = 25)]
    objects: usize,
    /// Requests per second of each of the attacker's clients [default: as many as are answered].
    #[arg(long)]
    rate: Option<u32>,
    /// Let the attacker create DeviceClasses, too, with an administrator's rights.
    #[arg(long)]
    classes: bool,
    /// Kill or stop the controller of the simulated cluster at this interval in seconds during the
    /// attack, and start it again [default: never].
    #[arg(long, value_name = "SECONDS", conflicts_with = "kubeconfig", value_parser = clap::value_parser!(u64).range(1..))]
    restart_every: Option<u64>,
    /// Fail if the 99th percentile of the time until the allocation is longer than in peace by
    /// more than this factor.
    #[arg(long, value_name = "RATIO")]
    max_ratio: Option<f64>,
    /// Attack the cluster of this kubeconfig [default: a simulated cluster].
    #[arg(long, value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
    /// Image of the pods on the cluster of --kubeconfig.
    #[arg(long, default_value = "tessera/probe:e2e")]
    image: String,
    /// ID of a process to measure, with --kubeconfig. May be repeated.
    #[arg(long = "pid", value_name = "PID")]
    pids: Vec<u32>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Tables.
    Table,
    /// One object.
    Json,
}

fn minutes(text: &str) -> Result<f64, String> {
    let minutes: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    (minutes > 0.0 && minutes <= 10_000.0)
        .then_some(minutes)
        .ok_or_else(|| "not above 0 and up to 10000".to_owned())
}

impl AttackerArgs {
    fn plan(&self) -> AttackPlan {
        let duration = |minutes: f64| Duration::from_secs_f64(minutes * 60.0);
        AttackPlan {
            seed: self.seed.unwrap_or_else(Random::fresh_seed),
            peace: duration(self.peace),
            attack: duration(self.minutes),
            interval: Duration::from_millis(self.interval),
            workers: self.workers,
            objects: self.objects,
            rate: self.rate,
            classes: self.classes,
            restart_every: self.restart_every.map(Duration::from_secs),
        }
    }

    async fn attack(&self) -> anyhow::Result<AttackReport> {
        let Some(kubeconfig) = &self.kubeconfig else { return self.attack_simulated().await };
        let config = read_config(kubeconfig).await?;
        let target = Target {
            client: Client::try_from(config.clone())?,
            config,
            operations: None,
            processes: MeasuredProcesses::Listed(self.pids.clone()),
            image: self.image.clone(),
            has_rbac: true,
        };
        attack::run(&target, self.plan(), show).await
    }

    async fn attack_simulated(&self) -> anyhow::Result<AttackReport> {
        let cluster = AttackedCluster::start().await?.map_err(anyhow::Error::msg)?;
        let report = attack::run(&Target::simulated(&cluster)?, self.plan(), show).await?;
        cluster.stop().await.context("cannot stop the simulated cluster")?;
        Ok(report)
    }

    fn print(&self, report: &AttackReport) -> anyhow::Result<()> {
        match self.output {
            Output::Table => print!("{report}"),
            Output::Json => println!("{}", serde_json::to_string_pretty(report)?),
        }
        Ok(())
    }

    fn is_passed(&self, report: &AttackReport) -> bool {
        report.violations.is_empty() && self.max_ratio.is_none_or(|most| report.ratio() <= most)
    }
}

fn show(progress: &Progress) {
    let Progress { phase, elapsed, duration, served, waiting, requests, memory_mib } = progress;
    let (elapsed, duration) = (elapsed.as_secs(), duration.as_secs());
    let memory = memory_mib.iter().map(|(process, mib)| format!("{process} {mib:.0} MiB"));
    eprintln!(
        "{phase} {elapsed} of {duration} s: {served} honest pods served, {waiting} waiting; \
         {requests} hostile requests; {}",
        memory.collect::<Vec<_>>().join(", ")
    );
}

async fn run(args: &AttackerArgs) -> anyhow::Result<ExitCode> {
    let report = args.attack().await?;
    args.print(&report)?;
    Ok(if args.is_passed(&report) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[tokio::main]
async fn main() -> ExitCode {
    run(&AttackerArgs::parse()).await.unwrap_or_else(|error| {
        eprintln!("attacker: {error:#}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        use clap::CommandFactory;
        AttackerArgs::command().debug_assert();
    }

    #[test]
    fn accepts_minutes_above_zero() {
        assert_eq!(minutes("0.5"), Ok(0.5));
        for text in ["", "0", "-1", "NaN", "inf"] {
            assert!(minutes(text).is_err(), "{text}");
        }
    }
}
